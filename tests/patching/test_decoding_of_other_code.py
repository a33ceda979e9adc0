"""Decoders that share only `PreTrainedModel` with transformers, in the style of its versions 4.30 to 4.50."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_posenc import Architecture, UnsupportedError, patch_model, unpatch_model
from hf_posenc.patching.anatomy.architectures import declaration
from tests.kits.decoding import decoded
from tests.matrix.running import tokens

WIDTH, HEADS, WORDS, LONGEST = 32, 4, 96, 64
HEAD = WIDTH // HEADS
SCHEMES = ("native", "none", "alibi", "rope", "t5", "fire")


class Config(PreTrainedConfig):
    model_type = "outside_decoder"

    def __init__(self, shape: str = "", **options: Any) -> None:
        self.shape, self.hidden_size, self.num_attention_heads, self.vocab_size = shape, WIDTH, HEADS, WORDS
        self.num_hidden_layers, self.max_position_embeddings = 2, LONGEST
        super().__init__(**options)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 1
) -> Any:
    cos, sin = (table[position_ids].unsqueeze(unsqueeze_dim) for table in (cos, sin))
    return rotated(q, cos, sin), rotated(k, cos, sin)


def apply_rotary_four(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Any:
    cos, sin = (table[0, 0][position_ids].unsqueeze(1) for table in (cos, sin))
    return rotated(q, cos, sin), rotated(k, cos, sin)


@torch.jit.script
def apply_rotary_script(x: Tensor, cos: Tensor) -> Tensor:
    return x * cos


@torch.compile(backend="eager")
def compiled_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class TableRotary(nn.Module):
    """Returns tables, which it extends; with `stretches`, to other frequencies."""

    inv_freq: Tensor
    axes, stretches = 2, False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 50.0 ** -(torch.arange(HEAD // 2) / (HEAD // 2)), persistent=False)
        self.register_buffer("cos_cached", torch.zeros(LONGEST, HEAD), persistent=False)

    def forward(self, x: Tensor, seq_len: int | None = None) -> tuple[Tensor, Tensor]:
        assert seq_len is not None
        frequencies = self.inv_freq / max(1.0, seq_len / LONGEST if self.stretches else 1.0)
        angles = torch.outer(torch.arange(seq_len), frequencies).repeat(1, 2)[(None,) * (self.axes - 2)]
        return angles.cos(), angles.sin()


class FourAxesRotary(TableRotary):
    axes = 4


class StretchingRotary(TableRotary):
    stretches = True


class Attention(nn.Module):
    """Gets positions from a table of embeddings."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.layer_idx, self.shape = HEADS, HEAD, index, config.shape
        self.projections = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.rotary = ROTARIES[config.shape]() if config.shape in ROTARIES else None
        self.held: Any = None

    def heads(self, hidden_states: Tensor, cache: Any) -> Any:
        shape = (*hidden_states.shape[:2], HEADS, HEAD)
        project = [*self.projections][:3]
        query, key, value = (linear(hidden_states).view(shape).transpose(1, 2) for linear in project)
        past = cache[0].shape[2] if isinstance(cache, tuple) else 0
        past = cache.get_seq_length(self.layer_idx) if isinstance(cache, DynamicCache | StaticCache) else past
        phases = None if self.rotary is None else self.rotary(value, seq_len=past + shape[1])
        return query, key, value, phases

    def attended(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, mask: Tensor) -> Any:
        if isinstance(cache, tuple):
            key, value = (torch.cat(pair, 2) for pair in zip(cache, (key, value), strict=True))
        elif cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.shape == "held":
            if self.held is not None and mask.shape[-1] > mask.shape[-2]:
                key, value = (torch.cat(pair, 2) for pair in zip(self.held, (key, value), strict=True))
            self.held = key, value
        if self.shape == "compiled":
            output = compiled_attention(query, key, value, mask)
        else:
            scores = query @ key.transpose(2, 3) / math.sqrt(HEAD) + mask
            output = scores.softmax(-1) @ value
        return self.projections[3](output.transpose(1, 2).flatten(2)), (key, value)

    def forward(self, hidden_states: Tensor, mask: Tensor, position_ids: Tensor, cache: Any = None) -> Any:
        query, key, value, _ = self.heads(hidden_states, cache)
        return self.attended(query, key, value, cache, mask)


