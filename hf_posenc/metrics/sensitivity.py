"""Sensitivity of a model to the order and the positions of its tokens, measured on many sentences."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posenc.errors import MeasurementError, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.evaluation import digest, evaluation_result, layer_distances, measure_schemes
from hf_posenc.metrics.forward import is_causal, outputs_of, rounding
from hf_posenc.metrics.language_modeling.token_losses import Frame, special_frame, stream_windows, token_stream
from hf_posenc.metrics.sensitivity_material import ENGLISH, Material
from hf_posenc.metrics.statistics import relative_changes, spread
from hf_posenc.patching.anatomy.anatomy import Anatomy, unwrapped
from hf_posenc.report.records import Quantity, Record, Result, View
from hf_posenc.schemes.config import SchemeConfig

GAPS = (2, 4, 8, 16, 32, 64, 128)
SHIFTS = (1, 16, 256)
#: Number of tokens that are shuffled within each block, and of those before left-padded text.
_BLOCK, _PADDING = 8, 5
#: Length of the windows whose positions are shifted, and how many there are at most.
_SHIFTED, _SHIFTED_WINDOWS = 32, 8
_CAUSAL_NOTE = (
    "The model is causal: the mask gives every token a different prefix, so the order has an effect without positions "
    "too. Compare each number with that of 'none'."
)
_ENCODER_NOTE = "The model is bidirectional: without positions all numbers are 0, up to rounding."
#: By quantity; the last one has no column in the table.
_HEADINGS = {
    "repeated": "gap {gap}", "word_role": "word's role", "roles": "roles", "loss": "loss", "shuffled": "shuffled",
    "shuffled_loss": "shuffled: loss", "shuffled_block": "in {block}s", "shuffled_block_loss": "in {block}s: loss",
    "shift": "+{offset}", "left_padding": "left pad", "sees_order": "sees order",
}  # fmt: skip
_EXPLANATION = (
    "gap n: distance between the states of two equal nouns n tokens apart. Word's role, roles: change of the state of "
    "a noun, and of the sentence, when subject and object are exchanged. Loss: that of the last token, in nats. "
    "Shuffled, in 8s: change of the last token's output, and rise of its loss, when earlier tokens are shuffled, all "
    "together or in blocks of 8. +n: change of all outputs when n is added to every position. Left pad: the same for "
    "left-padded text."
)


def sensitivity_test(
    model: Any,
    tokenizer: Any,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    gaps: Sequence[int] = GAPS,
    context: int = 48,
    offsets: Sequence[int] = SHIFTS,
    material: Material = ENGLISH,
    text: str | None = None,
    seed: int = 0,
) -> Result:
    """Measures how repeated words, exchanged roles, a shuffled context and shifted positions affect a model.

    In an encoder without position information, all of these are 0 up to rounding: it sees a set of tokens. In a causal
    model, the mask itself distinguishes positions from the second layer on, because the state of a token depends on the
    tokens before it. Compare its numbers with those of the scheme `"none"`.

    The model is left unchanged, also after an error.

    Args:
        model: any transformers model, patched or not. For an encoder-decoder, the encoder is measured.
        tokenizer: its tokenizer.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        gaps: numbers of tokens from a word to its repetition; see `repeated_words`.
        context: number of tokens that are shuffled; see `permuted_context`.
        offsets: numbers that are added to positions; see `shifted_positions`.
        material: the words of the sentences; English by default.
        text: a text to shuffle and to shift, instead of that of the material.
        seed: seed of the shuffles and of newly created scheme weights.

    Returns:
        Records of these quantities, which are relative L2 changes unless stated otherwise:

        - `repeated`, by `gap` and `layer` (0: the embeddings): distance between the two states of a repeated word.
        - `word_role` and `roles`, by `layer`: subject and object exchanged.
        - `shuffled`, and `shuffled_block` by `block`: a shuffled context. `shuffled_loss` and `shuffled_block_loss` are
          the rise of the `loss` in nats.
        - `shift`, by `offset`: positions that start elsewhere; `left_padding`, by `tokens`: padding before the text.
        - `sees_order`: passed if the model is an encoder and any of these, except the shifts, exceeds rounding.

        If the model cannot take a scheme, the `error` of its subject has the reason.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if the tokenizer lacks the words, or the text is too short.
        UnsupportedError: if the model returns no hidden states.
    """
    if text is not None:
        material = dataclasses.replace(material, passage=text)
    tokens = tokenize_material(tokenizer, material)
    sentences, first = repeated_sentences(tokens, min(gaps, default=2))
    causal = is_causal(model, sentences[:1], first)
    tolerance = rounding(model.get_input_embeddings().weight.dtype)

    def measure(patched: Any) -> list[Record]:
        order = [
            *repeated_words(patched, tokens, gaps),
            *role_swaps(patched, tokens, causal=causal),
            *permuted_context(patched, tokens, causal=causal, context=context, seed=seed),
        ]
        largest = max(record.value or 0.0 for record in order if not record.quantity.endswith("loss"))
        sees_order = Record("", "sees_order", passed=None if causal else largest > tolerance)
        return [*order, *shifted_positions(patched, tokens, offsets), sees_order]

    styles = {"loss": "loss", "sees_order": "verdict"}
    return evaluation_result(
        "sensitivity",
        ": relative changes of states and outputs",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        [Quantity(name, heading, style=styles.get(name, "number")) for name, heading in _HEADINGS.items()],
        views=(View(tuple(_HEADINGS)[:-1], shown={"gap": spread(sorted(set(gaps)), 4)}),),
        layers=1,
        settings={
            "data": digest(sentences, tokens.passage, str((tokens.nouns, tokens.verbs))),
            "causal": causal,
            "tolerance": tolerance,
            "context": context,
            "seed": seed,
        },
        remarks=(_EXPLANATION, _CAUSAL_NOTE if causal else _ENCODER_NOTE),
    )


def repeated_words(model: Any, tokens: TokenizedMaterial, gaps: Sequence[int] = GAPS) -> list[Record]:
    """Measures "the dog and then with ... another dog" with more and more words in between, for every noun.

    In an encoder without positions, the two dogs have exactly the same state at any gap: equal tokens attend to the
    same set of tokens. In a causal model the mask shows each a different prefix, so they differ even without positions.

    Returns the mean distance over all nouns by `gap` and `layer`, or the reason if the encoding cannot represent a gap.
    """
    if not gaps or min(gaps) < 2:
        raise MeasurementError(f"A gap must be at least 2, for the word before the second noun; got {list(gaps)}.")
    records = []
    for gap in sorted(set(gaps)):
        sentences, first = repeated_sentences(tokens, gap)
        try:
            states = outputs_of(model, sentences).states
        except SequenceLengthError as error:
            records.append(Record("", "repeated", None, {"gap": gap}, note=f"gap {gap}: {error}"))
            continue
        occurrences = ((state[:, first], state[:, first + gap]) for state in states)
        records += layer_distances("repeated", occurrences, {"gap": gap}, count=len(tokens.nouns))
    return records


def repeated_sentences(tokens: TokenizedMaterial, gap: int) -> tuple[Tensor, int]:
    """Returns one sentence per noun, `(nouns, length)`, and the index of the first noun; the second is `gap` later."""
    between = [tokens.fillers[index % len(tokens.fillers)] for index in range(gap - 2)]
    words = [[tokens.article, noun, *between, tokens.another, noun] for noun in tokens.nouns]
    sentences = tokens.sentences(words)
    first = len(tokens.frame.before) + 1
    assert bool(torch.equal(sentences[:, first], sentences[:, first + gap]))
    return sentences, first


def role_swaps(model: Any, tokens: TokenizedMaterial, *, causal: bool) -> list[Record]:
    """Compares "the dog sees the pig" and "the pig sees the dog" for every two nouns, with alternating verbs.

    An encoder without positions sees a set of words: each noun has exactly the same state in both sentences, and both
    sentences have the same representation.

    Returns two mean distances by `layer`: between the states of a noun as the subject and as the object (`word_role`),
    and between the representations of the two sentences (`roles`). A sentence is represented by the mean of its states,
    or in a causal model by the state of its last word, which sees all others and is the same in both sentences.
    """
    pairs = list(itertools.combinations(tokens.nouns, 2))
    verbs = [tokens.verbs[number % len(tokens.verbs)] for number in range(len(pairs))]
    named = [*zip(pairs, verbs, strict=True)]
    the, end = tokens.article, tokens.closing
    in_order = tokens.sentences([[the, first, verb, the, second, end] for (first, second), verb in named])
    exchanged = tokens.sentences([[the, second, verb, the, first, end] for (first, second), verb in named])
    here, there = (outputs_of(model, sentences).states for sentences in (in_order, exchanged))
    start = len(tokens.frame.before)
    subject, target, last = start + 1, start + 4, start + 5
    layers = list(zip(here, there, strict=True))
    nouns = [
        (torch.cat([state[:, subject], state[:, target]]), torch.cat([other[:, target], other[:, subject]]))
        for state, other in layers
    ]
    whole = [
        (state[:, last], other[:, last]) if causal else (state.double().mean(dim=1), other.double().mean(dim=1))
        for state, other in layers
    ]
    return [
        *layer_distances("word_role", nouns, count=len(pairs)),
        *layer_distances("roles", whole, count=len(pairs)),
    ]


def permuted_context(
    model: Any,
    tokens: TokenizedMaterial,
    *,
    causal: bool,
    context: int = 48,
    max_windows: int = 64,
    seed: int = 0,
) -> list[Record]:
    """Shuffles all tokens before the last one, together or within blocks of 8, and compares the last one.

    At the last token, a causal model predicts the next one, and a masked model the token itself, which is masked. An
    encoder without positions does not change at all. Windows are evenly spread over the text and may overlap.

    Returns the mean `loss` of the last token, the mean change of its output (`shuffled`, and `shuffled_block` by
    `block`) and the rise of its loss. There are no losses for a model without a language head.
    """
    if context < 2:
        raise MeasurementError(f"At least 2 tokens must be shuffled; got context={context}.")
    windows = stream_windows(tokens.passage, context + 2, max_windows=max_windows, overlap=True)
    count = windows.shape[0]
    text, targets = windows[:, :-1].clone(), windows[:, -1]
    if not causal:
        targets = text[:, -1].clone()
        if tokens.mask_token_id is not None:
            text[:, -1] = tokens.mask_token_id
    place = len(tokens.frame.before) + context

    def read(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs of the last token, and its losses if it is predicted."""
        outputs = outputs_of(model, tokens.frame.around(ids, targets=False))
        if outputs.logits is None or (not causal and tokens.mask_token_id is None):
            return outputs.last[:, place], None
        return outputs.last[:, place], functional.cross_entropy(
            outputs.logits[:, place].float(), targets, reduction="none"
        )

    before, loss = read(text)
    records = [] if loss is None else [Record("", "loss", float(loss.mean()), count=count)]
    for name, size, at in (("shuffled", context, {}), ("shuffled_block", _BLOCK, {"block": _BLOCK})):
        order = shuffled_order(context, size, count, torch.Generator().manual_seed(seed))
        after, changed = read(torch.cat([text[:, :-1].gather(1, order), text[:, -1:]], dim=1))
        records.append(Record("", name, float(relative_changes(before, after).mean()), at, count=count))
        if loss is not None and changed is not None:
            records.append(Record("", f"{name}_loss", float((changed - loss).mean()), at, count=count))
    return records


