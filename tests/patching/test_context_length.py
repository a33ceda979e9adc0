"""The length of a patched model is the same in its config, its report, its tokenizer and its generation config."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc import (
    AlibiConfig,
    BinaryConfig,
    LearnedConfig,
    LinearScaling,
    Llama3Scaling,
    NativeConfig,
    RandomizedConfig,
    RopeConfig,
    SequenceLengthError,
    YarnScaling,
    extend_context,
    inspect_model,
    native_scheme,
    patch_model,
    unpatch_model,
)
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.place.lengths import context_length, update_tokenizer_length
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.checkpoint.checkpoint_cases import t5
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, outputs, patched, tokens
from tests.models import tiny

NATIVE, LONG = 64, 150


def tokenizer(length: int = NATIVE) -> Any:
    return SimpleNamespace(model_max_length=length)


def test_a_tokenizer_follows_a_scheme_that_is_made_for_longer_texts() -> None:
    model = tiny("LlamaForCausalLM", max_position_embeddings=NATIVE)
    own, short = tokenizer(), tokenizer(NATIVE // 2)
    for one in (own, short, None):
        update_tokenizer_length(one, model)
    assert own.model_max_length == NATIVE
    patch_model(model, RopeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=NATIVE)))
    holder = SimpleNamespace(tokenizer=own)
    for one in (holder, short, None, SimpleNamespace()):
        update_tokenizer_length(one, model)
    assert own.model_max_length == model.config.max_position_embeddings == 4 * NATIVE
    # Other code has set another length.
    assert short.model_max_length == NATIVE // 2
    with pytest.raises(TypeError, match="no model_max_length"):
        extend_context(model, object(), length=128)


@pytest.mark.parametrize(
    ("architecture", "name", "rows_before"),
    [
        ("bert", "max_position_embeddings", 0),
        ("roberta", "max_position_embeddings", 2),
        ("gpt2", "n_positions", 0),
        ("llama_gqa", "max_position_embeddings", 0),
        ("bart", "max_position_embeddings", 0),
        ("opt", "max_position_embeddings", 0),
    ],
)
@torch.no_grad()
def test_everything_states_the_new_length(architecture: str, name: str, rows_before: int) -> None:
    stock = ARCHITECTURES[architecture].build()
    native_value = getattr(stock.config, name)
    native = native_value - rows_before
    model = patch_model(copy.deepcopy(stock), "alibi")
    assert getattr(model.config, name) == native_value
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.max_length = native
    cut = tokenizer(native)
    short = outputs(model, tokens(1, 14))
    assert extend_context(model, cut, length=LONG) is model
    assert getattr(model.config, name) == LONG + rows_before
    assert model.config.max_position_embeddings == LONG + rows_before
    assert cut.model_max_length == LONG
    assert f"context: {LONG} tokens, {native} natively" in str(model.position_encoding.report)
    assert model.position_encoding.report.to_dict()["context"].startswith(f"{LONG} tokens")
    assert inspect_model(model).context == str(model.position_encoding.lengths)
    if getattr(model, "generation_config", None) is not None:
        assert model.generation_config.max_length == LONG
    assert outputs(model, tokens(1, LONG)).shape[1] == LONG
    assert distance(outputs(model, tokens(1, 14)), short) == 0
    unpatch_model(model)
    assert model.config.to_dict() == stock.config.to_dict()
    assert type(model.config) is type(stock.config)
    if getattr(model, "generation_config", None) is not None:
        assert model.generation_config.max_length == native


@torch.no_grad()
def test_a_model_whose_config_states_no_length_gives_it_to_the_tokenizer() -> None:
    model, cut = patch_model(t5(), "alibi"), tokenizer(512)
    extend_context(model, cut, length=LONG)
    assert cut.model_max_length == LONG
    assert model.position_encoding.report.context.startswith(f"{LONG} tokens")
    ids = tokens(1, LONG).clamp(max=63)
    assert model(input_ids=ids, decoder_input_ids=ids).logits.shape[1] == LONG


def test_a_length_may_be_changed_again_and_outlives_a_look_at_the_stock_model_and_the_scheme() -> None:
    model = patched("bert", "alibi")
    for length in (128, 256, NATIVE, 200):
        extend_context(model, length=length)
        assert model.config.max_position_embeddings == length
    twin = copy.deepcopy(model)
    unpatch_model(twin)
    assert twin.config.max_position_embeddings == NATIVE
    assert inspect_model(model).native == native_scheme(twin).to_dict()
    patch_model(model, "kerple")
    assert model.config.max_position_embeddings == 200
    patch_model(model, LearnedConfig(num_positions=100))
    assert model.config.max_position_embeddings == 100
    # It has the rows of a new scheme: their number does not follow the config in between.
    patch_model(model, "learned")
    assert model.position_encoding.config == LearnedConfig()
    assert model.config.max_position_embeddings == NATIVE
    unpatch_model(model)
    assert model.config.to_dict() == ARCHITECTURES["bert"].build().config.to_dict()


@pytest.mark.parametrize(
    ("architecture", "scheme", "reach", "remedy"),
    [
        ("bert", "native", NATIVE, "num_positions, or with extension='interpolate'"),
        ("bert", LearnedConfig(num_positions=100), 100, "larger num_positions"),
        ("llama_gqa", BinaryConfig(bits=5), 32, "bits=6 or more"),
        ("llama_gqa", RandomizedConfig(AlibiConfig(), max_position=80), 80, "max_position=160 or more"),
    ],
)
def test_a_scheme_that_does_not_reach_the_length_refuses(
    architecture: str, scheme: Any, reach: int, remedy: str
) -> None:
    model, cut = patched(architecture, scheme), tokenizer()
    before = copy.deepcopy(model.config)
    with pytest.raises(SequenceLengthError, match=rf"{reach + 1}.*{reach} positions.*{remedy}"):
        extend_context(model, cut, length=reach + 1)
    assert model.config == before
    assert cut.model_max_length == NATIVE
    extend_context(model, cut, length=reach)
    assert model.config.max_position_embeddings == cut.model_max_length == reach


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_the_longest_length_that_is_saved_is_loaded(architecture: str, tmp_path: Path) -> None:
    model, longest = patched(architecture, "alibi"), 2**31 - 1
    if architecture == "roberta":  # Its config counts two rows more.
        with pytest.raises(SequenceLengthError, match="cannot be stored in the config"):
            extend_context(model, length=longest)
        longest -= 2
    extend_context(model, length=longest).save_pretrained(tmp_path)
    assert context_length(type(model).from_pretrained(tmp_path)) == longest


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scheme", "expected", "rope"),
    [
        ("alibi", NATIVE, {}),
        (LearnedConfig(num_positions=20), 20, {}),
        (BinaryConfig(bits=4), 16, {}),
        (BinaryConfig(bits=9), NATIVE, {}),
        (RopeConfig(scaling=YarnScaling(4.0, NATIVE)), 4 * NATIVE, {}),
        (RopeConfig(scaling=YarnScaling(4.0, NATIVE // 4)), NATIVE, {}),
        (RopeConfig(scaling=LinearScaling(2.0)), 2 * NATIVE, {}),
        ([RopeConfig(scaling=YarnScaling(4.0, NATIVE)), BinaryConfig(bits=7)], 128, {}),
        # The length in a config applies to its own scaling, and not to another one.
        *(("native", NATIVE, rope) for rope in (LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0})),
        (RopeConfig(theta=10000.0, scaling=Llama3Scaling(16.0, original_max_positions=48)), 16 * 48, LLAMA3),
        (NativeConfig(YarnScaling(4.0, 32)), 4 * 32, {}),
        (NativeConfig(YarnScaling(4.0, 32)), 4 * 32, {"rope_type": "linear", "factor": 4.0}),
        (NativeConfig(YarnScaling(4.0, 32)), NATIVE, YARN | {"original_max_position_embeddings": 32}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:NativeConfig.scaling replaces")
def test_a_patch_states_what_the_scheme_reaches_or_was_made_for(
    scheme: Any, expected: int, rope: dict[str, Any]
) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0} | rope
    model = tiny("LlamaForCausalLM", max_position_embeddings=NATIVE, rope_parameters=parameters)
    patch_model(model, scheme)
    assert model.config.max_position_embeddings == expected
    patch_model(model, native_scheme(model))
    assert model.config.max_position_embeddings == NATIVE
    patch_model(model, scheme)
    unpatch_model(model)
    assert model.config.max_position_embeddings == NATIVE


def warned(recwarn: pytest.WarningsRecorder) -> list[str]:
    return [str(one.message) for one in recwarn if "was not trained on" in str(one.message)]


def test_a_rotation_past_its_lengths_is_warned_of_and_others_are_not(recwarn: pytest.WarningsRecorder) -> None:
    extend_context(patched("llama_gqa", "rope"), length=256)
    (message,) = warned(recwarn)
    assert re.search(r"made for 64 tokens. With 256 tokens.*factor=4, original_max_positions=64", message)
    recwarn.clear()
    yarn, dynamic = (RopeConfig(scaling=one) for one in (YarnScaling(4.0, 64), hf_posenc.DynamicScaling(2.0, 64)))
    for scheme in (yarn, "alibi", hf_posenc.ReRopeConfig(window=32), dynamic):
        extend_context(patched("llama_gqa", scheme), length=256)
    # A rotation in windows reaches any length.
    extend_context(patched("mistral_sliding", "native"), length=4096)
    assert not warned(recwarn)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize(
    ("method", "is_too_short"), [("self_extend", True), ("yarn", True), ("rerope", False), ("dual_chunk", False)]
)
def test_options_of_a_shorter_text_are_warned_of(
    name: str, method: str, is_too_short: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Windows do not count: the layers of Gemma with one keep a rotation without any method."""
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]} if "Gemma" in name else {}
    model = tiny(name, max_position_embeddings=64, **windows)
    extend_context(model, length=256, method=method)
    assert not warned(recwarn)
    extend_context(model, length=4096)
    begin = f"The rotation of '{'rope' if method == 'yarn' else method}("
    assert [message.startswith(begin) for message in warned(recwarn)] == [True] * is_too_short