class TableAttention(Attention):
    def forward(self, hidden_states: Tensor, mask: Tensor, position_ids: Tensor, cache: Any = None) -> Any:
        query, key, value, (cos, sin) = self.heads(hidden_states, cache)
        query, key = apply_rotary_pos_emb(query, key, cos, sin, position_ids)
        return self.attended(query, key, value, cache, mask)


class FourAxesAttention(Attention):
    def forward(self, hidden_states: Tensor, mask: Tensor, position_ids: Tensor, cache: Any = None) -> Any:
        query, key, value, (cos, sin) = self.heads(hidden_states, cache)
        query, key = apply_rotary_four(query, key, cos, sin, position_ids)
        return self.attended(query, key, value, cache, mask)


class CoreAttention(nn.Module):
    """Computes scores, without parameters of its own."""


class ScriptAttention(Attention):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        self.core_attention = CoreAttention()

    def forward(self, hidden_states: Tensor, mask: Tensor, position_ids: Tensor, cache: Any = None) -> Any:
        query, key, value, _ = self.heads(hidden_states, cache)
        return self.attended(apply_rotary_script(query, query[:1, :1, :, :1]), key, value, cache, mask)


ROTARIES: dict[str, Callable[[], nn.Module]] = {
    "tables": TableRotary,
    "four": FourAxesRotary,
    "stretching": StretchingRotary,
}
ATTENTIONS: dict[str, type[Attention]] = {
    "tables": TableAttention,
    "stretching": TableAttention,
    "four": FourAxesAttention,
    "script": ScriptAttention,
}


class Layer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.self_attn, self.norm = ATTENTIONS.get(config.shape, Attention)(config, index), nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        output, present = self.self_attn(self.norm(hidden_states), **options)
        return hidden_states + output, present


class OutsideDecoder(PreTrainedModel, GenerationMixin):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.wpe = None if config.shape in ATTENTIONS else nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(2)])
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool = True,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        cache = options.get("past_key_values") if cache is None else cache
        if self.config.shape not in ("tuples", "held") and use_cache and cache is None:
            cache = DynamicCache()
        length, past = input_ids.shape[1], self.past(cache)
        size = cache.layers[0].max_cache_len if isinstance(cache, StaticCache) else past + length
        position_ids = torch.arange(past, past + length)[None] if position_ids is None else position_ids
        visible = (torch.arange(size) <= torch.arange(past, past + length)[:, None]).expand(len(input_ids), 1, -1, -1)
        if attention_mask is not None and attention_mask.dim() == 2:
            shown = nn.functional.pad(attention_mask.bool(), (0, size - attention_mask.shape[1]))
            visible = visible & shown[:, None, None]
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(self.dtype).min)
        hidden_states = self.words(input_ids)
        if self.wpe is not None:
            hidden_states = hidden_states + self.wpe(position_ids)
        presents = []
        for index, layer in enumerate(self.layers):
            of_layer = cache[index] if isinstance(cache, tuple) else cache
            options = {"mask": mask, "position_ids": position_ids, "cache": of_layer}
            hidden_states, present = layer(hidden_states, **options)
            presents.append(present)
        kept = tuple(presents) if self.config.shape == "tuples" else cache
        return CausalLMOutputWithPast(logits=self.head(hidden_states), cache=kept if use_cache else None)

    def past(self, cache: Any) -> int:
        if self.config.shape == "held":
            held = self.layers[0].self_attn.held
            return 0 if held is None else held[0].shape[2]
        return cache[0][0].shape[2] if isinstance(cache, tuple) else 0 if cache is None else int(cache.get_seq_length())


def outsider(shape: str, kind: type[OutsideDecoder] = OutsideDecoder) -> Any:
    torch.manual_seed(0)
    model = kind(kind.config_class(shape)).eval()  # type: ignore[operator,misc]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("shape", ["", "tables", "four"])
