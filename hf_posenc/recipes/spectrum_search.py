"""A search for the factors of RoPE's frequencies at a longer context, without training."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching import native_scheme, patch_model
from hf_posenc.patching.find.discovery import find_stacks
from hf_posenc.patching.find.model_parts import TEXT
from hf_posenc.patching.place.in_force import current_encoding
from hf_posenc.patching.place.model_checks import unwrapped
from hf_posenc.preserve import evaluation_mode
from hf_posenc.recipes.initialization.logits import layers_of
from hf_posenc.recipes.restore import restore_encoding
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.rotary.rope import STATED_BY_FREQUENCIES, RopeConfig
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
#: What a token of the last quarter of a text is.
_TEXT, _NEEDLE, _LEFT_OUT = 0, 1, 2
#: Repeated spans take at most this share of the tokens that count.
_NEEDLE_SHARE = 4


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


@dataclass(frozen=True)
class SpectrumSearch:
    """The result of `search_spectrum`.

    Args:
        config: RoPE with the best factors past the trained length, for `patch_model`.
        best: the best candidate.
        yarn: YaRN for the same extension, measured in the same way.
        critical_pair: index of the first pair that makes less than one turn within the trained length.
        losses: the lowest loss after each evaluation.
    """

    config: RopeConfig
    best: SpectrumCandidate
    yarn: SpectrumCandidate
    critical_pair: int
    losses: tuple[float, ...]


def search_spectrum(
    model: nn.Module,
    tokens: Tensor,
    length: int,
    *,
    trained_length: int | None = None,
    evaluations: int = 64,
    needle_weight: float = 0.5,
    needle_tokens: int = 16,
    seed: int = 0,
    on_evaluation: Callable[[SpectrumCandidate], None] | None = None,
) -> SpectrumSearch:
    """Searches for the factors with which a model with RoPE reads longer texts best, without training it.

    As in LongRoPE2 (arXiv:2502.20082, sections 3.2 and 3.3), slow pairs, which have not made a full turn in training,
    have their own factors, which never fall from one pair to the next. In some of the first candidates, faster pairs
    follow from the first of them as in NTK scaling. The candidates mutate, and the best survive.

    Four things differ from the paper. The search begins with YaRN, so that its result is not worse on `tokens`. The
    factor of cosine and sine takes part. Before the mutations, parabolas through three candidates each give the best
    factor of cosine and sine, and the best shift of YaRN's factors from pair to pair. A needle is a span of the text
    itself, which is repeated in its last quarter, so that no tokenizer is needed.

    Texts of up to the trained length are read with the original frequencies, and with the factor of cosine and sine
    that was found: stock models have one for all lengths. `patch_model(model, result.config)` puts
    the result into the model, and `export_model` writes a stock checkpoint of it (`rope_type="longrope"`). Measure it
    on other texts than `tokens`.

    Args:
        model: a causal model whose scheme is RoPE without a scaling, native or patched. It is not changed.
        tokens: `(texts, length)` token ids of long texts, without padding.
        length: of the texts that the model is to read, in tokens.
        trained_length: the length that it was trained on; `None` takes that of its config.
        evaluations: how many candidates are measured, each with one forward per text.
        needle_weight: share of the repeated spans in the objective, 0 to 1; the rest is the loss of the other tokens of
            the last quarter of the text. With 0, no span is repeated.
        needle_tokens: tokens of a repeated span. Its first quarter is a hint, and does not count.
        seed: of mutations and of the places of the spans.
        on_evaluation: told of each candidate as soon as it is measured, for a progress bar.

    Returns:
        The config, and what was found on the way.

    Raises:
        UnsupportedError: for a model that is not causal, or whose scheme is not RoPE without a scaling.
        ValueError: for a length that is not past the trained one, or texts of another length.
    """
    target = unwrapped(model)
    scheme = _plain_rope(target)
    trained = trained_length or getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if trained is None or length <= trained:
        raise ValueError(
            f"length is {length}, and the model was trained on {trained or 'an unknown number of'} tokens. Give a "
            "length past the trained one; trained_length states that, if the config does not."
        )
    if tokens.dim() != 2 or tokens.shape[1] != length or not len(tokens):
        raise ValueError(f"tokens have the shape {tuple(tokens.shape)}; expected (texts, {length}).")
    if not 0 <= needle_weight <= 1 or not 4 <= needle_tokens <= length // 8 or evaluations < 1:
        raise ValueError(
            f"needle_weight is {needle_weight}, needle_tokens {needle_tokens} and evaluations {evaluations}; expected "
            f"0 to 1, 4 to {length // 8}, and at least 1."
        )
    generator = np.random.default_rng(seed)
    texts, needles = _with_needles(tokens.to(target.device), needle_tokens if needle_weight else 0, generator)
    before = current_encoding(target)
    space = _Space(scheme, trained, length, _rotary_dim(target, scheme))

    def measured(candidate: SpectrumCandidate) -> SpectrumCandidate:
        patch_model(target, space.config(candidate))
        loss = _loss(target, texts, needles, needle_weight)
        found = dataclasses.replace(candidate, loss=loss)
        if on_evaluation is not None:
            on_evaluation(found)
        return found

    try:
        with evaluation_mode(target), warnings.catch_warnings():
            # Candidates are read without a cache.
            warnings.filterwarnings("ignore", message=".*depends on the length of the sequence", category=UserWarning)
            found = [measured(space.yarn())]
            proposals = space.proposals(found, generator)
            while len(found) < evaluations:
                found.append(measured(next(proposals)))
    finally:
        restore_encoding(target, before)
    best = min(found, key=lambda one: one.loss)
    losses = tuple(np.minimum.accumulate([one.loss for one in found]).tolist())
    return SpectrumSearch(space.config(best), best, found[0], space.critical, losses)


class _Space:
    """The candidates of a search.

    Args:
        scheme: the RoPE of the model.
        trained: the length that it was trained on.
        length: the longer one.
        rotary_dim: rotated dimensions of a head.
    """

    def __init__(self, scheme: RopeConfig, trained: int, length: int, rotary_dim: int) -> None:
        self.scheme, self.trained, self.extension = scheme, trained, length / trained
        self.frequencies = rope_inverse_frequencies(scheme.theta, rotary_dim).double()
        slow = (self.frequencies * trained < 2 * math.pi).nonzero().flatten().tolist()
        pairs = len(self.frequencies)
        self.critical = min(slow, default=pairs - 1)
        self.pairs, self.rotary_dim = pairs, rotary_dim

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

    def proposals(self, found: list[SpectrumCandidate], generator: Generator) -> Iterator[SpectrumCandidate]:
        """What to measure next, without end.

        Args:
            found: what was measured: YaRN, and then each proposal, added by the caller.
            generator: of the mutations.
        """
        step = 2 * _ATTENTION_STEP * math.log(self.extension)
        yield from self._along(
            lambda x: dataclasses.replace(found[0], attention_factor=_limited(found[0], x)), step, found
        )
        attention_factor = _best(found).attention_factor
        yarn = dataclasses.replace(found[0], attention_factor=attention_factor)
        yield from self._along(lambda x: self._shifted(yarn, x), max(1.0, self.pairs / 16), found)
        for start in sorted({self.critical, max(1, self.critical - self.pairs // 8)}, reverse=True):
            yield self._of_slow(start, [self.extension] * (self.pairs - start), attention_factor)
        while True:
            yield self.mutated(sorted(found, key=lambda one: one.loss)[:_PARENTS], generator)

    def _along(
        self, candidate_at: Callable[[float], SpectrumCandidate], step: float, found: list[SpectrumCandidate]
    ) -> Iterator[SpectrumCandidate]:
        """Candidates a step before and a step after the best one, and where a parabola through the three is lowest."""
        middle = _best(found).loss
        losses = []
        for sign in (-1, 1):
            yield candidate_at(sign * step)
            losses.append(found[-1].loss)
        bend = losses[0] - 2 * middle + losses[1]
        if bend > 0 and math.isfinite(bend):
            yield candidate_at(step * min(max((losses[0] - losses[1]) / (2 * bend), -2.0), 2.0))

    def _shifted(self, candidate: SpectrumCandidate, pairs: float) -> SpectrumCandidate:
        """A candidate in which each pair has the factor of the one that is so many pairs faster."""
        index = np.arange(self.pairs)
        factors = np.interp(index - pairs, index, candidate.factors)
        return dataclasses.replace(candidate, factors=self._rising(factors), loss=math.nan)

    def _of_slow(self, start: int, slow: list[float], attention_factor: float) -> SpectrumCandidate:
        """Slow pairs have their own factors; faster ones follow from the first of them as in NTK scaling."""
        fast = [slow[0] ** (pair / start) for pair in range(start)]
        return SpectrumCandidate(self._rising([*fast, *slow]), attention_factor)

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
        """The nearest factors between 1 and the largest of which none is below the one before it."""
        limited = np.clip(factors, 1.0, _LARGEST * self.extension)
        above, below = np.maximum.accumulate(limited), np.minimum.accumulate(limited[::-1])[::-1]
        return tuple(np.sqrt(above * below).tolist())


def _best(found: list[SpectrumCandidate]) -> SpectrumCandidate:
    return min(found, key=lambda one: one.loss)


def _limited(candidate: SpectrumCandidate, change: float) -> float:
    """The candidate's factor of cosine and sine, changed by so much of its logarithm."""
    return min(max(candidate.attention_factor * math.exp(change), 0.8), 2.0)