def shuffled_order(length: int, block: int, rows: int, generator: torch.Generator) -> Tensor:
    """Returns `(rows, length)` int64: a random permutation of each block of indices, different in every row."""
    keys = torch.rand(rows, length, generator=generator) + torch.arange(length) // block
    return keys.argsort(dim=1)


def shifted_positions(model: Any, tokens: TokenizedMaterial, offsets: Sequence[int] = SHIFTS) -> list[Record]:
    """Adds a number to all position ids, and then puts padding before the text, which is read in short windows.

    A relative scheme does not change with the offset, except for rounding; an absolute one does. Left padding has no
    effect if it is not counted.

    Returns the mean change of the output over all tokens: by `offset` (`shift`), or the reason if there is none, and
    with padding (`left_padding`).
    """
    if any(offset < 1 for offset in offsets):
        raise MeasurementError(f"offsets must be at least 1; got {list(offsets)}.")
    whole = min(tokens.passage.shape[0] // _SHIFTED, _SHIFTED_WINDOWS)
    if whole == 0:
        raise MeasurementError(f"The text has {tokens.passage.shape[0]} tokens, but one window needs {_SHIFTED}.")
    ids = tokens.frame.around(tokens.passage[: whole * _SHIFTED].view(-1, _SHIFTED), targets=False)
    before = outputs_of(model, ids).last
    records = []
    first: int | None = None
    for offset in sorted(set(offsets)):
        at = {"offset": offset}
        try:
            first = _first_position(model, ids, before) if first is None else first
            after = outputs_of(model, ids, position_ids=_counted(ids, first + offset)).last
        except (SequenceLengthError, UnsupportedError) as error:
            records.append(Record("", "shift", None, at, note=f"+{offset}: {error}"))
        else:
            records.append(Record("", "shift", float(relative_changes(before, after).mean()), at))
    pads = ids.new_full((ids.shape[0], _PADDING), tokens.pad_token_id)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)
    padded = outputs_of(model, torch.cat([pads, ids], dim=1), attention_mask=mask).last[:, _PADDING:]
    change = float(relative_changes(before, padded).mean())
    return [*records, Record("", "left_padding", change, {"tokens": _PADDING})]


