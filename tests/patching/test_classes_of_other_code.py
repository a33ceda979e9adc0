"""Model classes that share only `PreTrainedModel` with transformers, in shapes that other packages give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Model, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_posenc import UnsupportedError, inspect_model, patch_model, unpatch_model
from tests.kits.decoding import decoded
from tests.matrix.running import patched, tokens

WIDTH, HEADS, WORDS = 32, 4, 96


class Config(PreTrainedConfig):
    model_type = "outsider"

    def __init__(self, shape: str = "", **options: Any) -> None:
        self.shape, self.hidden_size, self.num_attention_heads, self.vocab_size = shape, WIDTH, HEADS, WORDS
        super().__init__(**options)


class RotaryEmbedding(nn.Module):
    """Rotates heads `(batch, heads, length, width)` itself, by pairs of neighbours or halves."""

    frequencies: Tensor

    def __init__(self, width: int, interleaved: bool, longest: int = 9_999) -> None:
        super().__init__()
        self.register_buffer("frequencies", 50.0 ** -(torch.arange(width // 2) / (width // 2)), persistent=False)
        self.interleaved, self.longest = interleaved, longest

    def rotated(self, heads: Tensor) -> Tensor:
        length, interleaved = heads.shape[2], self.interleaved
        angles = torch.arange(length).unsqueeze(-1) * self.frequencies * min(1.0, self.longest / length)
        first, second = (heads[..., ::2], heads[..., 1::2]) if interleaved else heads.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), -1 if interleaved else -2)
        return pairs.flatten(-2)

    def forward(self, q: Tensor, k: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
        return self.rotated(q), self.rotated(k)


class PackedRotaryEmbedding(RotaryEmbedding):
    def forward(self, qkv: Tensor, offset: int = 0) -> Tensor:  # type: ignore[override]
        return torch.stack((self.rotated(qkv[0]), self.rotated(qkv[1]), qkv[2]))


class TokensFirstRotaryEmbedding(RotaryEmbedding):
    """Rotates heads `(batch, length, 3, heads, width)`, or a query and the rest, as flash-attn's module does."""

    def forward(self, qkv: Tensor, kv: Tensor | None = None, offset: int = 0) -> Any:  # type: ignore[override]
        query, key, value = qkv.unbind(2) if kv is None else (qkv, *kv.unbind(2))
        query, key = (self.rotated(heads.transpose(1, 2)).transpose(1, 2) for heads in (query, key))
        return torch.stack((query, key, value), 2) if kv is None else (query, torch.stack((key, value), 2))


class MergedRotaryEmbedding(RotaryEmbedding):
    """Rotates heads `(batch * heads, length, width)`, as Falcon's first code does."""

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.rotated(query.unsqueeze(1)).squeeze(1), self.rotated(key.unsqueeze(1)).squeeze(1)


ROTARIES: dict[str, Any] = {
    "interleaved": lambda width: RotaryEmbedding(width, interleaved=True),
    "halves": lambda width: RotaryEmbedding(width, interleaved=False),
    "by length": lambda width: RotaryEmbedding(width, interleaved=False, longest=64),
    "one tensor": lambda width: PackedRotaryEmbedding(width, interleaved=False),
    "tokens first": lambda width: TokensFirstRotaryEmbedding(width, interleaved=False),
    "query and rest": lambda width: TokensFirstRotaryEmbedding(width, interleaved=False),
    "merged": lambda width: MergedRotaryEmbedding(width, interleaved=False),
}


