"""Biases receive the factor of `query . key` that the module uses, wherever it applies this factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from hf_posenc import SchemeConfig, patch_model
from hf_posenc.schemes import BuildContext, PairwiseBias, SchemeParts
from hf_posenc.schemes.parts import LogitScale, QueryKeyMap
from hf_posenc.schemes.positions import AttentionPairs, Positions

from ..thinning import mostly_slow
from .calling import Caller
from .population import Pair, pair_named

#: What modules multiply their scores, queries and keys with: powers of the width of a head. They do so by an attribute,
#: a constant or a tensor.
SCORES, QUERIES, KEYS, NOTHING = (-0.5, 0, 0), (0, -0.5, 0), (0, 0, -0.5), (0, 0, 0)
PLACES = {
    "causal-llama": SCORES,
    "causal-gptj": SCORES,
    "causal-bloom": SCORES,
    "causal-openai-gpt": SCORES,
    "masked-bert": SCORES,
    "causal-xglm": QUERIES,
    "causal-opt": QUERIES,
    "causal-trocr": QUERIES,
    "seq2seq-mvp": QUERIES,
    "masked-xlm": QUERIES,
    "masked-flaubert": QUERIES,
    "masked-deberta": QUERIES,
    "masked-esm": QUERIES,
    "masked-deberta-v2": KEYS,
    "text-openai_privacy_filter": (0, -0.25, -0.25),
    "causal-gpt_neo": NOTHING,
    "seq2seq-t5": NOTHING,
}


class Doubling(LogitScale):
    def forward(self, positions: Positions) -> Tensor:
        return torch.full((1, 1, positions.ids.shape[-1]), 2.0)


class Raised(LogitScale):
    """Has names of its own for its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.constant, self.factor = 3.0, -1.0

    def forward(self, positions: Positions) -> Tensor:
        return torch.full((1, 1, positions.ids.shape[-1]), self.constant + self.factor)


class Factors(PairwiseBias):
    """Notes the width of a head and what scores, queries and keys are multiplied with, and adds nothing.

    A factor may be a matrix, which is 0 at hidden pairs.
    """

    reads_heads = True
    found: ClassVar[list[tuple[int, list[float]]]] = []

    def forward(self, pairs: AttentionPairs) -> Tensor:
        factors = (pairs.scaling, pairs.query_factor, pairs.key_factor)
        self.found.append((pairs.query.shape[-1], [float(torch.as_tensor(factor).max()) for factor in factors]))
        return pairs.query.new_zeros(1, *pairs.query.shape[1:3], pairs.key.shape[2], dtype=torch.float32)


@dataclass(frozen=True)
class FactorsConfig(SchemeConfig):
    name: ClassVar[str] = "factors_for_tests"

    def build(self, context: BuildContext) -> SchemeParts:
        return SchemeParts(logit_bias=Factors())


class DoubledLogits(PairwiseBias):
    reads_heads = True

    def forward(self, pairs: AttentionPairs) -> Tensor:
        return pairs.query.float() @ pairs.expanded_key.float().transpose(-1, -2) * pairs.scaling


@dataclass(frozen=True)
class DoubledConfig(SchemeConfig):
    name: ClassVar[str] = "doubled_for_tests"
    part: str = "scale"

    def build(self, context: BuildContext) -> SchemeParts:
        if self.part == "bias":
            return SchemeParts(logit_bias=DoubledLogits())
        return SchemeParts(logit_scale=Raised() if self.part == "raised" else Doubling())


def bent(heads: Tensor) -> Tensor:
    return heads * (1 + heads.abs())


class BentMap(QueryKeyMap):
    """Bends every number of a head, which no factor commutes with."""

    whole_heads = True

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        return (positions.ids.float(),)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        return bent(query)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        return bent(key)


class BentLogits(PairwiseBias):
    """What `BentMap` changes in the logits."""

    reads_heads = True

    def forward(self, pairs: AttentionPairs) -> Tensor:
        query, key = pairs.query.float() / pairs.query_factor, pairs.expanded_key.float() / pairs.key_factor
        change = bent(query) @ bent(key).transpose(-1, -2) - query @ key.transpose(-1, -2)
        return change * (pairs.scaling * pairs.query_factor * pairs.key_factor)


@dataclass(frozen=True)
class BentConfig(SchemeConfig):
    name: ClassVar[str] = "bent_for_tests"
    as_map: bool = True

    def build(self, context: BuildContext) -> SchemeParts:
        return SchemeParts(query_key_map=BentMap()) if self.as_map else SchemeParts(logit_bias=BentLogits())


def doubled(pair: Pair, part: str) -> Tensor:
    caller = Caller(pair)
    patch_model(caller.model, DoubledConfig(part))
    with torch.no_grad():
        return caller.outputs()


@pytest.mark.parametrize(
    ("name", "powers"), mostly_slow(PLACES.items(), lambda row: row[0] not in ("seq2seq-mvp", "masked-flaubert"))
)
@torch.no_grad()
def test_a_bias_is_told_what_was_multiplied(name: str, powers: tuple[float, ...]) -> None:
    """So a bias that returns the logits doubles them."""
    caller, pair = Caller(pair_named(name)), pair_named(name)
    Factors.found.clear()
    patch_model(caller.model, FactorsConfig())
    plain = caller.outputs()
    assert Factors.found
    for width, factors in Factors.found:
        assert factors == pytest.approx([width**power for power in powers])
    expected, found = doubled(pair, "scale"), doubled(pair, "bias")
    # Doubling is exact in floating point; sums behind it may be taken in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (plain - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", mostly_slow(PLACES, lambda name: name not in ("seq2seq-mvp", "masked-flaubert")))
@torch.no_grad()
def test_a_map_gets_heads_without_the_factors_of_their_module(name: str) -> None:
    found = []
    for as_map in (True, False):
        caller = Caller(pair_named(name))
        for weight in caller.model.parameters():
            weight.mul_(3)
        patch_model(caller.model, BentConfig(as_map))
        found.append(caller.outputs())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_scale_may_call_its_numbers_anything() -> None:
    pair = pair_named("causal-llama")
    assert torch.equal(doubled(pair, "raised"), doubled(pair, "scale"))


@pytest.mark.parametrize("scheme", ["wavelet", "rerope", "dual_chunk", "attention_sinks"])
@pytest.mark.parametrize("length", [7, 8])
def test_a_factor_in_the_shape_of_the_logits_is_not_one_of_the_query(length: int, scheme: str) -> None:
    """OpenAI GPT multiplies its scores with a matrix of zeros and ones; 8 is the width of a head."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes)).eval()
    patch_model(model, scheme)
    tokens = torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        whole, part = model(tokens).logits, model(tokens[:, :length]).logits
    assert (whole[:, :length] - part).abs().max() < 1e-5
