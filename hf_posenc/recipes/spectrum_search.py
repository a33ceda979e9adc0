"""A search for the factors of RoPE's frequencies at a longer context, without training."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from hf_posenc.errors import COLLECTED, UnsupportedError
from hf_posenc.patching import patch_model
from hf_posenc.patching.anatomy.anatomy import TEXT
from hf_posenc.patching.inspection import native_scheme_of
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.preserve import evaluation_mode
from hf_posenc.recipes.initialization.model import checked_tokens
from hf_posenc.recipes.spectrum_candidates import CandidateSpace, SpectrumCandidate
from hf_posenc.recipes.swap import restore_encoding
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.rotary.rope import STATED_BY_FREQUENCIES, RopeConfig
from hf_posenc.wrapping import setting


@dataclass(frozen=True)
class SpectrumSearch:
    """The result of `search_spectrum`.

    Args:
        config: RoPE with the best factors past the trained length, for `patch_model`.
        best: the best candidate.
        yarn: YaRN for the same extension, measured in the same way.
        critical_pair: index of the first pair that makes less than one turn within the trained length, or of the last
            pair if none does.
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
    needle_tokens: int | None = None,
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
        needle_tokens: tokens of a repeated span; `None` takes 16, or an eighth of a short text. Its first quarter is a
            hint, and does not count.
        seed: of mutations and of the places of the spans.
        on_evaluation: called with each candidate as soon as it is measured, for a progress bar.

    Returns:
        The config, the best candidate, YaRN for comparison, and the losses of the search.

    Raises:
        UnsupportedError: for a model that is not causal, or whose scheme is not RoPE without a scaling.
        ValueError: for a length that is not past the trained one, texts of another length, or ids that are not in the
            vocabulary.
    """
    transaction = Transaction(model)
    target, scheme = transaction.model, _plain_rope(transaction)
    stated = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    trained = stated if trained_length is None else trained_length
    if trained is None or not 0 < trained < length:
        known = "an unknown number of" if trained is None else trained
        raise ValueError(
            f"length is {length}, and the model was trained on {known} tokens. Give a longer length than the trained "
            "one. If the config does not have that, pass trained_length."
        )
    tokens = checked_tokens(tokens, "tokens", target, 1)
    if tokens.shape[1] != length:
        raise ValueError(f"tokens have the shape {tuple(tokens.shape)}; expected (texts, {length}).")
    if not 0 <= needle_weight <= 1 or evaluations < 1:
        raise ValueError(
            f"needle_weight is {needle_weight} and evaluations {evaluations}; expected 0 to 1, and at least 1."
        )
    span = min(16, length // 8) if needle_tokens is None else needle_tokens
    if needle_weight and not 4 <= span <= length // 8:
        raise ValueError(
            f"A repeated span has {span} tokens, and texts have {length}; expected 4 to an eighth of a text. Give "
            "longer texts, another needle_tokens, or needle_weight=0, which repeats nothing."
        )
    generator = np.random.default_rng(seed)
    texts, needles = with_needles(tokens.to(target.device), span if needle_weight else 0, generator)
    before = transaction.encoding
    space = CandidateSpace(scheme, trained, length, _rotary_dim(transaction, scheme))

    def measured(candidate: SpectrumCandidate) -> SpectrumCandidate:
        with setting(COLLECTED, []):  # Candidates are read without a cache.
            patch_model(target, space.config(candidate))
        loss = objective(target, texts, needles, needle_weight)
        result = dataclasses.replace(candidate, loss=loss)
        if on_evaluation is not None:
            on_evaluation(result)
        return result

    try:
        with evaluation_mode(target):
            candidates = [measured(space.yarn())]
            proposals = space.proposals(candidates, generator)
            while len(candidates) < evaluations:
                candidates.append(measured(next(proposals)))
    finally:
        restore_encoding(Transaction(target), before)
    best = min(candidates, key=lambda tried: tried.loss)
    losses = tuple(np.minimum.accumulate([tried.loss for tried in candidates]).tolist())
    return SpectrumSearch(space.config(best), best, candidates[0], space.critical, losses)


def _plain_rope(transaction: Transaction) -> RopeConfig:
    model, encoding = transaction.model, transaction.encoding
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(model).__name__} is not a decoder that predicts the next token, whose loss the search lowers. Load "
            "the model with AutoModelForCausalLM."
        )
    scheme: SchemeConfig = native_scheme_of(transaction) if encoding is None else encoding.config
    if not isinstance(scheme, RopeConfig) or scheme.scaling is not None:
        raise UnsupportedError(
            f"The scheme of {type(model).__name__} is {scheme}; the search needs RoPE without a scaling. Patch the "
            "model with 'rope' and the theta that it was trained with."
        )
    if scheme.inverse_frequencies is not None:
        raise UnsupportedError(f"The RoPE of {type(model).__name__} {STATED_BY_FREQUENCIES}")
    return scheme


def _rotary_dim(transaction: Transaction, scheme: RopeConfig) -> int:
    """How many dimensions of a head the scheme rotates in a model."""
    planned = transaction.plan_alone(scheme, transaction.anatomy.stacks([TEXT]))
    layers = [layer for stack in planned.stacks.values() for layer in stack.layers]
    dims: set[int] = {getattr(layer.query_key_map, "rotary_dim", 0) for layer in layers}
    if len(dims) != 1:
        raise UnsupportedError(
            f"The layers of {type(transaction.model).__name__} rotate {sorted(map(str, dims))} dimensions; the search "
            "needs one number for all of them."
        )
    return dims.pop()


#: What a token of the last quarter of a text is.
_TEXT, _NEEDLE, _LEFT_OUT = 0, 1, 2
#: Repeated spans take at most this share of the tokens that count.
_NEEDLE_SHARE = 4


def with_needles(tokens: Tensor, needle_tokens: int, generator: Generator) -> tuple[Tensor, Tensor]:
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


def objective(model: PreTrainedModel, texts: Tensor, kinds: Tensor, needle_weight: float) -> float:
    """A mean of the loss of the last quarter of the texts and that of the repeated spans; infinity if it is not finite.

    Args:
        model: a causal model, in evaluation mode.
        texts: `(texts, length)` token ids, from `with_needles`.
        kinds: `(counted,)`, from `with_needles`.
        needle_weight: share of the repeated spans, 0 to 1.
    """
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
