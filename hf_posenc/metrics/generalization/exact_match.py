"""How many answers are right, length by length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.generalization.encoding import IGNORED, encode_example, end_token
from hf_posenc.metrics.generalization.examples import held_out_examples, is_split
from hf_posenc.metrics.generalization.result import GeneralizationResult, GeneralizationRow
from hf_posenc.metrics.generalization.task import SyntheticTask, check_lengths
from hf_posenc.metrics.generalization.tasks import get_task
from hf_posenc.metrics.in_force import scheme_in_force
from hf_posenc.metrics.intervals import wilson_interval
from hf_posenc.metrics.language_modeling.capacity import native_capacity
from hf_posenc.metrics.language_modeling.token_losses import logits_of, predicts_next_token
from hf_posenc.metrics.preserve import evaluation_mode
from hf_posenc.patching.apply import current_encoding, unwrapped
from hf_posenc.patching.encoding import is_length_dependent

Method = Literal["teacher_forced", "generate"]
_METHODS = ("teacher_forced", "generate")

LENGTH_DEPENDENT_NOTE = (
    "The scheme encodes a token by the length of the whole sequence, which in teacher forcing includes the answer: "
    "these are not the answers that it would generate. Measure it with method='generate'."
)


@dataclass(frozen=True)
class _Row:
    """The tokens of one example; the answer includes the end token."""

    input_ids: list[int]
    labels: list[int]

    @property
    def prompt_length(self) -> int:
        return sum(label == IGNORED for label in self.labels)

    @property
    def answer(self) -> list[int]:
        return self.labels[self.prompt_length :]


def exact_match(
    model: Any,
    tokenizer: Any,
    task: str | SyntheticTask,
    lengths: Sequence[int] | None = None,
    *,
    samples: int = 100,
    seed: int = 0,
    method: Method = "teacher_forced",
    batch_size: int = 64,
) -> GeneralizationResult:
    """Tests a causal model on examples of each length that no training set of the task contains.

    Teacher forcing reads prompt and right answer at once and asks at every place for the most likely token. That an
    answer is right from first to last means the same there as in greedy decoding: up to its first error both have read
    the same tokens. Its token accuracy, however, is that of a model which is put right after every error.

    Examples of equally many tokens share a batch, so that nothing is padded. The model is left as it was found.

    Args:
        model: a causal language model, patched or not.
        tokenizer: the one that it was trained with.
        task: a task, or the name of one.
        lengths: the lengths to test; those of the task if `None`.
        samples: examples per length; fewer where the task has no more of that length.
        seed: of the examples. One seed gives every model the same ones.
        method: `"teacher_forced"`, one forward per batch, or `"generate"`, which really decodes.
        batch_size: examples per forward.

    Returns:
        One row per length. A length that the encoding cannot represent has its reason instead of a number.

    Raises:
        UnknownNameError: for an unknown task.
        MeasurementError: for a length, a method or a tokenizer that does not do.
        UnsupportedError: for a model that is not causal.
    """
    task = get_task(task)
    lengths = tested_lengths(task, lengths)
    if method not in _METHODS:
        raise MeasurementError(f"method is {method!r}; it is one of {', '.join(map(repr, _METHODS))}.")
    if batch_size < 1:
        raise MeasurementError(f"batch_size is {batch_size}; a batch holds one example at least.")
    examples = {length: held_out_examples(task, length, samples, seed) for length in lengths}
    rows = {length: [_Row(*encode_example(tokenizer, example)) for example in examples[length]] for length in lengths}
    _check_vocabulary(model, rows)
    _check_causal(model, rows[lengths[0]][0])
    with evaluation_mode(model):
        measured = tuple(
            _measure(model, tokenizer, length, rows[length], is_split(task, length), method, batch_size)
            for length in lengths
        )
    encoding = current_encoding(unwrapped(model))
    growing = encoding is not None and is_length_dependent(encoding)
    return GeneralizationResult(
        model=type(unwrapped(model)).__name__,
        scheme=scheme_in_force(model),
        task=task.name,
        length_meaning=task.length_meaning,
        chance=task.chance,
        method=method,
        seed=seed,
        rows=measured,
        notes=(LENGTH_DEPENDENT_NOTE,) if growing and method == "teacher_forced" else (),
    )


def tested_lengths(task: SyntheticTask, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """The lengths in ascending order, each once; those of the task if `None`.

    Raises:
        MeasurementError: if there are none, or the task does not have one of them.
    """
    return check_lengths(task, task.test_lengths if lengths is None else lengths)


def _measure(
    model: Any, tokenizer: Any, length: int, rows: list[_Row], held_out: bool, method: Method, batch_size: int
) -> GeneralizationRow:
    right, right_tokens, tokens = 0, 0, 0
    try:
        _check_capacity(model, rows)
        for batch in _batches(rows, batch_size):
            if method == "generate":
                right += int(_generated(model, tokenizer, batch).all(dim=1).sum())
            else:
                hits = _teacher_forced(model, batch)
                right += int(hits.all(dim=1).sum())
                right_tokens += int(hits.sum())
                tokens += hits.numel()
    except (SequenceLengthError, FloatingPointError) as error:
        return GeneralizationRow(length, len(rows), held_out, None, None, None, str(error))
    interval = wilson_interval(right, len(rows))
    accuracy = right_tokens / tokens if tokens else None
    return GeneralizationRow(length, len(rows), held_out, right / len(rows), interval, accuracy)


def _batches(rows: list[_Row], batch_size: int) -> Iterator[list[_Row]]:
    """Rows whose prompts and answers have equally many tokens, in batches."""
    groups: dict[tuple[int, int], list[_Row]] = defaultdict(list)
    for row in rows:
        groups[row.prompt_length, len(row.answer)].append(row)
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def _teacher_forced(model: Any, batch: list[_Row]) -> Tensor:
    """Whether each token of the answers is the most likely one, `(batch, answer_length)`."""
    ids = _tensor(model, [row.input_ids for row in batch])
    answers = _tensor(model, [row.answer for row in batch])
    logits = logits_of(model, ids)[:, -answers.shape[1] - 1 : -1]
    if bool(logits.isnan().any()):
        raise FloatingPointError("The logits are no numbers, so that none of them is the largest.")
    return torch.eq(logits.argmax(dim=-1), answers.to(logits.device))


def _generated(model: Any, tokenizer: Any, batch: list[_Row]) -> Tensor:
    """Whether each token of the answers is the one that greedy decoding wrote, `(batch, answer_length)`."""
    ids = _tensor(model, [row.input_ids[: row.prompt_length] for row in batch])
    answers = _tensor(model, [row.answer for row in batch])
    end = end_token(tokenizer)
    # Everything that would bend the most likely token is off, whatever the model's own generation config says.
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=answers.shape[1],
        min_new_tokens=0,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=end,
        pad_token_id=end,
    )[:, ids.shape[1] :]
    missing = answers.shape[1] - written.shape[1]
    # Every answer of the batch ended early: filled up with what cannot be a token.
    written = torch.nn.functional.pad(written, (0, missing), value=-1)
    return torch.eq(written, answers.to(written.device))


def _tensor(model: Any, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, device=model.get_input_embeddings().weight.device)


def _check_vocabulary(model: Any, rows: dict[int, list[_Row]]) -> None:
    largest = max(max(row.input_ids) for group in rows.values() for row in group)
    known = model.get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise MeasurementError(
            f"The tokenizer gave the token id {largest}, but the model has {known} embeddings. Use the tokenizer that "
            f"belongs to this model."
        )


def _check_causal(model: Any, row: _Row) -> None:
    """Refuses a model that would read the answer it has to give."""
    advice = "Load a decoder with AutoModelForCausalLM."
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"Length generalisation is tested on the continuation of a prompt, and {type(model).__name__} reads the "
            f"prompt with an encoder. {advice}"
        )
    ids = torch.tensor([row.input_ids])
    with evaluation_mode(model):
        if bool(logits_of(model, ids).isnan().any()):
            raise MeasurementError(
                f"The logits of {type(model).__name__} are no numbers, so that none of them is the largest. "
                f"Its weights are broken, or its dtype is too small."
            )
    if not predicts_next_token(model, ids):
        raise UnsupportedError(
            f"Length generalisation is tested on the continuation of a prompt. In {type(model).__name__} a token sees "
            f"those behind it, so that it would read the answer that it has to give. {advice}"
        )


def _check_capacity(model: Any, rows: list[_Row]) -> None:
    """Raises where a stock position table ends; a patched model does so by itself."""
    capacity = native_capacity(model)
    longest = max(len(row.input_ids) for row in rows)
    if capacity is not None and longest > capacity:
        raise SequenceLengthError(
            f"{longest} tokens are more than the {capacity} positions of the position table of {type(model).__name__}."
        )