@pytest.mark.parametrize(("name", "field"), [
    ("GPTJForCausalLM", "max_position_embeddings"),
    ("CodeGenForCausalLM", "max_position_embeddings"),
    ("GPTNeoForCausalLM", "max_position_embeddings"),
    ("OpenAIGPTLMHeadModel", "max_position_embeddings"),
    ("RoFormerForCausalLM", "max_position_embeddings"),
    ("MptForCausalLM", "max_seq_len"),
    ("CTRLLMHeadModel", "n_positions"),
])  # fmt: skip
@torch.no_grad()
def test_a_model_is_not_limited_by_what_it_builds_for_its_native_length(name: str, field: str, tmp_path: Path) -> None:
    """Causal masks, rotary tables and a native ALiBi, against the same weights in a model that is built longer."""
    options: dict[str, Any] = {"rotary_dim": 8} if name in ("GPTJForCausalLM", "CodeGenForCausalLM") else {}
    if name == "GPTNeoForCausalLM":
        options = {"attention_types": [[["global", "local"], 1]], "window_size": 8}
    model, longer = (tiny(name, **options, **{field: length}).eval() for length in (16, 64))
    given = model.state_dict()
    longer.load_state_dict({key: given[key] if given[key].shape == own.shape else own
                            for key, own in longer.state_dict().items()})  # fmt: skip
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}
    ids = tokens(1, 40)
    for scheme in ("alibi", "rope"):
        patch_model(model, scheme)
        expected = patch_model(longer, scheme)(ids).logits
        assert distance(model(ids).logits, expected) <= 1e-5
        found = model(ids[:, :30])
        cached = {"past_key_values": found.past_key_values} if "past_key_values" in found else {}
        if cached:
            assert distance(model(ids[:, 30:], **cached).logits, expected[:, 30:]) <= 1e-5
    extend_context(model, length=40)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert distance(loaded(ids).logits, expected) <= 1e-5
    loaded.to(torch.bfloat16).float()
    for one in (model, loaded):
        unpatch_model(one)
        after = dict(one.named_buffers())
        assert after.keys() == before.keys()
        for key, buffer in before.items():
            assert torch.equal(after[key], buffer if one is model else buffer.to(torch.bfloat16).to(buffer.dtype))
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
@torch.no_grad()
def test_explicit_positions_past_the_native_length_are_those_of_a_relative_scheme(architecture: str) -> None:
    """BERT looks token types up by position, in a buffer as long as its table."""
    model = patch_model(ARCHITECTURES[architecture].build(), "alibi").eval()
    ids = tokens(1, 14)
    near, far = (model(ids, position_ids=torch.arange(start, start + 14)[None]) for start in (0, 700))
    torch.testing.assert_close(far[0], near[0])
    unpatch_model(model)
    with pytest.raises((IndexError, RuntimeError)):
        model(ids, position_ids=torch.arange(700, 714)[None])


@pytest.mark.parametrize("name", ["image-text-clip", "image-text-siglip", "image-text-owlvit", "image-text-blip"])
@torch.no_grad()
def test_the_length_check_of_a_discarded_table_is_silent(name: str) -> None:
    """CLIP's text embeddings and their descendants compare lengths with the rows of their table."""
    model = tiny_model(pair_named(name))
    stack, ids = Anatomy(model).stacks(["text"])[0].module, torch.arange(200).unsqueeze(0) % 50 + 8
    with pytest.raises((ValueError, RuntimeError)):
        stack(ids)
    patch_model(model, "alibi", part="text")
    extend_context(model, length=200, part="text")
    longer, shorter = stack(ids)[0], stack(ids[:, :20])[0]
    assert longer.shape[1] == 200
    if name == "image-text-clip":  # Causal.
        assert torch.allclose(longer[:, :20], shorter, atol=1e-5)
    patch_model(model, "learned", num_positions=64, part="text")
    with pytest.raises(SequenceLengthError, match="longer than the 64 positions"):
        stack(ids)
    unpatch_model(model)
    with pytest.raises((ValueError, RuntimeError)):
        stack(ids)
