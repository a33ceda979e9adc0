"""Methods of `extend_context`: a rotation reaches a length by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hf_posenc import (
    ClippedScaling,
    DualChunkConfig,
    DynamicScaling,
    DynamicYarnScaling,
    LinearScaling,
    NativeConfig,
    NtkScaling,
    ReRopeConfig,
    SchemeConfig,
    SelfExtendConfig,
    UnknownNameError,
    UnsupportedError,
    YarnScaling,
    extend_context,
    native_scheme,
    patch_model,
)
from hf_posenc.patching import extending
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.models import tiny

NATIVE = NativeConfig()


class Tokenizer:
    model_max_length = 64


def llama(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny("LlamaForCausalLM", max_position_embeddings=64, **options).eval()


def whisper() -> PreTrainedModel:
    return tiny_model(pair_named("audio-text-whisper"))


def ids(length: int) -> torch.Tensor:
    return torch.arange(length).unsqueeze(0) % 32


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("linear", NativeConfig(scaling=LinearScaling(2.5))),
        ("ntk", NativeConfig(scaling=NtkScaling(2.5))),
        ("yarn", NativeConfig(scaling=YarnScaling(2.5, 64))),
        ("dynamic_ntk", NativeConfig(scaling=DynamicScaling(1.0, 64))),
        ("dynamic_yarn", NativeConfig(scaling=DynamicYarnScaling(64))),
        ("clipped", NativeConfig(scaling=ClippedScaling(original_max_positions=64))),
        ("rerope", ReRopeConfig(NATIVE, window=32)),
        ("self_extend", SelfExtendConfig(NATIVE, group=4, window=8)),
        ("dual_chunk", DualChunkConfig(NATIVE, chunk_size=48, local_size=8)),
    ],
)
def test_a_method_is_the_scheme_that_its_name_says(method: str, config: SchemeConfig) -> None:
    model, by_hand, tokenizer = llama(), patch_model(llama(), config), Tokenizer()
    assert extend_context(model, tokenizer, length=160, method=method) is model
    assert model.position_encoding.config == by_hand.position_encoding.config
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 160
    with torch.no_grad():
        assert torch.equal(model(ids(160), use_cache=False).logits, by_hand(ids(160), use_cache=False).logits)


def test_options_follow_from_the_lengths() -> None:
    """The largest distance stays below the trained length, and windows are half of the one that a scaling reaches."""
    for length in (65, 100, 1000, 4096):
        config = extend_context(llama(), length=length, method="self_extend").position_encoding.config
        assert isinstance(config, SelfExtendConfig)
        assert config.window + length / config.group < 64
    model = extend_context(llama(rope_parameters=YARN), length=512, method="rerope")
    assert model.position_encoding.config.window == 128


def test_scalings_count_from_the_length_before_a_trained_scaling_and_the_others_keep_it() -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    with pytest.warns(UserWarning, match="Llama3Scaling"):
        scaled = extend_context(llama(rope_parameters=scaling), length=128, method="yarn")
    assert scaled.position_encoding.config.scaling == YarnScaling(4.0, 32)
    kept = extend_context(llama(rope_parameters=scaling), length=128, method="rerope").position_encoding.config
    assert kept == ReRopeConfig(native_scheme(llama(rope_parameters=scaling)), window=32)


@pytest.mark.parametrize(
    ("pair", "method"),
    [
        ("causal-llama", "rerope"),
        ("causal-deepseek_v3", "dynamic_yarn"),  # The patch refuses the others.
        ("causal-nanochat", "dynamic_yarn"),  # Its first call refuses them.
    ],
)
def test_without_a_method_the_first_of_the_study_is_taken_that_the_model_accepts(pair: str, method: str) -> None:
    model, named = tiny_model(pair_named(pair)), tiny_model(pair_named(pair))
    length = 2 * model.config.max_position_embeddings
    with pytest.warns(UserWarning, match=f"chose method='{method}'.*results.md") as found:
        extend_context(model, length=length)
    assert ("does not accept" in str(found[-1].message)) == (method != "rerope")
    extend_context(named, length=length, method=method)
    assert model.position_encoding.config == named.position_encoding.config
    assert model.config.max_position_embeddings == length


def test_a_model_in_which_only_layers_with_a_window_rotate_needs_no_method() -> None:
    model = tiny_model(pair_named("causal-cohere2"))
    length, native = 2 * model.config.max_position_embeddings, native_scheme(model)
    with pytest.raises(ValueError, match="only layers with a sliding window rotate"):
        extend_context(model, length=length, method="rerope")
    with pytest.warns(UserWarning, match="has only changed the length"):
        extend_context(model, length=length)
    assert model.position_encoding.config == native
    assert model.config.max_position_embeddings == length


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("options", [{"length": 40}, {"length": 200, "rope_parameters": YARN}])
def test_a_length_that_the_rotation_reaches_needs_no_method(
    options: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    """The config of Qwen states the length before YaRN."""
    length, model = options.pop("length"), llama(**options)
    with torch.no_grad():
        expected = model(ids(length)).logits
    recwarn.clear()
    extend_context(model, length=length)
    assert not [one for one in recwarn if "extend_context" in str(one.message)]
    with torch.no_grad():
        assert torch.equal(model(ids(length)).logits, expected)
    assert model.config.max_position_embeddings == length


def test_methods_count_from_the_trained_length_after_another_was_stated() -> None:
    for window in (None, 100, 64, 16):
        model = tiny("MistralForCausalLM", max_position_embeddings=64, sliding_window=window)
        extend_context(patch_model(model, "native"), length=128)
        if window in (64, 16):
            for change in (lambda m: extend_context(m, length=256, method="yarn"), patch_with_yarn):
                with pytest.raises(ValueError, match="only layers with a sliding window rotate"):
                    change(model)
        else:
            extend_context(model, length=256, method="yarn")
            assert model.position_encoding.config.scaling == YarnScaling(4.0, 64)
            assert patch_with_yarn(model).position_encoding.config.scaling == YarnScaling(8.0, 64)


def patch_with_yarn(model: PreTrainedModel) -> PreTrainedModel:
    return patch_model(model, NativeConfig(scaling=YarnScaling(8.0, 64)))


def test_a_factor_reaches_the_length_that_it_was_made_from() -> None:
    for trained, length in ((1000, 1001), (200_000, 333_333), (1_000_000, 1_000_001)):
        assert YarnScaling(length / trained, trained).made_for(None) == length


def test_a_model_that_no_method_suits_is_refused_with_the_reasons() -> None:
    model = tiny_model(pair_named("image-text-neomme"))
    with pytest.raises(UnsupportedError, match=r"'rerope': .*'dual_chunk': .*'dynamic_yarn': .*theta"):
        extend_context(model, length=2 * model.config.max_position_embeddings)
    assert not hasattr(model, "position_encoding")


def test_the_text_part_is_extended_though_another_part_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(tiny_model(pair_named("image-text-llava")), "none", part="vision")
    length = 2 * model.config.text_config.max_position_embeddings
    with monkeypatch.context() as patches:
        patches.setattr(extending, "set_length", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            extend_context(model, length=length)
    assert set(model.position_encoding.config.by_part()) == {"vision"}
    with pytest.warns(UserWarning, match="chose method='rerope'"):
        extend_context(model, length=length)
    assert model.config.text_config.max_position_embeddings == length
    assert set(model.position_encoding.config.by_part()) == {"text", "vision"}


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (llama, {"method": "yarm"}, UnknownNameError, "Did you mean 'yarn'"),
        (llama, {"method": "p_rope"}, UnknownNameError, "'p_rope' is a scheme: use patch_model"),
        (llama, {"method": "yarn", "length": 64}, ValueError, "reaches 64 tokens"),
        *(
            (lambda: patch_model(llama(), "alibi"), {"method": None, "length": length}, ValueError, "expected an int")
            for length in (0, -1, 2.5, True, "512", None, 2**31, np.int64(512))
        ),
        (llama, {"method": "yarn", "length": 2.5}, ValueError, "expected an int"),
        (llama, {"method": ["yarn"]}, UnknownNameError, "yarn"),
        (
            lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            {},
            UnsupportedError,
            "LinearScaling.*does not state the length.*'rerope'",
        ),
        (lambda: tiny("MistralForCausalLM", max_position_embeddings=64, sliding_window=16), {}, ValueError, "window"),
        (lambda: patch_model(llama(), "alibi"), {}, UnsupportedError, "is patched with 'alibi'"),
        (lambda: extend_context(llama(), length=100, method="ntk"), {}, UnsupportedError, "Call unpatch_model first"),
        (lambda: tiny("BertModel"), {}, UnsupportedError, "swap_scheme"),
        (lambda: tiny("GPT2LMHeadModel"), {"method": None}, UnsupportedError, "patch_model.*swap_scheme"),
        (lambda: tiny("ViTModel"), {"method": None}, UnsupportedError, "reads images"),
        (whisper, {"method": None, "part": "audio"}, UnsupportedError, "part='audio'.* parts 'audio', 'text'"),
        (whisper, {"method": None}, UnsupportedError, "part='text'.* parts 'audio', 'text'"),
        (whisper, {"method": None, "part": "vision"}, UnknownNameError, "Known: audio, text"),
        *(
            (lambda: patch_model(whisper(), "rope", part="text"), {"method": None, "part": part}, error, message)
            for part, error, message in (
                ("audio", UnsupportedError, "change a rotation"),
                ("sound", UnknownNameError, "audio"),
            )
        ),
    ],
)
def test_what_cannot_be_extended_is_refused_and_nothing_changes(
    make: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, tokenizer = make(), Tokenizer()
    config, encoding = model.config.to_dict(), getattr(model, "position_encoding", None)
    with pytest.raises(error, match=message):
        extend_context(model, tokenizer, **({"length": 128, "method": "yarn"} | options))
    assert model.config.to_dict() == config
    assert tokenizer.model_max_length == 64
    assert getattr(model, "position_encoding", None) is encoding
