"""What cannot be computed right is refused at the call, with words that help; what can, works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import (
    BuildContext,
    DistanceBias,
    NoneConfig,
    SchemeParts,
    UnsupportedError,
    inspect_model,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.matrix.running import distance, patched, tokens
from tests.models import tiny
from tests.versions import ONE_AXIS, since

SELF_EXTEND = {"scheme": "self_extend", "window": 4, "group": 2}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def continued(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    result: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **(GREEDY | arguments))
    return result


# Assisted decoding


def assistant(scheme: Any) -> Any:
    """Agrees with the model it assists now and then."""
    model = patched("llama_gqa", scheme)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("scheme", [SELF_EXTEND, "forget_gate", "alibi"], ids=str)
def test_a_generated_token_with_the_id_of_the_padding_is_a_token_for_an_assistant(scheme: Any) -> None:
    model, helper, ids = patched("llama_gqa", "rope"), assistant(scheme), tokens(1, 8, 2)
    expected = continued(model, ids, max_new_tokens=16, use_cache=False)
    assert (expected == GREEDY["pad_token_id"]).any()
    seen = []
    helper.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    assert torch.equal(continued(model, ids, max_new_tokens=16, assistant_model=helper), expected)
    assert seen
    assert all(mask is None or mask.all() for mask in seen)  # nothing is taken for padding
    other_way = continued(helper, ids, max_new_tokens=16, use_cache=False)
    assert torch.equal(continued(helper, ids, max_new_tokens=16, assistant_model=model), other_way)


@pytest.mark.parametrize(
    "asked",
    [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}, {"prefill_chunk_size": 3}, {"assistant_model": 1}],
    ids=lambda asked: next(iter(asked)),
)
def test_a_scheme_that_no_cache_serves_refuses_what_needs_one(asked: dict[str, Any]) -> None:
    model, ids = patched("llama_gqa", "normalized_integer"), tokens(1, 8)
    (name,) = asked
    if name == "assistant_model":
        asked = {name: patched("llama_gqa", None)}
    ran = []
    hook = model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedError, match=f"{name} needs a growing cache, which cannot run"):
        continued(model, ids, max_new_tokens=4, **asked)
    hook.remove()
    assert not ran
    assert continued(model, ids, max_new_tokens=4).shape == (1, 12)


def test_an_assistant_that_no_cache_serves_is_refused_by_its_name() -> None:
    stock, helper, ids = patched("llama_gqa", None), patched("llama_gqa", "normalized_integer"), tokens(1, 8)
    with pytest.raises(UnsupportedError, match=r"This assistant model cannot draft.*the scheme 'normalized_integer'"):
        continued(stock, ids, max_new_tokens=6, assistant_model=helper)


def test_a_cache_that_is_asked_for_is_refused_where_it_would_be_wrong() -> None:
    model, ids = patched("llama_gqa", "normalized_integer"), tokens(1, 8)
    with pytest.raises(UnsupportedError, match="Generate with use_cache=False"):
        continued(model, ids, max_new_tokens=4, use_cache=True)


# Prefix tuning


def with_prefix(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with torch.no_grad():
        tuned.prompt_encoder["default"].embedding.weight.normal_(std=0.5)
    return tuned.eval()


@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt2"])
@torch.no_grad()
def test_the_native_scheme_uses_keys_of_a_prefix_as_the_stock_model_does(architecture: str) -> None:
    ids = tokens(2, 9)
    found, stock = (with_prefix(patched(architecture, scheme))(input_ids=ids).logits for scheme in ("native", None))
    assert distance(found, stock) <= 1e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scheme", "part", "width"), [("pope", "PopeMap", 16), ("forget_gate", "ForgetGateBias", 12)])
@torch.no_grad()
def test_a_prefix_cannot_say_what_a_scheme_adds_to_keys(scheme: str, part: str, width: int) -> None:
    model, ids = with_prefix(patched("llama_gqa", scheme)), tokens(2, 9)
    reason = f"The cache holds keys of width 8, but with {part} this LlamaAttention caches keys of width"
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        model(input_ids=ids)
    assert f"width {width}." in str(refusal.value)
    assert "Use LoRA or prompt tuning with this scheme" in str(refusal.value)


# Parts of models


VERBS: list[Callable[[Any], Any]] = [
    *(functools.partial(patch_model, scheme=scheme) for scheme in ("native", "none", "rope_nd", "learned")),
    native_scheme,
    inspect_model,
]


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("audio-text-whisper", "encoder", ("is a part of a model and is saved with it", "`part=` chooses the part")),
        ("audio-text-whisper", "decoder", ("is a part of a model and is saved with it", "`part=` chooses the part")),
        ("seq2seq-bart", "decoder", ("Patch the whole model",)),
    ],
)
def test_a_part_that_is_saved_with_its_model_is_refused_by_every_verb(
    name: str, path: str, words: tuple[str, ...]
) -> None:
    part, said = tiny_model(pair_named(name)).model.get_submodule(path), set()
    for verb in VERBS:
        with pytest.raises(UnsupportedError) as refusal:
            verb(part)
        said.add(str(refusal.value))
    assert len(said) == 1
    assert all(word in text for word in words for text in said)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("image-text-qwen2_5_vl", "model.language_model"),
        ("image-text-llava", "model.language_model"),
        ("image-text-clip", "text_model"),
    ],
)
@torch.no_grad()
def test_the_text_part_of_a_composite_takes_its_native_scheme(name: str, path: str) -> None:
    if "qwen" in name:
        since(*ONE_AXIS)
    part, ids = tiny_model(pair_named(name)).get_submodule(path), tokens(2, 9)
    stock = part(input_ids=ids).last_hidden_state
    assert distance(patch_model(part, "native")(input_ids=ids).last_hidden_state, stock) <= 1e-5
    assert distance(patch_model(part, "none")(input_ids=ids).last_hidden_state, stock) > 1e-2
    assert torch.equal(unpatch_model(part)(input_ids=ids).last_hidden_state, stock)


def test_a_bias_of_the_wrong_shape_is_named_when_it_is_placed() -> None:
    class FlatBias(DistanceBias):
        def forward(self, distance: torch.Tensor) -> torch.Tensor:
            return -distance.abs().float()

    class FlatConfig(NoneConfig):
        name = "flat_for_tests"

        def build(self, context: BuildContext) -> SchemeParts:
            return SchemeParts(logit_bias=FlatBias())

    message = r"FlatBias.forward returned the shape \(3,\) for distances of the shape \(3,\); expected \(heads, 3\)"
    model = tiny("LlamaForCausalLM")
    with pytest.raises(ValueError, match=message):
        patch_model(model, FlatConfig())
    assert not hasattr(model, "position_encoding")


def test_a_bias_that_reads_its_distances_is_placed_in_a_model_without_weights() -> None:
    class ReadingBias(DistanceBias):
        def forward(self, distance: torch.Tensor) -> torch.Tensor:
            reach = int(distance.abs().max())
            return -(distance.abs() / max(reach, 1)).expand(2, *distance.shape)

    class ReadingConfig(NoneConfig):
        name = "reading_for_tests"

        def build(self, context: BuildContext) -> SchemeParts:
            return SchemeParts(logit_bias=ReadingBias())

    with torch.device("meta"):
        model = patch_model(tiny("LlamaForCausalLM"), ReadingConfig())
    assert next(model.parameters()).is_meta
    assert isinstance(model.position_encoding.config, ReadingConfig)
