"""Candidates of a search for RoPE's factors: YaRN, what is near it, and mutations of the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.rotary.scaling import LongRopeScaling, YarnScaling
from hf_posenc.schemes.rotary.scaling.base import rope_inverse_frequencies

#: The best candidates, which new ones are made from.
_PARENTS = 4
#: Size of a mutation of factors, as a share of the logarithm of the extension.
_STEP = 0.25
#: The same for the factor of cosine and sine. YaRN's is 1 + 0.1 times that logarithm.
_ATTENTION_STEP = 0.05
#: A factor is at most this multiple of the extension.
_LARGEST = 1.5


@dataclass(frozen=True)
class SpectrumCandidate:
    """Divisors of the frequencies, and what they gave.

    Args:
        factors: one per rotated pair, from the fastest to the slowest, never falling.
        attention_factor: the factor of cosine and sine.
        loss: the objective of the search, in nats per token; NaN before it is measured.
    """

    factors: tuple[float, ...]
    attention_factor: float
    loss: float = math.nan


class CandidateSpace:
    """The candidates of a search.

    Args:
        scheme: the RoPE of the model.
        trained: the length that it was trained on.
        length: the longer one.
        rotary_dim: rotated dimensions of a head.
    """

    def __init__(self, scheme: RopeConfig, trained: int, length: int, rotary_dim: int) -> None:
        self.scheme, self.trained, self.extension = scheme, trained, length / trained
        if self.extension * trained < length:
            # The length of a scaling is rounded down.
            self.extension = math.nextafter(self.extension, math.inf)
        self.frequencies = rope_inverse_frequencies(scheme.theta, rotary_dim).double()
        slow = (self.frequencies * trained < 2 * math.pi).nonzero().flatten().tolist()
        self.pairs, self.rotary_dim = len(self.frequencies), rotary_dim
        self.critical = min(slow, default=self.pairs - 1)

    def config(self, candidate: SpectrumCandidate) -> RopeConfig:
        """RoPE with the factors of a candidate past the trained length."""
        scaling = LongRopeScaling(
            short_factor=(1.0,) * self.pairs,
            long_factor=candidate.factors,
            original_max_positions=self.trained,
            factor=self.extension,
            attention_factor=candidate.attention_factor * (self.scheme.attention_scaling or 1.0),
        )
        # A factor of the config itself would hide that of the scaling.
        return dataclasses.replace(self.scheme, scaling=scaling, attention_scaling=None)

    def yarn(self) -> SpectrumCandidate:
        """YaRN for the same extension."""
        scaling = YarnScaling(factor=self.extension, original_max_positions=self.trained)
        scaled = scaling.constants(self.scheme.theta, self.rotary_dim).double()
        factors = (self.frequencies / scaled).tolist()
        return SpectrumCandidate(self._rising(factors), scaling.attention_scaling())

    def proposals(self, measured: list[SpectrumCandidate], generator: Generator) -> Iterator[SpectrumCandidate]:
        """Yields candidates to measure next, without end.

        Args:
            measured: what was measured: YaRN, and then each proposal, added by the caller.
            generator: of the mutations.
        """
        step = 2 * _ATTENTION_STEP * math.log(self.extension)
        yield from self._along(
            lambda x: dataclasses.replace(measured[0], attention_factor=_limited(measured[0], x)), step, measured
        )
        attention_factor = _best(measured).attention_factor
        yarn = dataclasses.replace(measured[0], attention_factor=attention_factor)
        yield from self._along(lambda x: self._shifted(yarn, x), max(1.0, self.pairs / 16), measured)
        starts = {max(1, self.critical), max(1, self.critical - self.pairs // 8)}
        for start in sorted(starts & set(range(self.pairs)), reverse=True):
            # Slow pairs have the whole factor; faster ones follow from it as in NTK scaling.
            fast = [self.extension ** (pair / start) for pair in range(start)]
            slow = [self.extension] * (self.pairs - start)
            yield SpectrumCandidate(self._rising([*fast, *slow]), attention_factor)
        while True:
            yield self.mutated(sorted(measured, key=lambda candidate: candidate.loss)[:_PARENTS], generator)

    def _along(
        self, candidate_at: Callable[[float], SpectrumCandidate], step: float, measured: list[SpectrumCandidate]
    ) -> Iterator[SpectrumCandidate]:
        """Candidates a step before and a step after the best one, and where a parabola through the three is lowest."""
        middle = _best(measured).loss
        losses = []
        for sign in (-1, 1):
            yield candidate_at(sign * step)
            losses.append(measured[-1].loss)
        bend = losses[0] - 2 * middle + losses[1]
        if bend > 0 and math.isfinite(bend):
            yield candidate_at(step * min(max((losses[0] - losses[1]) / (2 * bend), -2.0), 2.0))

    def _shifted(self, candidate: SpectrumCandidate, pairs: float) -> SpectrumCandidate:
        """A candidate in which each pair has the factor of the pair `pairs` places before it."""
        index = np.arange(self.pairs)
        factors = np.interp(index - pairs, index, candidate.factors)
        return dataclasses.replace(candidate, factors=self._rising(factors), loss=math.nan)

    def mutated(self, parents: list[SpectrumCandidate], generator: Generator) -> SpectrumCandidate:
        """A parent with another factor of cosine and sine, shifted, or with some neighbouring factors changed."""
        parent = parents[int(generator.integers(len(parents)))]
        kind = generator.random()
        # Mostly small, because the parents are good already, but sometimes large.
        size = 2 * generator.normal() * generator.random()
        if kind < 0.25:
            change = size * _ATTENTION_STEP * math.log(self.extension)
            return dataclasses.replace(parent, attention_factor=_limited(parent, change), loss=math.nan)
        if kind < 0.5:
            return self._shifted(parent, size * self.pairs / 16)
        lowest = min(max(1, self.critical - self.pairs // 4), self.pairs - 1)
        start = int(generator.integers(lowest, self.pairs))
        stop = int(generator.integers(start + 1, self.pairs + 1))
        factors = np.array(parent.factors)
        factors[start:stop] *= math.exp(size * _STEP * math.log(self.extension))
        return dataclasses.replace(parent, factors=self._rising(factors), loss=math.nan)

    def _rising(self, factors: ArrayLike) -> tuple[float, ...]:
        """The nearest factors that never fall from pair to pair, between 1 and the largest one allowed."""
        limited = np.clip(factors, 1.0, _LARGEST * self.extension)
        above, below = np.maximum.accumulate(limited), np.minimum.accumulate(limited[::-1])[::-1]
        return tuple(np.sqrt(above * below).tolist())


def _best(measured: list[SpectrumCandidate]) -> SpectrumCandidate:
    return min(measured, key=lambda candidate: candidate.loss)


def _limited(candidate: SpectrumCandidate, change: float) -> float:
    """The candidate's factor of cosine and sine, with `change` added to its logarithm, limited to 0.5 to 4."""
    return min(max(candidate.attention_factor * math.exp(change), 0.5), 4.0)
