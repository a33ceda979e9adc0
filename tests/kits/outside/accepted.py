"""Tests of other projects that a patched model may fail, each with the reason."""

from __future__ import annotations

import re

#: Arms, a pattern of the test's name, a pattern of its error, and the reason. The first that fits counts.
ACCEPTED: list[tuple[str, str, str, str]] = [
    (
        "alibi t5",
        "test_batching_equivalence",
        "Batched and Single",
        "outputs at padding tokens differ, because their positions depend on the batch; no other token reads them",
    ),
    (
        "native alibi t5",
        "test_from_pretrained_no_checkpoint|test_load_with_mismatched_shapes",
        "SchemeMismatchError|UnsupportedError.*passed as `config`",
        "weights of a patched model are loaded with the config of a stock model, which a patch does not write into",
    ),
    (
        "native alibi t5",
        "test_model_weights_reload_no_missing_tied_weights",
        "SchemeMismatchError|CheckpointError",
        "the weights of a patched model are replaced by a file that does not name its scheme",
    ),
    (
        "native alibi t5",
        "test_encoder_decoder_model_standalone",
        "it is a part of a patched model",
        "a part of a patched model is saved alone",
    ),
    (
        "native",
        "test_all_tensors_are_parameter_or_buffer|test_can_be_initialized_on_meta|test_init_weights_can_init_buffers",
        "this model is on the meta device",
        "the native scheme of a rotary model is read from a run, which the meta device cannot do",
    ),
    (
        "alibi t5",
        "test_model_rope_scaling_from_config",
        "AssertionError",
        "a scaling of RoPE has no effect on a scheme that replaces RoPE",
    ),
    (
        "native alibi t5",
        "PrefixTuning|PromptTuning|PromptEncoder|CPT",
        "This PEFT does not notice the cache",
        "PEFT does not notice the cache in prompt and prefix tuning, so stock models generate wrong tokens",
    ),
    (
        "alibi t5",
        "test_generate_compil|test_static_cache_no_recompile",
        "differ from the count over mask or slots",
        "`generate` gives tokens after right padding positions that do not follow the mask (transformers warns), and a "
        "compiled graph cannot record them",
    ),
]


def reason(arm: str, test: str, error: str) -> str | None:
    """Why a difference is accepted; `None` if it is not."""
    for arms, name, message, why in ACCEPTED:
        if arm in arms.split() and re.search(name, test) and re.search(message, error):
            return why
    return None