class SelfAttention(nn.Module):
    """Computes its scores. In the shape "packed", the rows of a batch are one, and it has a bias of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rotary = ROTARIES[config.shape](WIDTH // HEADS) if config.shape in ROTARIES else None
        self.num_attention_heads, self.shape = HEADS, config.shape
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, rows: int = 1) -> Tensor:
        shape = (rows if self.shape == "packed" else len(hidden_states), -1, HEADS, WIDTH // HEADS)
        project = (self.query, self.key, self.value)
        query, key, value = (linear(hidden_states).view(shape).transpose(1, 2) for linear in project)
        if isinstance(self.rotary, PackedRotaryEmbedding):
            query, key, value = self.rotary(torch.stack((query, key, value)))
        elif isinstance(self.rotary, TokensFirstRotaryEmbedding):
            packed = torch.stack((query, key, value)).permute(1, 3, 0, 2, 4)
            if self.shape == "query and rest":
                query, rest = self.rotary(packed[:, :, 0], kv=packed[:, :, 1:])
                packed = torch.cat((query.unsqueeze(2), rest), 2)
            else:
                packed = self.rotary(packed)
            query, key, value = packed.permute(2, 0, 3, 1, 4)
        elif isinstance(self.rotary, MergedRotaryEmbedding):
            made = self.rotary(query.flatten(0, 1), key.flatten(0, 1))
            query, key = (heads.view(query.shape) for heads in made)
        elif self.rotary is not None:
            query, key = self.rotary(query, key)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        if self.shape == "packed":
            places = torch.arange(scores.shape[-1])
            scores = scores - (places - places.unsqueeze(1)).abs()
        if self.shape == "masked":
            assert attention_mask is not None
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, None] == 0, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ value).transpose(1, 2).reshape(hidden_states.shape)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(config), nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        return self.norm(hidden_states + self.attention(hidden_states, **options))


class LayerThatIsAModel(PreTrainedModel):
    config_class, forward = Config, Layer.forward

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention, self.norm = SelfAttention(config), nn.LayerNorm(WIDTH)


class LayerWithAnotherInput(LayerThatIsAModel):
    def forward(self, embedded: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        return super().forward(embedded, **options)


LAYERS: dict[str, type[nn.Module]] = {
    "shifted": Layer,
    "models": LayerThatIsAModel,
    "other input": LayerWithAnotherInput,
}


class OutsideModel(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.words, kind = nn.Embedding(WORDS, WIDTH), LAYERS.get(config.shape, Layer)
        self.position_embeddings = nn.Embedding(64, WIDTH) if config.shape in LAYERS else None
        self.layers = nn.ModuleList([kind(config) for _ in range(2)])
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        hidden_states = self.words(input_ids)
        shift = int(self.config.shape == "shifted")
        if self.position_embeddings is not None:
            hidden_states = hidden_states + self.position_embeddings(torch.arange(input_ids.shape[1]) + shift)
        if self.config.shape == "packed":
            hidden_states = hidden_states.flatten(0, 1)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=attention_mask, rows=len(input_ids))
        return BaseModelOutput(last_hidden_state=hidden_states.view(*input_ids.shape, -1))


class WithUnusedCache(OutsideModel):
    """Looks causal, and is not."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None
    ) -> BaseModelOutput:
        return super().forward(input_ids, attention_mask)


def outsider(shape: str = "", kind: type[OutsideModel] = OutsideModel) -> Any:
    torch.manual_seed(0)
    model = kind(Config(shape)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def test_a_model_without_a_cache_is_bidirectional() -> None:
    """The buckets of T5's bias know it."""
    model, ids = outsider(), tokens(2, 9)
    assert not inspect_model(model).stacks[0].causal
    patch_model(model, "none")
    order = torch.randperm(9)
    shuffled = model(ids[:, order]).last_hidden_state
    torch.testing.assert_close(shuffled, model(ids).last_hidden_state[:, order], rtol=0, atol=1e-5)


@torch.no_grad()
def test_layers_that_are_models_belong_to_the_model_around_them() -> None:
    """Its table is theirs."""
    model, ids = outsider("models"), tokens(2, 9)
    expected = model(ids).last_hidden_state
    patch_model(model, "native")
    assert model.position_encoding.config.name == "learned"
    torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=0, atol=1e-5)
    patch_model(model, "none")
    same = model(ids[:, :1].expand(-1, 9)).last_hidden_state
    torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=0, atol=1e-5)


def test_positions_that_are_added_around_layers_are_noticed() -> None:
    with pytest.raises(UnsupportedError, match="the input of its first layer depends on the position of tokens"):
        patch_model(outsider("other input"), "none")


