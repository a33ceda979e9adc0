"""One cell of a study whose model embeds text: it learns the hidden states it had before the swap."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModel, Trainer, set_seed

from hf_posenc import PositionEncodingError, SequenceLengthError
from hf_posenc.metrics.forward import native_capacity
from hf_posenc.recipes import GradualSwapCallback, frozen_teacher, hidden_state_loss, mean_pooled, swap_scheme
from training.argument_files import parse_structured
from training.checkpoints import check_run, latest_complete_checkpoint, record_run
from training.data.rows import load_rows
from training.data.tokens import TokenStream
from training.errors import SettingsError
from training.healing.language import series
from training.healing.study import Cell
from training.starting_model import load_tokenizer

#: Rows of training text that a start is fitted on.
_SAMPLE_ROWS = 8


class Texts:
    """Pieces of a stream of documents between the special tokens of a sentence.

    Args:
        stream: the documents.
        tokenizer: with [CLS] and [SEP].
    """

    def __init__(self, stream: TokenStream, tokenizer: Any) -> None:
        self.stream = stream
        self.before, self.after = int(tokenizer.cls_token_id), int(tokenizer.sep_token_id)

    def row(self, start: int, length: int) -> Tensor:
        """`(length,)` ids: `length - 2` tokens of the text from `start` on, framed."""
        read, _ = self.stream.read(start, start + length - 2)
        return self.framed(torch.from_numpy(read))

    def framed(self, content: Tensor) -> Tensor:
        """`(..., n)` -> `(..., n + 2)`."""
        edge = content.new_ones(*content.shape[:-1], 1)
        return torch.cat((edge * self.before, content, edge * self.after), dim=-1)

    def rows(self, count: int, length: int) -> Tensor:
        """`(count, length)`, spread evenly over the stream."""
        spare = len(self.stream) - (length - 2)
        return torch.stack([self.row(index * spare // max(count - 1, 1), length) for index in range(count)])


class _Batches(Dataset[dict[str, Tensor]]):
    """One item is a whole batch; its length takes turns, its number of tokens does not."""

    def __init__(self, texts: Texts, lengths: list[int], tokens: int, steps: int, seed: int) -> None:
        self.texts, self.lengths, self.tokens, self.steps, self.seed = texts, lengths, tokens, steps, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.lengths[index % len(self.lengths)]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        count = max(1, self.tokens // length)
        starts = torch.randint(len(self.texts.stream) - (length - 2), (count,), generator=generator)
        return {"input_ids": torch.stack([self.texts.row(int(start), length) for start in starts])}


@torch.no_grad()
def teacher_states(teacher: Any, texts: Texts, input_ids: Tensor, capacity: int) -> Tensor:
    """What a model of limited length says of longer text: that of pieces which fit, joined.

    Args:
        teacher: the model before the swap.
        texts: knows the special tokens.
        input_ids: `(batch, length)`, framed.
        capacity: the teacher's greatest length.

    Returns:
        `(batch, length, hidden)`; its mean over tokens is that over all pieces.
    """
    if input_ids.shape[1] <= capacity:
        states: Tensor = teacher(input_ids=input_ids).last_hidden_state
        return states
    content = input_ids[:, 1:-1]
    pieces = content.split(capacity - 2, dim=1)
    found = [teacher(input_ids=texts.framed(piece)).last_hidden_state for piece in pieces]
    return torch.cat([found[0][:, :1], *(states[:, 1:-1] for states in found), found[-1][:, -1:]], dim=1)


class _TeacherTrainer(Trainer):
    """Trains on the hidden states of a teacher, and measures how near the sentence embeddings come."""

    def __init__(self, *args: Any, cell: Cell, teacher: Any, texts: Texts, capacity: int, **kwargs: Any) -> None:
        self.cell, self.teacher, self.texts, self.capacity = cell, teacher, texts, capacity
        super().__init__(*args, **kwargs)
        teacher.to(self.args.device)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        taught = teacher_states(self.teacher, self.texts, inputs["input_ids"], self.capacity)
        loss = hidden_state_loss(outputs.last_hidden_state, taught)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        found = similarities(self.model, self.teacher, self.eval_dataset, self.cell.study, self.capacity)
        known = [value for value in found if value is not None]
        metrics = {"eval_similarity": sum(known) / len(known)}
        self.log(metrics)
        return metrics


def similarities(model: Any, teacher: Any, texts: Texts, study: Any, capacity: int) -> list[float | None]:
    """The mean cosine of a model's sentence embeddings and its teacher's, for every length; `None` past its end."""
    training = model.training
    model.eval()
    own_capacity = native_capacity(model)
    found: list[float | None] = []
    for length in sorted(study.lengths):
        if own_capacity is not None and length > own_capacity:
            found.append(None)
            continue
        cosines = []
        try:
            for row in texts.rows(study.eval_windows, length):
                ids = row[None].to(model.device)
                with torch.no_grad():
                    own = mean_pooled(model(input_ids=ids).last_hidden_state)
                taught = mean_pooled(teacher_states(teacher, texts, ids, capacity))
                cosines.append(float(torch.nn.functional.cosine_similarity(own, taught)))
        except SequenceLengthError:
            found.append(None)
            continue
        found.append(sum(cosines) / len(cosines))
    model.train(training)
    return found


def run_embedding_cell(cell: Cell) -> dict[str, Any]:
    """Swaps, trains and measures; resumes a run that was interrupted.

    Returns:
        The figures of the cell, JSON-ready.

    Raises:
        SettingsError: for a swap that cannot be made, an option that has no meaning here, or a cell that was begun
            with other settings.
    """
    given, healing, study = cell.given, cell.healing, cell.study
    if given.lora.lora or healing.distill:
        raise SettingsError(f"Cell {cell.name!r}: the objective 'embedding' always has a teacher, and takes no --lora.")
    arguments = given.trainer
    # Before anything below changes the arguments.
    settings = json.loads(json.dumps(cell.settings(), default=str))
    if not check_run(str(arguments.output_dir), settings):
        record_run(str(arguments.output_dir), settings)
    tokenizer = load_tokenizer(given.model, causal=True)
    train_rows, held_out, _ = load_rows(given.data, tokenizer, True, seed=0)
    texts, held_out_texts = Texts(train_rows.stream, tokenizer), Texts(held_out.stream, tokenizer)
    set_seed(arguments.seed)
    model = AutoModel.from_pretrained(given.model.model_name_or_path, dtype=given.model.dtype)
    teacher = frozen_teacher(model)
    capacity = native_capacity(model) or 2**31
    swap = None
    if given.scheme.scheme is not None:
        sample = texts.rows(_SAMPLE_ROWS, min(given.data.block_size, capacity))
        options = parse_structured(given.scheme.scheme_options or "{}", "scheme_options")
        scheme = given.scheme.scheme
        try:
            swap = swap_scheme(
                model,
                parse_structured(scheme, "scheme") if scheme.startswith(("[", "{")) else scheme,
                initialization=healing.initialization,
                sample=sample,
                table_extension=healing.table_extension,
                gradual=healing.gradual_steps > 0,
                **options,
            )
        except (PositionEncodingError, ValueError) as error:
            raise SettingsError(f"Cell {cell.name!r}: {error}") from error
    start = similarities(model, teacher, held_out_texts, study, capacity)
    lengths = study.train_lengths or [given.data.block_size]
    tokens = arguments.per_device_train_batch_size * given.data.block_size
    arguments.per_device_train_batch_size = 1
    arguments.remove_unused_columns = False
    arguments.train_sampling_strategy = "sequential"
    arguments.eval_on_start = True
    trainer = _TeacherTrainer(
        model,
        arguments,
        train_dataset=_Batches(texts, lengths, tokens, arguments.max_steps, arguments.seed),
        eval_dataset=held_out_texts,
        data_collator=lambda batches: batches[0],
        callbacks=[GradualSwapCallback(healing.gradual_steps)] if healing.gradual_steps else [],
        cell=cell,
        teacher=teacher,
        texts=texts,
        capacity=capacity,
    )
    checkpoint = latest_complete_checkpoint(str(arguments.output_dir))
    outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    history = trainer.state.log_history
    return {
        "quantity": "cosine to the sentence embeddings before the swap",
        "swap": None if swap is None else swap.to_dict(),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seconds": outcome.metrics["train_runtime"],
        "curve": series(history, "eval_similarity"),
        "train_curve": series(history, "loss"),
        "lengths": sorted(study.lengths),
        "start_by_length": start,
        "end_by_length": similarities(model, teacher, held_out_texts, study, capacity),
        "reasons": [],
    }
