"""The task of keeping sentence embeddings: a pretrained encoder learns its hidden states from before the swap."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModel, PreTrainedTokenizerBase

from hf_posenc import SequenceLengthError
from hf_posenc.metrics.forward import native_capacity
from hf_posenc.metrics.language_modeling.token_losses import Frame
from hf_posenc.preserve import evaluation_mode
from hf_posenc.recipes import hidden_state_loss, mean_pooled, pose_positions
from training.data.text import TokenStream
from training.errors import SettingsError
from training.study.corpus import Corpus
from training.study.settings import StudySettings, SwapArguments
from training.study.tasks.task import CellData, rounded
from training.study.tasks.text import TextTask
from training.swapping import SAMPLE_ROWS
from training.trainer import SchemeTrainer

if TYPE_CHECKING:
    from training.study.cells import Cell


class EmbeddingTask(TextTask):
    """Keeping the sentence embeddings of a pretrained encoder."""

    kind = "embedding"
    loader = AutoModel
    has_teacher = True

    def check(self, study: StudySettings) -> None:
        if not self.pretrained:
            raise SettingsError(f"The task {self.name!r} needs a trained encoder: give --model_name_or_path.")
        super().check(study)

    def refusal(self, swap: SwapArguments) -> str | None:
        refused = swap.lora or swap.distill
        return f"the task {self.name!r} always has a teacher, and does not support lora." if refused else None

    def data(self, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> CellData:
        settings, lengths = cell.settings, cell.train_lengths
        train, validation = (Texts(stream, tokenizer) for stream in Corpus.open_streams(cell.study_folder / "data"))
        tokens = settings.batch_size * settings.train_length
        return CellData(
            train=TeacherBatches(train, lengths, tokens, settings.max_steps, cell.seed, settings.pose_length),
            collate=itemgetter(0),
            validation=validation,
            positions=settings.pose_length or max(lengths),
        )

    def sample(self, data: CellData, length: int) -> Tensor:
        rows: Tensor = data.train.texts.rows(SAMPLE_ROWS, length)
        return rows

    def try_out(self, model: Any, data: CellData) -> None:
        """Runs the model at the last position of training."""
        places = torch.tensor([[0, data.positions - 1]], device=model.device)
        capacity = native_capacity(model)
        if capacity is not None and capacity < data.positions:
            raise SequenceLengthError(
                f"This {type(model).__name__} has {capacity} positions, but {data.positions} are trained. Give a "
                "smaller pose_length, or a scheme with more positions."
            )
        model(input_ids=torch.zeros_like(places), position_ids=places, attention_mask=torch.ones_like(places))

    def trainer(self, options: dict[str, Any], swap: SwapArguments, teacher: Any, data: CellData) -> SchemeTrainer:
        windows = self.settings.eval_windows
        return TeacherTrainer(**options, teacher=data.teacher, lengths=self.lengths, windows=windows)

    def read(self, cell: Cell, model: Any, data: CellData, whole: bool = True) -> dict[str, Any]:
        similarities = data.teacher.similarities(model, self.lengths, self.settings.eval_windows)
        return {"lengths": self.lengths, "similarity": rounded(similarities)}


class Texts:
    """Pieces of a stream of documents between the special tokens of a sentence, [CLS] and [SEP]."""

    def __init__(self, stream: TokenStream, tokenizer: Any) -> None:
        self.stream = stream
        self.frame = Frame((int(tokenizer.cls_token_id),), (int(tokenizer.sep_token_id),))

    def row(self, start: int, length: int) -> Tensor:
        """Returns `(length,)` ids: `length - 2` tokens of the text from `start`, between the special tokens."""
        content = torch.from_numpy(self.stream.read(start, start + length - 2)[0])
        return self.frame.around(content[None], targets=False)[0]

    def rows(self, count: int, length: int) -> Tensor:
        """Returns `(count, length)` ids of rows that are spread evenly over the stream."""
        spare = len(self.stream) - (length - 2)
        return torch.stack([self.row(index * spare // max(count - 1, 1), length) for index in range(count)])


class TeacherBatches(Dataset[dict[str, Tensor]]):
    """One batch per step, each with the same number of tokens. The lengths alternate.

    With a `pose_length`, each batch has the positions of a text of that many tokens, drawn by `pose_positions`.
    """

    def __init__(
        self, texts: Texts, lengths: list[int], tokens: int, steps: int, seed: int, pose_length: int | None
    ) -> None:
        self.texts, self.lengths, self.tokens, self.steps, self.seed = texts, lengths, tokens, steps, seed
        self.pose_length = pose_length

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = self.lengths[index % len(self.lengths)]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        count = max(1, self.tokens // length)
        starts = torch.randint(len(self.texts.stream) - (length - 2), (count,), generator=generator)
        ids = torch.stack([self.texts.row(int(start), length) for start in starts])
        if self.pose_length is None:
            return {"input_ids": ids}
        places = torch.arange(length).expand(count, -1)
        skipped = pose_positions(places, self.pose_length, generator=generator)
        return {"input_ids": ids, "position_ids": skipped, "attention_mask": torch.ones_like(ids)}


class Teacher:
    """The frozen encoder before the swap, and the texts for comparing it."""

    def __init__(self, model: Any, texts: Texts) -> None:
        self.model, self.texts = model, texts
        self.capacity = native_capacity(model) or 2**31

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> Tensor:
        """Returns the hidden states for a text. If the text is too long, they are joined from pieces that fit.

        Args:
            input_ids: `(batch, length)`, between the special tokens.

        Returns:
            `(batch, length, hidden)`. Its mean over tokens is the mean over all pieces.
        """
        if input_ids.shape[1] <= self.capacity:
            states: Tensor = self.model(input_ids=input_ids).last_hidden_state
            return states
        pieces = input_ids[:, 1:-1].split(self.capacity - 2, dim=1)
        framed = (self.texts.frame.around(piece, targets=False).to(input_ids.device) for piece in pieces)
        by_piece = [self.model(input_ids=piece).last_hidden_state for piece in framed]
        return torch.cat([by_piece[0][:, :1], *(states[:, 1:-1] for states in by_piece), by_piece[-1][:, -1:]], dim=1)

    def similarities(self, model: Any, lengths: list[int], windows: int) -> list[float | None]:
        """Computes the mean cosine between a model's sentence embeddings and those of the teacher.

        Returns:
            One number per length, over `windows` pieces of text; `None` for lengths that the model cannot read.
        """
        capacity = native_capacity(model) or 2**31
        means: list[float | None] = []
        with evaluation_mode(model):
            for length in lengths:
                cosines: list[float] = []
                try:
                    for ids in self.texts.rows(windows, length)[:, None] if length <= capacity else ():
                        learned = mean_pooled(model(input_ids=ids.to(model.device)).last_hidden_state)
                        taught = mean_pooled(self.states(ids.to(model.device)))
                        cosines.append(float(torch.nn.functional.cosine_similarity(learned, taught)))
                except SequenceLengthError:
                    cosines = []
                means.append(sum(cosines) / len(cosines) if cosines else None)
        return means


class TeacherTrainer(SchemeTrainer):
    """Trains on the hidden states of a teacher. Evaluates sentence embeddings on pieces of text of several lengths."""

    def __init__(self, *args: Any, teacher: Teacher, lengths: list[int], windows: int, **kwargs: Any) -> None:
        self.teacher, self.lengths, self.windows = teacher, lengths, windows
        super().__init__(*args, causal=False, **kwargs)
        teacher.model.to(self.args.device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the distance between the hidden states."""
        outputs = model(**inputs)
        loss = hidden_state_loss(outputs.last_hidden_state, self.teacher.states(inputs["input_ids"]))
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Returns the mean over the lengths that the model can read."""
        similarities = self.teacher.similarities(self.model, self.lengths, self.windows)
        known = [value for value in similarities if value is not None]
        metrics = {"eval_similarity": sum(known) / len(known)}
        self.log(metrics)
        return metrics
