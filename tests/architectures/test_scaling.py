"""The factor of `query . key` that biases are told is the one that the module uses, wherever it applies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from hf_posenc import SchemeConfig, patch_model
from hf_posenc.schemes import BuildContext, PairwiseBias, SchemeParts
from hf_posenc.schemes.parts import LogitScale
from hf_posenc.schemes.positions import AttentionPairs, Positions

from ..thinning import mostly_slow
from .calling import Caller
from .population import Pair, pair_named

#: Modules that scale their scores, their queries or their keys, by an attribute, a constant or a tensor, or not at all.
PAIRS = [
    "causal-gptj", "causal-bloom", "causal-openai-gpt", "causal-xglm", "masked-xlm", "masked-deberta",
    "masked-deberta-v2", "causal-gpt_neo", "seq2seq-t5", "causal-trocr", "seq2seq-mvp", "masked-flaubert",
    "causal-llama",
]  # fmt: skip


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
    """Notes the width of a head and what scores, queries and keys are multiplied with, and adds nothing."""

    reads_heads = True
    found: ClassVar[list[tuple[int, list[float]]]] = []

    def forward(self, pairs: AttentionPairs) -> Tensor:
        factors = (pairs.scaling, pairs.query_factor, pairs.key_factor)
        self.found.append((pairs.query.shape[-1], [float(factor) for factor in factors]))
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


def doubled(pair: Pair, part: str) -> Tensor:
    caller = Caller(pair)
    patch_model(caller.model, DoubledConfig(part))
    with torch.no_grad():
        return caller.outputs()


@pytest.mark.parametrize("name", mostly_slow(PAIRS, lambda name: name in PAIRS[:9]))
def test_a_bias_of_the_logits_themselves_doubles_them(name: str) -> None:
    pair = pair_named(name)
    expected, found = doubled(pair, "scale"), doubled(pair, "bias")
    # Doubling is exact in floating point; sums behind it may be taken in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    plain = Caller(pair)
    patch_model(plain.model, "none")
    assert (plain.outputs() - expected).abs().max() > 1e-2


def test_a_scale_may_call_its_numbers_anything() -> None:
    pair = pair_named("causal-llama")
    assert torch.equal(doubled(pair, "raised"), doubled(pair, "scale"))


def factors_in(name: str) -> list[tuple[int, list[float]]]:
    """The width of a head, and the factors of scores, queries and keys, in each layer of an architecture."""
    caller = Caller(pair_named(name))
    Factors.found.clear()
    patch_model(caller.model, FactorsConfig())
    with torch.no_grad():
        caller.outputs()
    assert Factors.found
    return list(Factors.found)


def test_a_module_that_multiplies_queries_and_keys_is_declared() -> None:
    for width, factors in factors_in("text-openai_privacy_filter"):
        assert factors == pytest.approx([1.0, width**-0.25, width**-0.25])


@pytest.mark.parametrize("length", [7, 8])
def test_a_factor_in_the_shape_of_the_logits_is_not_one_of_the_query(length: int) -> None:
    """OpenAI GPT multiplies its scores with a matrix of zeros and ones; 8 is the width of a head."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes)).eval()
    patch_model(model, "wavelet")
    tokens = torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        whole, part = model(tokens).logits, model(tokens[:, :length]).logits
    assert (whole[:, :length] - part).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("causal-llama", 0),
        ("causal-gptj", 0),
        ("masked-bert", 0),
        ("causal-xglm", 1),
        ("causal-opt", 1),
        ("causal-trocr", 1),
        ("masked-deberta", 1),
        ("masked-deberta-v2", 2),
        ("masked-esm", 1),
        ("causal-gpt_neo", None),
        ("seq2seq-t5", None),
    ],
)
def test_a_bias_is_told_what_was_multiplied(name: str, place: int | None) -> None:
    """The scores, the queries or the keys, with `head_dim ** -0.5`, or none of them."""
    for width, factors in factors_in(name):
        expected = [1.0, 1.0, 1.0]
        if place is not None:
            expected[place] = width**-0.5
        assert factors == pytest.approx(expected)