def _first_position(model: Any, ids: Tensor, before: Tensor) -> int:
    """Returns the position id of the first token in this model: 0, or the one after the padding row of its table."""
    origins = {table.origin for stack in Anatomy(unwrapped(model)).stacks() for table in stack.tables}
    for first in sorted({0, *origins}):
        explicit = outputs_of(model, ids, position_ids=_counted(ids, first)).last
        if float(relative_changes(before, explicit).max()) <= rounding(before.dtype):
            return first
    raise UnsupportedError(f"{type(model).__name__} does not take position_ids that are counted from 0.")


def _counted(ids: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + ids.shape[1]).expand_as(ids)


#: The number of words of each kind that the sentences need.
_NEEDED = {"nouns": 3, "verbs": 1, "fillers": 2, "article": 1, "another": 1, "closing": 1}


@dataclass(frozen=True)
class TokenizedMaterial:
    """A `Material` as token ids, with the special tokens around a sentence; the passage is `(tokens,)` int64."""

    nouns: tuple[int, ...]
    verbs: tuple[int, ...]
    fillers: tuple[int, ...]
    article: int
    another: int
    closing: int
    passage: Tensor
    frame: Frame
    mask_token_id: int | None
    pad_token_id: int

    def sentences(self, words: list[list[int]]) -> Tensor:
        """Returns sentences of equal length, with special tokens: `(sentences, length)`."""
        return self.frame.around(torch.tensor(words), targets=False)