def _plain_rope(model: PreTrainedModel) -> RopeConfig:
    if not model.can_generate():
        raise UnsupportedError(
            f"{type(model).__name__} does not predict the next token, whose loss the search lowers. Load the model "
            "with AutoModelForCausalLM."
        )
    fixed = [stack.architecture.fixed_length for stack in find_stacks(model, [TEXT]) if stack.architecture.fixed_length]
    if fixed:
        raise UnsupportedError(f"{type(model).__name__} cannot read longer texts with any scheme: {fixed[0]}.")
    encoding = current_encoding(model)
    scheme: SchemeConfig = native_scheme(model) if encoding is None else encoding.config
    if not isinstance(scheme, RopeConfig) or scheme.scaling is not None:
        raise UnsupportedError(
            f"The scheme of {type(model).__name__} is {scheme}; the search needs RoPE without a scaling. Patch the "
            "model with 'rope' and the theta that it was trained with."
        )
    if scheme.inverse_frequencies is not None:
        raise UnsupportedError(f"The RoPE of {type(model).__name__} {STATED_BY_FREQUENCIES}")
    return scheme


def _rotary_dim(model: PreTrainedModel, scheme: RopeConfig) -> int:
    """How many dimensions of a head the scheme rotates in this model."""
    before = current_encoding(model)
    try:
        patch_model(model, scheme)
        encoding = current_encoding(model)
        assert encoding is not None
        found: set[int] = {getattr(layer.query_key_map, "rotary_dim", 0) for layer in layers_of(encoding, TEXT)}
    finally:
        restore_encoding(model, before)
    if len(found) != 1:
        raise UnsupportedError(
            f"The layers of {type(model).__name__} rotate {sorted(map(str, found))} dimensions; the search needs one "
            "number for all of them."
        )
    return found.pop()


