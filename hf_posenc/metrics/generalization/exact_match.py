"""Fraction of right answers by length, for a model as it is or under several schemes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_posenc.errors import MeasurementError, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.evaluation import evaluation_result, measure_as_is, measure_schemes
from hf_posenc.metrics.forward import (
    check_capacity,
    check_vocabulary,
    is_encoder_decoder,
    logits_of,
    predicts_next_token,
)
from hf_posenc.metrics.generalization.examples import IGNORED, encode_example, end_token, held_out_examples, is_split
from hf_posenc.metrics.generalization.task import SyntheticTask, get_task, tested_lengths
from hf_posenc.metrics.statistics import wilson_interval
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.patching.place.lengths import is_length_dependent
from hf_posenc.preserve import evaluation_mode
from hf_posenc.report.records import Quantity, Record, Result
from hf_posenc.report.tables import format_number
from hf_posenc.schemes.config import SchemeConfig

Method = Literal["teacher_forced", "generate"]
#: Tokens and labels of one example.
_Row = tuple[list[int], list[int]]

LENGTH_DEPENDENT_NOTE = (
    "The scheme depends on the length of the whole sequence, which includes the answer in teacher forcing: these are "
    "not the answers that the model would generate. Use method='generate'."
)


def compare_generalization(
    model: Any,
    tokenizer: Any,
    task: str | SyntheticTask,
    lengths: Sequence[int] | None = None,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    samples: int = 100,
    seed: int = 0,
    method: Method = "teacher_forced",
    batch_size: int = 64,
) -> Result:
    """Tests a model on examples of each length that no training set of the task contains.

    The model is measured as it is, or under schemes that are set after training, such as a scaled RoPE or none at all.
    A causal model continues the prompt. In an encoder-decoder, the encoder reads it and the decoder writes the answer.

    Teacher forcing reads the prompt and the right answer at once and takes the most likely token at every place. An
    answer is right from first to last under the same conditions as in greedy decoding: up to its first error, both have
    read the same tokens. Its token accuracy is different: it is that of a model which is corrected after every error.

    Examples with equally many tokens share a batch, so nothing is padded. The model is left unchanged.

    Args:
        model: a causal language model or an encoder-decoder, patched or not.
        tokenizer: the tokenizer that the model was trained with.
        task: a synthetic task or its name.
        lengths: the lengths to test; by default those of the task.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        samples: examples per length; fewer if the task has no more of that length.
        seed: seed of the examples, the same for every model, and of new scheme weights.
        method: `"teacher_forced"`, one forward per batch, or `"generate"`, which decodes token by token.
        batch_size: examples per forward.

    Returns:
        For each scheme and `length`, in ascending order:

        - `exact_match`: the fraction of the answers that are right from the first token to the end token, with its 95 %
          Wilson interval. A length that the encoding cannot represent has the reason instead of a number.
        - `token_accuracy`: with teacher forcing, the fraction of the answers' tokens, including end tokens, that are
          predicted after the right ones before them.
        - `examples`: number of examples. `held_out`: passed if no training set of this task can contain them.

    Raises:
        UnknownNameError: for an unknown task or scheme, before the model is changed.
        MeasurementError: for a length, a method or a tokenizer that cannot be used; for an encoder-decoder whose config
            does not give the first token of its decoder.
        UnsupportedError: if the model is neither causal nor an encoder-decoder, or has no logits, unless `schemes` are
            given: their rows then have the reason.
    """
    task = get_task(task)
    lengths = tested_lengths(task, task.test_lengths if lengths is None else lengths)
    if method not in get_args(Method):
        raise MeasurementError(f"method is {method!r}; expected one of {', '.join(map(repr, get_args(Method)))}.")
    if batch_size < 1:
        raise MeasurementError(f"batch_size is {batch_size}; a batch needs at least one example.")
    examples = {length: held_out_examples(task, length, samples, seed) for length in lengths}
    rows = {length: [encode_example(tokenizer, example) for example in some] for length, some in examples.items()}
    check_vocabulary(model, *(max(ids) for group in rows.values() for ids, _ in group))

    forced = method == "teacher_forced"

    def measure(patched: Any) -> list[Record]:
        if not is_encoder_decoder(patched) and not predicts_next_token(patched, torch.tensor([rows[lengths[0]][0][0]])):
            raise UnsupportedError(
                f"Length generalisation is tested on the continuation of a prompt. In {type(patched).__name__}, a "
                f"token sees later tokens, so it would read the answer that it has to give. Load a decoder with "
                f"AutoModelForCausalLM, or an encoder-decoder with AutoModelForSeq2SeqLM."
            )
        encoding = current_encoding(unwrapped(patched))
        records: list[Record] = []
        by_length = LENGTH_DEPENDENT_NOTE if forced and encoding is not None and is_length_dependent(encoding) else ""
        for length, group in rows.items():
            at, note, count = {"length": length}, by_length, len(group)
            hits: list[Tensor] = []
            try:
                check_capacity(patched, max(_longest_sequence(patched, ids, labels) for ids, labels in group))
                with evaluation_mode(patched):
                    hits = [
                        _teacher_forced(patched, *batch) if forced else _generated(patched, tokenizer, *batch)
                        for batch in _batches(patched, group, batch_size)
                    ]
            except (SequenceLengthError, FloatingPointError) as error:
                note = f"length {length}: {error}"
            right = sum(int(batch.all(dim=1).sum()) for batch in hits)
            low, high = wilson_interval(right, count) if hits else (None, None)
            records.append(Record("", "exact_match", right / count if hits else None, at, low, high, count, note=note))
            if forced:
                accuracy = sum(int(batch.sum()) for batch in hits) / sum(map(Tensor.numel, hits)) if hits else None
                records.append(Record("", "token_accuracy", accuracy, at))
            records.append(Record("", "examples", count, at))
            records.append(Record("", "held_out", None, at, passed=is_split(task, length)))
        return records

    measured = measure_as_is(model, measure) if schemes is None else measure_schemes(model, schemes, measure, seed=seed)
    return evaluation_result(
        "generalization",
        f", task {task.name!r} ({method}, seed {seed}): exact match by length",
        model,
        measured,
        (
            Quantity("exact_match", "exact match", style="fraction"),
            Quantity("token_accuracy", "token accuracy", style="fraction"),
            Quantity("examples", "examples", style="count"),
            Quantity("held_out", "held out", style="verdict"),
        ),
        rows=("length",),
        settings={
            "task": task.name,
            "lengths": list(lengths),
            "method": method,
            "samples": samples,
            "chance": task.chance,
            "seed": seed,
        },
        remarks=(
            f"length: {task.length_meaning}. A blind guess is right with probability {format_number(task.chance)}.",
        ),
    )


def _batches(model: Any, rows: list[_Row], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields prompts and answers with end token as `(batch, length)` tensors, without padding."""
    device = model.get_input_embeddings().weight.device
    groups: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for ids, labels in rows:
        groups[labels.count(IGNORED), len(ids)].append(ids)
    for (prompt, _), group in groups.items():
        for batch in torch.tensor(group, device=device).split(batch_size):
            yield batch[:, :prompt], batch[:, prompt:]