def tokenize_material(tokenizer: Any, material: Material) -> TokenizedMaterial:
    """Looks up the tokens of each word inside a sentence, that is after a space.

    Raises:
        MeasurementError: if too few of the words are one token.
    """
    words: dict[str, Any] = {}
    for name, needed in _NEEDED.items():
        value = getattr(material, name)
        given = (value,) if isinstance(value, str) else value
        encoded = [tokenizer(" " + word, add_special_tokens=False)["input_ids"] for word in given]
        known = tuple(dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id))
        if len(known) < needed:
            raise MeasurementError(
                f"The tokenizer has {len(known)} of the {name} {value!r} as one token, but at least {needed} are "
                "needed. For another language, call sensitivity_test in Python with a Material of its words."
            )
        words[name] = known[0] if isinstance(value, str) else known
    return TokenizedMaterial(
        **words,
        passage=token_stream(tokenizer, [material.passage]),
        frame=special_frame(tokenizer, causal=False),
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id or 0,
    )


@dataclass(frozen=True)
class OrderSensitivity:
    """How the output at the last position changes when two earlier tokens are swapped.

    Args:
        mean_relative_change: mean of ||change|| / ||output|| over the sequences.
        max_relative_change: the largest of these changes.
        argmax_changed: fraction of sequences whose most likely token changes; `None` for a model without logits.
        relative_changes: the change of each sequence.
        swapped: the two swapped indices of each sequence.
    """

    mean_relative_change: float
    max_relative_change: float
    argmax_changed: float | None
    relative_changes: tuple[float, ...]
    swapped: tuple[tuple[int, int], ...]


