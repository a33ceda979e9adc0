"""A scheme in the attention from a decoder to an encoder."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

import hf_posenc
from hf_posenc import (
    AlibiConfig,
    CrossAttentionConfig,
    DynamicScaling,
    RopeConfig,
    ScheduleConfig,
    T5Config,
    UnsupportedError,
    list_schemes,
    patch_model,
    unpatch_model,
)
from hf_posenc.export.export_model import export_model
from hf_posenc.recipes import swap_scheme
from hf_posenc.schemes.bias.alibi import alibi_slopes
from tests.export.models import visible
from tests.matrix.running import drawn, gradients

#: Sums in another order, in float32.
TOLERANCE = 1e-4
SOURCE, TARGET = torch.arange(2, 14).unsqueeze(0), torch.arange(3, 10).unsqueeze(0)
MODELS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {},
    "T5ForConditionalGeneration": {},
    "MarianMTModel": {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2},
    "WhisperForConditionalGeneration": {},
}
BOTH = ["rope", "alibi"]


def model_of(name: str = "BartForConditionalGeneration", **options: Any) -> PreTrainedModel:
    return visible(name, **(MODELS[name] | options))


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": SOURCE}


@torch.no_grad()
def logits_of(model: PreTrainedModel, target: Tensor = TARGET, **options: Any) -> Tensor:
    return model(**(inputs_of(model) | options), decoder_input_ids=target, use_cache=False).logits


def step_by_step(model: PreTrainedModel, cache: Any = None) -> Tensor:
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs_of(model))
        rows = []
        for token in TARGET.split(1, dim=1):
            out = model(encoder_outputs=encoded, decoder_input_ids=token, cache=cache, use_cache=True)
            cache = out.cache
            rows.append(out.logits)
    return torch.cat(rows, 1)


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """RoPE by complex numbers, `(heads, tokens, width)`."""
    half = heads.shape[-1] // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(heads[..., :half].double(), heads[..., half:].double())
    turned = turned * torch.polar(torch.ones(()).double(), positions[:, None].double() * frequencies)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_layer_computes_the_formula(padding: int) -> None:
    model = patch_model(model_of(), "native", cross_attention=BOTH)
    layer = model.model.decoder.layers[1].encoder_attn
    seen: list[Any] = []
    layer.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((args, kwargs, output)), with_kwargs=True
    )
    source = torch.cat((torch.ones(1, padding, dtype=torch.int64), SOURCE), 1)
    mask = (torch.arange(source.shape[1]) >= padding).long().unsqueeze(0)
    logits_of(model, input_ids=source, attention_mask=mask)
    ((args, kwargs, output),) = seen
    given = dict(zip(("hidden_states", "key_value_states"), args, strict=False)) | kwargs
    states, encoded = given["hidden_states"][0], given["key_value_states"][0, padding:]

    def heads(projection: Any, rows: Tensor) -> Tensor:
        return projection(rows).double().unflatten(-1, (4, 8)).transpose(0, 1)

    queries, keys = torch.arange(len(states)), torch.arange(len(encoded))
    query, key = rotated(heads(layer.q_proj, states), queries), rotated(heads(layer.k_proj, encoded), keys)
    slopes = torch.tensor(alibi_slopes(4), dtype=torch.float64)[:, None, None]
    logits = query @ key.mT / 8**0.5 - slopes * (keys - queries[:, None]).abs()
    mixed = (logits.softmax(-1) @ heads(layer.v_proj, encoded)).transpose(0, 1).flatten(1)
    assert torch.allclose(output[0][0], layer.out_proj(mixed.float()), atol=1e-5)


@pytest.mark.parametrize("cross", ["rope", "alibi", "t5", BOTH], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_decoding_is_the_full_forward(name: str, cross: Any) -> None:
    model, stock = model_of(name), logits_of(model_of(name))
    patch_model(model, "native", cross_attention=cross)
    if cross == "t5":
        drawn(model)
    full = logits_of(model)
    assert (full - stock).abs().max() > 1e-3
    assert torch.allclose(step_by_step(model), full, atol=TOLERANCE)
    static = [StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=size) for size in (16, 12)]
    if name != "WhisperForConditionalGeneration":
        assert torch.allclose(step_by_step(model, EncoderDecoderCache(*static)), full, atol=TOLERANCE)


@pytest.mark.long
def test_every_scheme_is_computed_or_refused() -> None:
    computed, padding = set(), torch.ones(1, 3, dtype=torch.int64)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(SOURCE)), 1)
    for scheme in list_schemes():
        model = model_of()
        try:
            patch_model(model, "rope", cross_attention=scheme)
        except (UnsupportedError, ValueError):
            continue
        full = logits_of(drawn(model, std=0.3))
        assert torch.allclose(step_by_step(model), full, atol=TOLERANCE), scheme
        padded = logits_of(model, input_ids=torch.cat((padding, SOURCE), 1), attention_mask=mask)
        assert torch.allclose(padded, full, atol=TOLERANCE), scheme
        computed.add(scheme)
    assert {"alibi", "kerple", "none", "p_rope", "rope", "t5", "tisa"} <= computed


@pytest.mark.parametrize("name", ["BertLMHeadModel", "GPT2LMHeadModel"])
@pytest.mark.parametrize("cross", ["rope", "alibi"])
def test_decoders_that_are_given_the_states_of_an_encoder(name: str, cross: str) -> None:
    model = visible(name, is_decoder=True, add_cross_attention=True)
    states = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = model(TARGET, encoder_hidden_states=states).logits
        patch_model(model, "native", cross_attention=cross)
        full = model(TARGET, encoder_hidden_states=states, use_cache=False).logits
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        rows = [
            model(one, encoder_hidden_states=states, cache=cache, use_cache=True).logits for one in TARGET.split(1, 1)
        ]
        assert (full - stock).abs().max() > 1e-3
        assert torch.allclose(torch.cat(rows, 1), full, atol=TOLERANCE)
        # Without an encoder, such a decoder has no cross-attention.
        assert torch.isfinite(model(TARGET).logits).all()
        # An absent encoder's mask is one of ones, and padding takes no place.
        wide = torch.cat((torch.randn(1, 2, 32), states), 1)
        mask = torch.tensor([[0] * 2 + [1] * 9])
        padded = model(TARGET, encoder_hidden_states=wide, encoder_attention_mask=mask).logits
        assert torch.allclose(padded, full, atol=TOLERANCE)
        if name == "GPT2LMHeadModel":
            return  # It puts its cache into an EncoderDecoderCache.
        with pytest.raises(UnsupportedError, match=r"DynamicCache, which cannot store the keys of cross-attention"):
            model(TARGET, encoder_hidden_states=states, cache=DynamicCache(), use_cache=True)


@pytest.mark.parametrize("cross", ["rope", "alibi"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 1}], ids=str)
def test_generate_with_padding_in_both_sequences(cross: str, options: dict[str, int]) -> None:
    model = patch_model(model_of(), "rope", cross_attention=cross)
    rows, mask = torch.cat((torch.ones(1, 3, dtype=torch.int64), SOURCE), 1), torch.ones(2, 15, dtype=torch.int64)
    mask[0, :3] = 0
    rows = torch.cat((rows, torch.arange(20, 35).unsqueeze(0)))
    options = {"max_new_tokens": 6, "do_sample": False, "early_stopping": options["num_beams"] > 1, **options}
    together = model.generate(input_ids=rows, attention_mask=mask, **options)
    alone = model.generate(input_ids=SOURCE, **options)
    assert torch.equal(together[0, : alone.shape[1]], alone[0])
    without = model.generate(input_ids=SOURCE, use_cache=False, **options)
    assert torch.equal(without, alone)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("cross", ["rope", "alibi", BOTH], ids=str)
def test_backends_agree(backend: str, cross: Any) -> None:
    model = patch_model(model_of(), "rope", cross_attention=cross)
    model.set_attn_implementation("eager")
    expected = logits_of(model)
    model.set_attn_implementation(backend)
    assert torch.allclose(logits_of(model), expected, atol=TOLERANCE)


def test_many_keys() -> None:
    """Beyond the size at which the bias is one matrix."""
    model = patch_model(model_of(max_position_embeddings=700), "rope", cross_attention="alibi")
    options = {"input_ids": torch.arange(600).unsqueeze(0) % 90 + 3, "target": torch.arange(300).unsqueeze(0) % 90 + 3}
    found = logits_of(model, **options)
    model.set_attn_implementation("eager")
    assert torch.allclose(found, logits_of(model, **options), atol=TOLERANCE)


@pytest.mark.long
def test_gradient_checkpointing_and_compilation() -> None:
    model = patch_model(model_of(), "rope", cross_attention=["rope", "kerple"]).train()
    calls = {"input_ids": SOURCE, "decoder_input_ids": TARGET, "labels": TARGET, "use_cache": False}

    plain = gradients(model, model(**calls).loss)
    assert all(weight.grad is not None for weight in model.position_encoding.parameters())
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(model, model(**calls).loss), plain)
    model.gradient_checkpointing_disable()
    model.eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(**calls).logits, model(**calls).logits, atol=1e-5)


def test_saved_loaded_copied_and_undone(tmp_path: Path) -> None:
    stock = model_of()
    before, names = logits_of(stock), set(stock.state_dict())
    model = drawn(patch_model(model_of(), "rope", cross_attention=T5Config()))
    logits = logits_of(model)
    assert model.position_encoding.config == CrossAttentionConfig(RopeConfig(), T5Config())
    assert "decoder: " in str(model.position_encoding.report)
    assert any("encoder_attn" in line for stack in model.position_encoding.report.stacks for line in stack.placed)
    assert not any("encoder_attn" in line for stack in model.position_encoding.report.stacks for line in stack.kept)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(other), logits)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded.eval()), logits)
    patch_model(model, model.position_encoding.config)
    assert torch.equal(logits_of(model), logits)
    unpatch_model(model)
    assert torch.equal(logits_of(model), before)
    assert set(model.state_dict()) == names
    assert not any("forward" in vars(module) for module in model.modules())


def test_by_default_cross_attention_keeps_what_it_has() -> None:
    model = patch_model(model_of(), "rope")
    expected = logits_of(model)
    patch_model(model, "rope", cross_attention=True)
    assert not torch.allclose(logits_of(model), expected, atol=1e-2)
    patch_model(model, "rope")
    assert torch.equal(logits_of(model), expected)
    patch_model(model, "rope", cross_attention="none")
    assert torch.equal(logits_of(model), expected)


def test_layers_are_those_of_self_attention() -> None:
    model = patch_model(model_of(), "alibi", layers=[0], elsewhere="none", cross_attention="rope")
    inner = ScheduleConfig((AlibiConfig(), hf_posenc.NoneConfig()))
    assert model.position_encoding.config == CrossAttentionConfig(inner, RopeConfig())
    assert torch.allclose(step_by_step(model), logits_of(model), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("cross", "reason"),
    [
        ("cope", "every query sees every key. cope counts the tokens"),
        ("forget_gate", "every query sees every key. forget_gate sums the gates"),
        ("xpos", "every query sees every key. XposConfig does not support a bidirectional model"),
        ("self_extend", "every query sees every key. SelfExtendConfig only changes positions of past keys"),
        ("sinusoidal", "adds vectors to the embeddings .* acts before the first layer"),
        ("fire", "depends on the length of the sequence .FireBias., and there are two sequences"),
        ("ssmax", "scales the logits.*tokens of one sequence"),
        ("randomized", "draws random positions, and would draw others for each sequence"),
        ("shaw", "more than a function of the distance"),
        (RopeConfig(scaling=DynamicScaling(2.0, original_max_positions=32)), "length of the sequence.*two sequences"),
    ],
    ids=str,
)
def test_schemes_for_one_sequence_are_refused(cross: Any, reason: str) -> None:
    model, before = model_of(), logits_of(model_of())
    with pytest.raises(UnsupportedError, match=rf"(?s){reason}"):
        patch_model(model, "rope", cross_attention=cross)
    assert torch.equal(logits_of(model), before)


def test_models_and_options_that_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no cross-attention"):
        patch_model(visible("LlamaForCausalLM"), "rope", cross_attention=True)
    with pytest.raises(ValueError, match="Name another scheme"):
        patch_model(model_of(), "native", cross_attention=True)
    with pytest.raises(ValueError, match="within a sequence"):
        CrossAttentionConfig(CrossAttentionConfig("rope", "rope"), "rope")
    model = patch_model(model_of(), "rope", cross_attention=True)
    with pytest.raises(UnsupportedError, match=r"The encoder's mask has the shape \(1, 1, 7, 12\)"):
        model.model.decoder(
            TARGET, encoder_hidden_states=torch.randn(1, 12, 32), encoder_attention_mask=torch.ones(1, 1, 7, 12)
        )


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("stock", "no such mechanism"),
        ("gguf", r"acts in cross-attention \(RotaryMap\), and llama\.cpp has no"),
        ("remote_code", "T5ForConditionalGeneration is neither"),
    ],
)
def test_programs_without_such_positions_refuse(to: str, reason: str, tmp_path: Path) -> None:
    from tests.export.gguf_cases import unigram_tokenizer

    model = patch_model(model_of("T5ForConditionalGeneration"), "native", cross_attention="rope")
    with pytest.raises(
        UnsupportedError, match=rf"(?s)cannot run the scheme cross_attention\(inner=t5, cross=rope\).*{reason}"
    ):
        export_model(model, tmp_path / "out", to=to, tokenizer=unigram_tokenizer())


def test_a_gradual_swap_would_lose_the_scheme_and_is_refused() -> None:
    model = patch_model(model_of(), "rope", cross_attention="rope")
    before = logits_of(model)
    with pytest.raises(UnsupportedError, match="A gradual swap cannot run a scheme: it acts in cross-attention"):
        swap_scheme(model, "alibi", gradual=True)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("moved", ["layers", "cross-attention"])
def test_what_was_moved_is_not_saved_and_keeps_its_parameters(moved: str) -> None:
    model = drawn(patch_model(model_of(), "rope", cross_attention=T5Config(shared=False)))
    first, second = model.model.decoder.layers
    if moved == "layers":
        model.model.decoder.layers = torch.nn.ModuleList([second, first])
        for place, layer in enumerate(model.model.decoder.layers):
            layer.self_attn.layer_idx = layer.encoder_attn.layer_idx = place
    else:
        first.encoder_attn, second.encoder_attn = second.encoder_attn, first.encoder_attn
    expected = logits_of(model)
    with pytest.raises(UnsupportedError, match="Layers of this BartDecoder were added, dropped, moved"):
        model.save_pretrained("unused")
    patch_model(model, model.position_encoding.config)
    assert torch.equal(logits_of(model), expected)


IN_BART = "model.decoder.layers.1.encoder_attn"


@pytest.mark.parametrize(
    ("name", "path", "put", "reason"),
    [
        ("BartForConditionalGeneration", IN_BART, lambda stock, _: stock, "has no position encoding"),
        ("BartForConditionalGeneration", IN_BART, lambda *_: torch.nn.Linear(32, 32), "replaced an attention module"),
        ("BartForConditionalGeneration", IN_BART, lambda _, moved: moved, "moved here from another"),
        # In a module of its own.
        (
            "T5ForConditionalGeneration",
            "decoder.block.1.layer.1.EncDecAttention",
            lambda stock, _: stock,
            "has no position encoding",
        ),
    ],
)
def test_cross_attention_that_was_exchanged_is_refused(name: str, path: str, put: Any, reason: str) -> None:
    model, other = (patch_model(model_of(name), "rope", cross_attention="alibi") for _ in range(2))
    logits_of(model)
    stock, moved = (one.get_submodule(path) for one in (model_of(name), other))
    model.set_submodule(path, put(stock, moved))
    with pytest.raises(UnsupportedError, match=reason):
        logits_of(model)
