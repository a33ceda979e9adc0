"""Encoders of sound and time series: native scheme or reason, effect, undo, and what the report says."""

from __future__ import annotations

import pytest
import torch

from hf_posenc import native_scheme, patch_model, unpatch_model
from hf_posenc.errors import UnsupportedError

from .families import FAMILIES, inputs, output, tiny

pytestmark = pytest.mark.on_cpu("these models make a weight on the CPU, whatever the default device")

#: The native scheme, or what the reason says.
NATIVE = {
    "wav2vec2-bert": "shaw",
    "parakeet": "transformer_xl",
    "conformer": "transformer_xl",
    "qwen2-audio": "learned",
    "voxtral": "learned",
    "timesfm": "sinusoidal",
    "patchtst": "learned",
    "patchtst with a class token": "learned",
}
REASONS = {
    "wavlm": "gate",
    "conformer rotary": "before",
} | dict.fromkeys(
    ("wav2vec2", "wav2vec2 stable", "hubert", "unispeech", "unispeech-sat", "sew", "sew-d", "data2vec-audio"),
    "convolution",
)


@pytest.mark.parametrize("name", NATIVE)
def test_the_native_scheme_reproduces_the_stock_outputs(name: str) -> None:
    model = tiny(name)
    stock = output(model, inputs(name))
    scheme = native_scheme(model)
    assert scheme.name == NATIVE[name]
    patch_model(model, scheme)
    torch.testing.assert_close(output(model, inputs(name)), stock, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REASONS)
def test_a_mechanism_that_no_scheme_describes_is_named(name: str) -> None:
    model = tiny(name)
    with pytest.raises(UnsupportedError, match=REASONS[name]):
        native_scheme(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_schemes_differ_from_each_other_and_undo_is_exact(name: str) -> None:
    model = tiny(name)
    found = {"stock": output(model, inputs(name))}
    for scheme in ("none", "alibi", "rope", "sinusoidal", "learned"):
        options = {"num_positions": 64} if scheme == "learned" else {}
        patch_model(model, scheme, **options)
        if scheme == "learned":
            with torch.no_grad():
                next(model.position_encoding.parameters()).normal_()
        found[scheme] = output(model, inputs(name))
    names = list(found)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            assert (found[one] - found[other]).abs().max() > 1e-4, (one, other)
    unpatch_model(model)
    assert torch.equal(output(model, inputs(name)), found["stock"])


@pytest.mark.parametrize("name", ["wav2vec2-bert", "conformer", "parakeet", "voxtral", "wav2vec2"])
def test_eager_attention_equals_sdpa(name: str) -> None:
    found = []
    for implementation in ("eager", "sdpa"):
        model = tiny(name)
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)
        patch_model(model, ["rope", "t5"])
        with torch.no_grad():
            for parameter in model.position_encoding.parameters():
                parameter.normal_()
        found.append(output(model, inputs(name)))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_the_report_names_the_convolution_and_what_still_sees_neighbours() -> None:
    model = patch_model(tiny("wav2vec2"), "sinusoidal")
    (stack,) = model.position_encoding.report.stacks
    assert stack.replaced == [
        "encoder.pos_conv_embed: convolution over neighbours in place of positions (Wav2Vec2PositionalConvEmbedding)"
    ]
    assert stack.placed == ["additive: encoder.pos_conv_embed"]
    assert any("convolutions mix neighbouring frames" in line for line in stack.kept)


def test_padded_frames_do_not_change_the_positions_of_others() -> None:
    model = patch_model(tiny("wav2vec2-bert"), ["rope", "t5"])
    short = {"input_features": inputs("wav2vec2-bert")["input_features"][:, :30]}
    padded = {
        "input_features": torch.nn.functional.pad(short["input_features"], (0, 0, 0, 10)),
        "attention_mask": (torch.arange(40) < 30).long().unsqueeze(0),
    }
    torch.testing.assert_close(output(model, padded)[:, :30], output(model, short), atol=1e-5, rtol=1e-5)


def test_trained_weights_of_the_bias_are_those_of_the_stock_model() -> None:
    model = tiny("wav2vec2-bert")
    patch_model(model, native_scheme(model))
    assert model.position_encoding.report.stacks[0].adopted == [
        f"logit_bias: encoder.layers.{layer}.self_attn" for layer in range(2)
    ]
    assert not model.encoder.layers[0].self_attn.distance_embedding.weight.requires_grad
    unpatch_model(model)
    assert model.encoder.layers[0].self_attn.distance_embedding.weight.requires_grad


@pytest.mark.parametrize("train", [False, True])
def test_gradients_reach_a_scheme_with_checkpointing(train: bool) -> None:
    model = patch_model(tiny("wav2vec2-bert"), "t5").train(train)
    model.gradient_checkpointing_enable()
    model(**inputs("wav2vec2-bert"))[0].square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.position_encoding.parameters())