def order_sensitivity(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    swap: tuple[int, int] | None = None,
    seed: int = 0,
) -> OrderSensitivity:
    """Measures the mean change at the last position when two earlier, different tokens are swapped.

    A bidirectional encoder without positions does not change at all, and neither does a causal model of one layer: each
    sees the same set of tokens. A causal model of two or more layers changes even without positions, because the states
    of the tokens in between have seen other prefixes.

    The model is left unchanged.

    Args:
        model: any transformers model; its logits are compared if it has them for every token, otherwise its last hidden
            states. For an encoder-decoder, the encoder is measured.
        input_ids: `(batch, length)` int64.
        attention_mask: `(batch, length)`, 1 at real tokens; by default all are. The last real one is the last position.
        swap: indices to swap in every sequence; by default two of different tokens are drawn for each.
        seed: seed of the draw; the random state of the process does not change.

    Raises:
        MeasurementError: if a sequence has no two different tokens before its last, or `swap` names no such tokens.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] == 0:
        raise MeasurementError(
            f"input_ids must be (batch, length) with at least one sequence, got {tuple(input_ids.shape)}."
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise MeasurementError(f"attention_mask is {tuple(mask.shape)}, but input_ids is {tuple(input_ids.shape)}.")
    generator = torch.Generator().manual_seed(seed)
    real = [row.nonzero().flatten().tolist() for row in mask.cpu()]
    tokens = [(ids.tolist(), slots[:-1]) for ids, slots in zip(input_ids.cpu(), real, strict=True)]
    if swap is None:
        pairs = [_drawn_swap(*row, index, generator) for index, row in enumerate(tokens)]
    else:
        pairs = [_checked_swap(*row, swap) for row in tokens]
    swapped_ids = input_ids.clone()
    for row, (left, right) in enumerate(pairs):
        swapped_ids[row, left], swapped_ids[row, right] = input_ids[row, right], input_ids[row, left]
    rows, last = torch.arange(len(real)), torch.tensor([slots[-1] for slots in real])
    outputs = [outputs_of(model, ids, attention_mask=mask) for ids in (input_ids, swapped_ids)]
    before, after = (output.last[rows, last].double() for output in outputs)
    changes = ((after - before).norm(dim=-1) / before.norm(dim=-1)).tolist()
    changed_argmax = float((after.argmax(-1) != before.argmax(-1)).double().mean())
    return OrderSensitivity(
        mean_relative_change=sum(changes) / len(changes),
        max_relative_change=max(changes),
        argmax_changed=None if outputs[0].logits is None else changed_argmax,
        relative_changes=tuple(changes),
        swapped=tuple(pairs),
    )


def _drawn_swap(ids: list[int], slots: list[int], row: int, generator: torch.Generator) -> tuple[int, int]:
    """Draws two slots with different tokens; each pair of these has the same probability."""
    if len({ids[slot] for slot in slots}) < 2:
        raise MeasurementError(f"Sequence {row} has no two different tokens before its last one: nothing to swap.")
    while True:
        left, right = (slots[index] for index in torch.randint(len(slots), (2,), generator=generator).tolist())
        if ids[left] != ids[right]:
            return min(left, right), max(left, right)


def _checked_swap(ids: list[int], slots: list[int], swap: tuple[int, int]) -> tuple[int, int]:
    left, right = swap
    if left not in slots or right not in slots:
        raise MeasurementError(f"swap={swap} must name real tokens before the last one, that is two of {slots}.")
    if ids[left] == ids[right]:
        raise MeasurementError(f"swap={swap} names two equal tokens ({ids[left]}): swapping them changes nothing.")
    return left, right