def _teacher_forced(model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    """Whether each token of the answers is the most likely one, `(batch, answer_length)`."""
    if is_encoder_decoder(model):
        start = answers.new_full((len(answers), 1), _decoder_start(model))
        decoder_input_ids = torch.cat([start, answers[:, :-1]], dim=1)
        output = model(input_ids=prompts, decoder_input_ids=decoder_input_ids, use_cache=False)
        if getattr(output, "logits", None) is None:
            raise UnsupportedError(
                f"{type(model).__name__} returns no logits, so it cannot write an answer. Load the model with "
                f"AutoModelForSeq2SeqLM."
            )
        logits = output.logits
    else:
        logits = logits_of(model, torch.cat([prompts, answers], dim=1))[:, -answers.shape[1] - 1 : -1]
    if bool(logits.isnan().any()):
        raise FloatingPointError("The logits are NaN, so there is no most likely token.")
    return torch.eq(logits.argmax(dim=-1), answers.to(logits.device))


def _generated(model: Any, tokenizer: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    """Whether each token of the answers is the one from greedy decoding, `(batch, answer_length)`."""
    with _greedy(model, end_token(tokenizer), answers.shape[1]):
        written = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts))
    written = written[:, 1 if is_encoder_decoder(model) else prompts.shape[1] :]
    # If all answers of the batch ended early, the rest is filled with a number that is not a token.
    written = torch.nn.functional.pad(written, (0, answers.shape[1] - written.shape[1]), value=-1)
    return torch.eq(written, answers.to(written.device))


@contextmanager
def _greedy(model: Any, end: int, length: int) -> Iterator[None]:
    """Makes a model write the most likely tokens, whatever its own generation config says, and restores that config."""
    target = unwrapped(model)
    before = target.generation_config
    plain = GenerationConfig(max_new_tokens=length, do_sample=False, num_beams=1, eos_token_id=end, pad_token_id=end)
    plain.use_cache, plain.cache_implementation = before.use_cache, before.cache_implementation
    if is_encoder_decoder(model):
        plain.decoder_start_token_id = _decoder_start(model)
    target.generation_config = plain
    try:
        yield
    finally:
        target.generation_config = before


def _longest_sequence(model: Any, ids: list[int], labels: list[int]) -> int:
    """Returns the most tokens that the model reads at once: all of an example, or the longer of prompt and answer."""
    prompt = labels.count(IGNORED)
    return max(prompt, len(ids) - prompt) if is_encoder_decoder(model) else len(ids)


def _decoder_start(model: Any) -> int:
    """Returns the token before an answer in the decoder."""
    for config in (getattr(unwrapped(model), "generation_config", None), model.config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    raise MeasurementError(
        f"The config of {type(model).__name__} has no decoder_start_token_id, so the first token of its decoder is "
        f"unknown. Set model.config.decoder_start_token_id to the token that it was trained with."
    )
