"""The rows of the table of schemes, and the settings in which its schemes are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_posenc.schemes import BuildContext, Positions, SchemeConfig, SchemeParts, get_scheme

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM, MAX_POSITIONS = 24, 6, 3, 16, 64


@dataclass(frozen=True)
class Row:
    """One scheme in the tests.

    Args:
        kind: which form the reference has.
            "none": nothing to compute, no reference.
            "additive": `reference(config, part, hidden, position, length)` -> the vector, a list.
            "map": `reference(config, head_dim, vector, position, length)` -> the mapped query or key, a list.
            "bias": `reference(config, part, heads, causal, head, distance)` -> a number.
            "logits": `reference(config, parts, case)` -> logits `[head][query][key]` of a `LogitCase`.
            "mixed": an arrangement of other schemes, no reference of its own.
        reference: the scheme's function beside its row.
        variants: configs that together reach every option; the first one, which also goes through the matrix of
            architectures, is small enough for heads of 8 dimensions and sequences of 14 tokens to show it.
        causal_only: whether the scheme refuses bidirectional models.
        everywhere: whether the matrix runs it in every build of architecture, not only in a Llama and a BERT: one
            scheme for each mechanism of the engine.
        marks: the properties it has, one character each in the order of `hf_posenc.metrics.properties_table`:
            + has it, - fails it, . does not apply. Unique, same at any length, relative, linear, defined past the
            training length, deterministic, several axes, keeps norms, decays, float16, bfloat16.
        reach: how many tokens each variant can encode at most, `None` for any number; empty where none has a limit.
        of_start: whether the reference computes learned numbers from the options, and so is that of an untrained part.
        causal_marks: those of the causal form, for a scheme that is another function there; `marks` are then those of
            the bidirectional form.
    """

    kind: str
    reference: Callable[..., Any] | None
    variants: tuple[SchemeConfig, ...]
    causal_only: bool = False
    everywhere: bool = False
    marks: str = ""
    reach: tuple[int | None, ...] = ()
    causal_marks: str = ""
    of_start: bool = False


#: Of head, query and key.
Logits = list[list[list[float]]]


@dataclass(frozen=True)
class LogitCase:
    """A small attention problem in plain lists of floats.

    Args:
        query: `[head][token][component]`.
        key: `[head][token][component]`, already repeated for grouped heads.
        hidden: `[token][component]`.
        positions: of the tokens.
        scaling: factor of the dot products.
        causal: whether only keys at or before the query will be compared.
    """

    query: list[list[list[float]]]
    key: list[list[list[float]]]
    hidden: list[list[float]]
    positions: list[int]
    scaling: float
    causal: bool

    def logits(self, value: Callable[[int, int, int], float]) -> Logits:
        """All logits, each by its head, query and key."""
        tokens = range(len(self.positions))
        return [[[value(head, i, j) for j in tokens] for i in tokens] for head in range(len(self.query))]

    def product(self, head: int, query: int, key: int) -> float:
        """The scaled dot product of a pair, without any positions."""
        return self.scaling * dot(self.query[head][query], self.key[head][key])

    def biased(self, bias: Callable[[int, int, int], float]) -> Logits:
        """The scaled dot products plus `bias(head, query, key)`."""
        return self.logits(lambda head, i, j: self.product(head, i, j) + bias(head, i, j))

    def mapped(self, mapping: Callable[[list[float], int, int], list[float]]) -> Logits:
        """The scaled dot products after `mapping(vector, query head, token)` of queries and of keys."""
        queries, keys = (
            [[mapping(x, head, token) for token, x in enumerate(tokens)] for head, tokens in enumerate(vectors)]
            for vectors in (self.query, self.key)
        )
        return self.logits(lambda head, i, j: self.scaling * dot(queries[head][i], keys[head][j]))

    def distance(self, query: int, key: int) -> int:
        """How far the key lies in the past."""
        return self.positions[query] - self.positions[key]


def array(values: Any) -> np.ndarray:
    """Numbers of a part, or of lists, in double precision."""
    return np.array(values.tolist() if hasattr(values, "tolist") else values, dtype=np.float64)


def dot(first: list[float], second: list[float]) -> float:
    """The inner product of two vectors."""
    return sum(a * b for a, b in zip(first, second, strict=True))


def context_for(config: SchemeConfig) -> BuildContext:
    """A small place with grouped heads; bidirectional for the variants that need it."""
    causal = config != get_scheme("alibi")(variant="asymmetric")  # type: ignore[call-arg]
    causal = causal and getattr(config, "max_distance_ahead", None) is None
    return BuildContext(
        HIDDEN, HEADS, HEAD_DIM, causal=causal, max_positions=MAX_POSITIONS, num_key_value_heads=KEY_VALUE_HEADS
    )


def positions_of(*lengths: int, padded_to: int | None = None) -> Positions:
    """Left-padded rows of the given lengths; padding has the position -1."""
    width = padded_to or max(lengths)
    ids = torch.arange(width).unsqueeze(0) - (width - torch.tensor(lengths).unsqueeze(1))
    return Positions(ids.clamp(min=-1), torch.tensor(lengths).unsqueeze(1), token_ids=(ids * 7 % 11).clamp(min=0))


def parts_for(config: SchemeConfig, trained: bool = False) -> SchemeParts:
    """The parts of a config as they are outside training; if `trained`, with weights moved away from their start."""
    torch.manual_seed(0)
    parts = config.build(context_for(config))
    generator = torch.Generator().manual_seed(5)
    for part in parts:
        part.eval()
        for parameter in part.parameters() if trained else ():
            with torch.no_grad():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return parts