@torch.no_grad()
def test_decoding_equals_a_full_forward(shape: str) -> None:
    model, ids = outsider(shape), tokens(2, 12)
    stock = model(ids, use_cache=False).logits
    for scheme in SCHEMES:
        patch_model(model, scheme)
        expected = model(ids, use_cache=False).logits
        if scheme == "native":
            assert model.position_encoding.config.name == ("rope" if shape else "learned")
            torch.testing.assert_close(expected, stock, rtol=0, atol=1e-5)
        for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
            torch.testing.assert_close(decoded(model, ids, cache, [6, 1, 5]), expected, rtol=0, atol=1e-4)
        mask = torch.tensor([[0, 0, 0] + [1] * 6]).expand(2, -1)
        padded = torch.cat([ids[:, :3], ids[:, :6]], 1)
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        unpadded = model.generate(ids[:, :6], attention_mask=mask[:, 3:], **options)
        assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], unpadded)
        beams = (model.generate(ids[:, :6], num_beams=3, use_cache=use, **options) for use in (True, False))
        assert torch.equal(*beams)
    unpatch_model(model)
    assert torch.equal(model(ids, use_cache=False).logits, stock)


@torch.no_grad()
def test_a_function_that_other_code_compiles_is_seen() -> None:
    model, without, ids = outsider("compiled"), outsider(""), tokens(2, 9)
    expected = model(ids).logits
    for scheme in ("native", "none", "alibi", "rope"):
        same = patch_model(without, scheme)(ids).logits
        torch.testing.assert_close(patch_model(model, scheme)(ids).logits, same, rtol=0, atol=1e-4)
    unpatch_model(model)
    assert torch.equal(model(ids).logits, expected)


class Renamed(OutsideDecoder):
    """Has another name for its tokens."""

    def forward(self, src: Tensor) -> CausalLMOutputWithPast:  # type: ignore[override]
        return super().forward(src, use_cache=False)


@torch.no_grad()
def test_tokens_may_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, without, ids = outsider("", Renamed), outsider(""), tokens(2, 9)
    with pytest.raises(UnsupportedError, match=r"its arguments: src\)\. Define the arguments"):
        patch_model(model, "alibi")
    same = {scheme: patch_model(without, scheme)(ids).logits for scheme in ("native", "none", "alibi")}
    inputs = Architecture(causal=True, example_inputs=lambda module, length: {"src": torch.arange(length)[None]})
    monkeypatch.setitem(declaration._ARCHITECTURES, "outside_decoder", inputs)
    for scheme, expected in same.items():
        torch.testing.assert_close(patch_model(model, scheme)(src=ids).logits, expected, rtol=0, atol=1e-4)


def test_tables_that_are_extended_with_other_frequencies_are_not_described() -> None:
    model = outsider("stretching")
    patch_model(model, "alibi")
    with pytest.raises(UnsupportedError, match="StretchingRotary stores other inverse frequencies"):
        patch_model(model, "native")


@pytest.mark.parametrize("shape", ["tuples", "held"])
@torch.no_grad()
def test_keys_of_unknown_positions_are_refused(shape: str) -> None:
    for scheme in ("alibi", "rope", "none"):
        model, ids = patch_model(outsider(shape), scheme), tokens(2, 9)
        expected = model(ids, use_cache=False).logits[:, -1:]
        for layer in model.layers:
            layer.self_attn.held = None
        past = model(ids[:, :8]).cache
        if scheme == "none":
            torch.testing.assert_close(model(ids[:, 8:], cache=past).logits, expected, rtol=0, atol=1e-4)
            continue
        message = "cache of this call is a tuple of tensors" if shape == "tuples" else "compares 1 queries with 9 keys"
        with pytest.raises(UnsupportedError, match=message):
            model(ids[:, 8:], cache=past)


def test_a_rotary_function_without_a_signature_is_refused() -> None:
    """The attention has a module without parameters that is named like attention, as in ChatGLM2."""
    with pytest.raises(UnsupportedError, match="has no signature in Python"):
        patch_model(outsider("script"), "alibi")


@pytest.mark.parametrize("model_type", ["t5", "bloom", "falcon", "deberta", "mamba", "big_bird", "bert"])
@torch.no_grad()
def test_a_model_type_of_transformers_does_not_declare_other_code(model_type: str) -> None:
    of_type = type("Config", (Config,), {"model_type": model_type, "__init__": Config.__init__})
    model, ids = outsider("tables", type("Decoder", (OutsideDecoder,), {"config_class": of_type})), tokens(2, 9)
    expected, without = model(ids, use_cache=False).logits, outsider("tables")
    for scheme in ("native", "none", "alibi", "rope"):
        output = patch_model(model, scheme)(ids, use_cache=False).logits
        same = expected if scheme == "native" else patch_model(without, scheme)(ids, use_cache=False).logits
        torch.testing.assert_close(output, same, rtol=0, atol=1e-5)
