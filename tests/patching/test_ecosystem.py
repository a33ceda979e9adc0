"""Patched models among the tools around them: generate, compile, flex attention, accelerate hooks, PEFT."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import compile_regions
from transformers import EncoderDecoderConfig, EncoderDecoderModel

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model
from tests.architectures.calling import Caller
from tests.architectures.population import pair_named
from tests.integrations.subject import NEW_TOKENS, argmax_decoding, left_padded
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, freshly_compiled, outputs, patched, placed, tokens
from tests.models import tiny_config
from tests.thinning import in_turn, mostly_slow

pytestmark = pytest.mark.usefixtures("without_gradients")
#: One for each mechanism: nothing, two distance biases, a rotation, an additive scheme; a bias with features in the
#: cache, one that reads queries, a map that widens heads, a correction of far pairs, and a scale.
SCHEMES: list[Any] = [
    "none",
    "alibi",
    "t5",
    "rope",
    "sinusoidal",
    "forget_gate",
    {"scheme": "shaw", "max_distance": 4},
    "pope",
    {"scheme": "self_extend", "window": 4, "group": 2},
    "ssmax",
]


def _name(scheme: Any) -> str:
    """Of a scheme, or any other word."""
    return scheme if isinstance(scheme, str) else scheme["scheme"]


@pytest.mark.parametrize(
    ("scheme", "architecture"),
    in_turn(["none", "t5", "forget_gate", "pope", "normalized_integer"], ["gpt2", "gemma3_two_rotaries", "bloom"]),
)
def test_generate_equals_argmax_over_full_forwards(architecture: str, scheme: str) -> None:
    model, prompt = patched(architecture, scheme), tokens(2, 6)
    expected = argmax_decoding(model, prompt)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    static = scheme != "normalized_integer" and ARCHITECTURES[architecture].static_cache
    for padding in (0, 2):
        for cache in (None, "static") if static else (None,):
            found = model.generate(**left_padded(prompt, padding), cache_implementation=cache, **settings)
            assert torch.equal(found[:, padding:], expected)


@pytest.mark.parametrize(
    ("scheme", "stance"),
    mostly_slow(product(SCHEMES, ["force_eager", "default"]), lambda case: case[1] == "force_eager"),
    ids=_name,
)
def test_flex_attention_equals_eager(scheme: str, stance: str) -> None:
    """As plain operations, and compiled, which takes half a minute where nothing is in the compiler's cache."""
    overrides = {"hidden_size": 64, "head_dim": 16}
    expected = outputs(patched("llama_gqa", scheme, **overrides), tokens())
    model = patched("llama_gqa", scheme, **overrides)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance(stance):
        assert distance(outputs(model, tokens()), expected) <= 1e-4


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_slow(SCHEMES, lambda scheme: scheme == "t5"), ids=_name)
def test_compiled_scores_outside_the_interface_and_compiled_layers(scheme: str) -> None:
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), "use_cache": False}
    model = patched("gptj", scheme, n_layer=1)
    expected = model(tokens(1, 8), use_cache=False).logits
    assert distance(freshly_compiled(model)(tokens(1, 8), use_cache=False).logits, expected) <= 1e-5
    model = patched("llama_gqa", scheme, num_hidden_layers=1)
    expected = model(tokens(1, 8), **packed).logits
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    assert distance(model(tokens(1, 8), **packed).logits, expected) <= 1e-4


class Count(ModelHook):
    calls = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize(
    ("when", "scheme"), in_turn(["stays", "comes later", "leaves early"], ["alibi", "rope", "learned"])
)
def test_hooks_may_come_and_go_while_a_model_is_patched(when: str, scheme: str) -> None:
    model, hook, ids = patched("gpt2", None), Count(), tokens()
    stock, expected = model(ids).logits, patched("gpt2", scheme if scheme != "learned" else "native")(ids).logits
    attention = model.transformer.h[0].attn
    if when != "comes later":
        add_hook_to_module(attention, hook)
    patch_model(model, scheme)
    if when == "comes later":
        add_hook_to_module(attention, hook)
    if when == "leaves early":
        remove_hook_from_module(attention)
    before = hook.calls
    assert distance(model(ids).logits, expected) <= 1e-6
    assert hook.calls - before == (when != "leaves early")
    unpatch_model(model)
    assert torch.equal(model(ids).logits, stock)
    assert ("_hf_hook" in attention.__dict__) == (when != "leaves early")


@pytest.mark.parametrize(("scheme", "offloaded_first"), in_turn([
    ["rope", "forget_gate", "ssmax"], "string", "pope", {"scheme": "fope", "learnable": True}, "learned_rope",
    "learned", "t5",
], [False, True]), ids=str)  # fmt: skip
def test_weights_that_are_kept_elsewhere_come_when_they_are_needed(scheme: Any, offloaded_first: bool) -> None:
    expected = patched("llama_gqa", scheme)(tokens()).logits
    model = patched("llama_gqa", None if offloaded_first else scheme)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    if offloaded_first:
        placed(model, scheme)
    else:
        assert any(parameter.is_meta for parameter in model.position_encoding.parameters())
    assert distance(model(tokens()).logits, expected) <= 1e-6
    assert offloaded_first or all(parameter.is_meta for parameter in model.position_encoding.parameters())


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [
            *("masked-bert", "encoder-t5", "masked-mpnet", "seq2seq-marian", "vision-vit", "vision-swin"),
            *("vision-swinv2", "audio-wav2vec2-bert", "audio-wav2vec2-conformer", "audio-parakeet_ctc"),
        ],
        {"masked-bert", "encoder-t5", "seq2seq-marian", "vision-vit", "vision-swinv2"}.__contains__,
    ),
)
def test_native_tables_that_are_kept_elsewhere_are_read(name: str) -> None:
    caller = Caller(pair_named(name))
    stock, native = caller.outputs(), native_scheme(caller.model)
    cpu_offload(caller.model, execution_device=torch.device("cpu"))
    assert native_scheme(caller.model) == native
    patch_model(caller.model, native)
    torch.testing.assert_close(caller.outputs(), stock, rtol=0, atol=1e-4)
    unpatch_model(caller.model)
    torch.testing.assert_close(caller.outputs(), stock, rtol=0, atol=1e-5)


def test_parts_patched_on_their_own() -> None:
    both = EncoderDecoderConfig.from_encoder_decoder_configs(tiny_config("BertModel"), tiny_config("BertModel"))
    model = EncoderDecoderModel(config=both).eval()
    ids = torch.arange(5, 11).unsqueeze(0)
    stock = model(input_ids=ids, decoder_input_ids=ids).logits
    patch_model(model.encoder, "alibi")
    patch_model(model.decoder, "rope")
    with pytest.raises(UnsupportedError, match="patched on its own"):
        patch_model(model, "none")
    unpatch_model(model)
    assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, stock)


@pytest.mark.parametrize("scheme", [None, "alibi", "fire"])
def test_accelerate_compiles_the_layers_in_few_graphs(scheme: str | None) -> None:
    ids, graphs = tokens(), []
    model = ARCHITECTURES["llama_gqa"].build(num_hidden_layers=4).eval()
    if scheme is not None:
        patch_model(model, scheme)
    wanted = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    compiled = compile_regions(model, backend=lambda graph, _: graphs.append(graph) or graph)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, wanted)
    # The first layer computes what the others share.
    assert 1 <= sum("k_proj" in str(graph.code) for graph in graphs) <= 2
