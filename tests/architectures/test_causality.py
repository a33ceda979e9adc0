"""The layers that discovery classifies as causal, compared with what their queries see."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import UnsupportedError, inspect_model, native_scheme, patch_model
from hf_posenc.patching.anatomy.anatomy import Anatomy
from tests.architectures.population import known_model_types, pair_named, pairs_of
from tests.architectures.tiny import tiny_model
from tests.models import tiny

#: Those whose modules, configs and names do not agree, next to plain ones.
CROSS_SECTION = [
    "seq2seq-umt5",
    "seq2seq-nllb-moe",
    "seq2seq-mvp",
    "seq2seq-bigbird_pegasus[full]",
    "seq2seq-bart",
    "causal-bigbird_pegasus",
    "causal-xlnet",
    "causal-xlnet[unidirectional]",
    "causal-xlm",
    "causal-llama",
    "causal-bert",
    "masked-bert",
    "encoder-t5",
]
LENGTH = 8


def seen_by_the_first_token(model: Any, stack: Any) -> bool | None:
    """Whether the first token of a stack's first attention layer sees the last one; `None` if this is unknown."""
    outputs: list[Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        while not isinstance(output, Tensor):
            output = next(iter(output.values() if isinstance(output, dict) else output))
        outputs.append(output)

    parameters = inspect.signature(type(model).forward).parameters
    tokens = torch.arange(5, 5 + LENGTH).unsqueeze(0)
    arguments = {"input_ids": tokens}
    if model.config.is_encoder_decoder and "decoder_input_ids" in parameters:
        arguments["decoder_input_ids"] = tokens
    other = tokens.clone()
    other[0, -1] = 30
    handle = stack.attentions[0].module.register_forward_hook(note)
    try:
        model(**arguments)
        for name in arguments:
            calls = len(outputs)
            model(**(arguments | {name: other}))
            before, after = outputs[0], outputs[calls]
            if (calls > 1 and name == "input_ids") or LENGTH not in before.shape:
                return None  # A layer that runs several times, or tokens of the architecture's own in front.
            axis = before.shape.index(LENGTH)
            if not torch.equal(before, after):
                return not torch.equal(before.select(axis, 0), after.select(axis, 0))
    finally:
        handle.remove()
    return None


@torch.no_grad()
def assert_stated_as_observed(name: str) -> int:
    # With sdpa the decoder of UMT5 loses its mask before transformers 5.18.
    model = tiny_model(pair_named(name), attn_implementation="eager")
    try:
        stacks = Anatomy(model).stacks()
    except UnsupportedError:
        return 0
    told = {stack.name: seen_by_the_first_token(model, stack) for stack in stacks}
    stated = {stack.name: not stack.attentions[0].causal for stack in stacks if told[stack.name] is not None}
    assert stated == {name: sees for name, sees in told.items() if sees is not None}
    return len(stated)


@pytest.mark.parametrize("name", CROSS_SECTION)
def test_a_layer_is_taken_for_causal_if_its_queries_see_no_later_keys(name: str) -> None:
    assert assert_stated_as_observed(name) > 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", known_model_types())
def test_sweep(model_type: str) -> None:
    for pair in pairs_of(model_type):
        if pair.has_vocabulary_head and pair.name not in CROSS_SECTION:
            assert_stated_as_observed(pair.name)


def umt5(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return tiny("UMT5ForConditionalGeneration", attn_implementation=attention).eval()


@pytest.mark.parametrize("scheme", ["alibi", "native"])
def test_a_decoder_that_a_run_shows_to_be_bidirectional_is_refused(scheme: str) -> None:
    model = umt5()
    for block in model.decoder.block:
        block.layer[0].SelfAttention.is_causal = False
    model.decoder.forward = bidirectional(model.decoder)
    with pytest.raises(
        UnsupportedError, match=r"was classified as causal.*bidirectional.*Architecture\(causal=False\)"
    ):
        native_scheme(model) if scheme == "native" else patch_model(model, scheme)
    assert not hasattr(model, "position_encoding")


@pytest.mark.parametrize("scheme", ["alibi", "fire"])
def test_a_call_of_a_decoder_that_hides_nothing_is_refused(scheme: str) -> None:
    """As with UMT5 before transformers 5.18, whose scheme may come from a checkpoint, where nothing can be observed."""
    model = patch_model(umt5("eager"), scheme)
    model.decoder.config._attn_implementation = "sdpa"
    for block in model.decoder.block:
        block.layer[0].SelfAttention.is_causal = False
    tokens = torch.arange(5, 5 + LENGTH).unsqueeze(0)
    with pytest.raises(UnsupportedError, match=r"is not causal.*attn_implementation='eager'"):
        model(input_ids=tokens, decoder_input_ids=tokens)
    model.decoder.config._attn_implementation = "eager"
    model(input_ids=tokens, decoder_input_ids=tokens)


def bidirectional(stack: Any) -> Any:
    """The forward of a stack to which every pair of tokens is visible."""
    inner = stack.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        length = kwargs["input_ids"].shape[1]
        return inner(*args, **(kwargs | {"attention_mask": torch.zeros(1, 1, length, length)}))

    return forward


def test_an_encoder_does_not_follow_what_the_config_says_of_the_decoder() -> None:
    model = tiny("BartForConditionalGeneration", is_decoder=True)
    report = inspect_model(model)
    assert [(stack.name, stack.causal) for stack in report.stacks] == [("encoder", False), ("decoder", True)]