def test_a_table_whose_first_row_is_unknown_is_refused() -> None:
    """A padded row, whose tokens are counted, would get the wrong positions."""
    model, ids = outsider("shifted"), tokens(2, 9)
    patch_model(model, "alibi")(ids)
    for scheme in ("native", "learned"):
        with pytest.raises(UnsupportedError, match="first token has row 1 of position_embeddings, not row 0"):
            patch_model(model, scheme)(ids)


@torch.no_grad()
def test_a_table_of_other_code_continues_after_a_cache() -> None:
    model, ids = patched("gpt2", None), tokens(1, 12)
    model.transformer.__class__ = type("OwnModel", (GPT2Model,), {})
    patch_model(model, "learned")
    expected = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    torch.testing.assert_close(decoded(model, ids, DynamicCache(), [7, 1, 4]), expected, rtol=0, atol=1e-4)


def test_a_short_run_has_a_mask() -> None:
    model, ids = outsider("masked"), tokens(2, 9)
    patch_model(model, "alibi")(ids, attention_mask=torch.ones_like(ids))


def test_causality_is_observed_in_code_from_outside_transformers() -> None:
    with pytest.raises(UnsupportedError, match=r"classified as causal.*bidirectional.*causal=False"):
        patch_model(outsider(kind=WithUnusedCache), "t5")


@pytest.mark.parametrize("scheme", ["native", "none", "alibi"])
def test_positions_that_cannot_be_looked_for_are_not_taken_for_none(scheme: str) -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attention \(SelfAttention\) does not read and return vect"):
        patch_model(outsider("packed"), scheme)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", ROTARIES)
@torch.no_grad()
def test_a_submodule_that_rotates_heads_is_replaced(shape: str, shared: bool, tmp_path: Path) -> None:
    model, without, ids = outsider(shape), outsider(), tokens(2, 9)
    if shared:
        model.layers[1].attention.rotary = model.layers[0].attention.rotary
    expected = model(ids).last_hidden_state
    for scheme in ("none", "alibi", "rope"):
        output = patch_model(model, scheme)(ids).last_hidden_state
        torch.testing.assert_close(output, patch_model(without, scheme)(ids).last_hidden_state, rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path / scheme)
        loaded = OutsideModel.from_pretrained(tmp_path / scheme).eval()
        assert torch.equal(loaded(ids).last_hidden_state, output)
    unpatch_model(model)
    assert torch.equal(model(ids).last_hidden_state, expected)
    if shape == "by length":
        with pytest.raises(UnsupportedError, match=r"does not match .* Any scheme can replace it"):
            patch_model(model, "native")
        return
    native = patch_model(model, "native").position_encoding.config
    assert native.layout == ("interleaved" if shape == "interleaved" else "half")
    torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=0, atol=1e-5)


class WithDropout(OutsideModel):
    """Draws random numbers in evaluation."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        hidden_states = nn.functional.dropout(self.words(input_ids), 0.5, training=True)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=attention_mask)
        return BaseModelOutput(last_hidden_state=hidden_states)


def test_a_rotation_beside_other_positions_is_refused_with_its_code() -> None:
    with pytest.raises(UnsupportedError, match=rf"its code \({__name__}\) has positions .* draws random numbers"):
        patch_model(outsider("halves", WithDropout), "alibi")


@torch.no_grad()
def test_a_class_may_have_the_name_of_one_of_transformers(tmp_path: Path) -> None:
    kind: Any = type("PhiForCausalLM", (OutsideModel,), {})
    model = patch_model(outsider(kind=kind), "alibi")
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens(1, 9)).last_hidden_state, model(tokens(1, 9)).last_hidden_state)


def test_a_module_without_a_model_of_transformers_is_named() -> None:
    with pytest.raises(TypeError, match=r"got GPT\. .* derived from PreTrainedModel; others are not supported"):
        patch_model(type("GPT", (nn.Module,), {})(), "alibi")  # type: ignore[arg-type]