def _with_needles(tokens: Tensor, needle_tokens: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """The texts with spans from somewhere before, repeated at equal distances in their last quarter.

    Args:
        tokens: `(texts, length)` token ids.
        needle_tokens: tokens of a span; 0 repeats none.
        generator: of the places that spans are taken from.

    Returns:
        The texts, and what the tokens of their last quarter are, `(counted,)`: `_TEXT`, `_NEEDLE`, or `_LEFT_OUT` for
        the first quarter of a span, which is a hint, and the token after it.
    """
    length = tokens.shape[1]
    counted = length - length * 3 // 4
    texts, kinds = tokens.clone(), torch.full((counted,), _TEXT)
    number = max(1, counted // (_NEEDLE_SHARE * needle_tokens)) if needle_tokens else 0
    for last in range(1, number + 1):
        stop = counted * last // number
        start, hint = stop - needle_tokens, needle_tokens // 4
        kinds[start : start + hint], kinds[start + hint : stop], kinds[stop : stop + 1] = _LEFT_OUT, _NEEDLE, _LEFT_OUT
        for text, source in zip(texts, tokens, strict=True):
            place = int(generator.integers(0, length // 2))
            text[length - counted + start : length - counted + stop] = source[place : place + needle_tokens]
    return texts, kinds.to(tokens.device)


def _loss(model: PreTrainedModel, texts: Tensor, kinds: Tensor, needle_weight: float) -> float:
    """The objective: the loss of the last quarter of the texts, and that of the repeated spans."""
    # The logits of a whole text of a large vocabulary can take more memory than the model.
    counted = len(kinds)
    keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    options: dict[str, Any] = {"logits_to_keep": counted + 1} if keeps else {}
    losses = []
    for text in texts:
        logits = model(input_ids=text.unsqueeze(0), use_cache=False, **options).logits[0, -counted - 1 : -1].float()
        losses.append(functional.cross_entropy(logits, text[-counted:], reduction="none"))
    by_token = torch.stack(losses).mean(0)
    loss = (1 - needle_weight) * float(by_token[kinds == _TEXT].mean())
    if needle_weight:
        loss += needle_weight * float(by_token[kinds == _NEEDLE].mean())
    return loss if math.isfinite(loss) else math.inf
