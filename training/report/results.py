"""The format of a study's `results.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Required, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, GetPydanticSchema, model_validator
from typing_extensions import TypedDict  # pydantic needs it for Python 3.11

from hf_posenc.report.records import described
from hf_posenc.schemes.registry import scheme_from_dict
from training.errors import SettingsError

#: The figures of a reading that have a value for each length.
BY_LENGTH = ("loss", "tail_loss", "similarity", "accuracy", "token_accuracy")
#: The quantity that models are compared by, for each kind of task.
MAIN = {
    "language_modeling": "loss", "generalization": "accuracy", "embedding": "similarity",
    "image_classification": "accuracy",
}  # fmt: skip


class ResultsError(SettingsError):
    """Results of a study that cannot be reported."""


def _named(**types: Any) -> GetPydanticSchema:
    """Marks a dictionary in which these values have a known type. All may be missing that are not `Required`."""
    make: Any = TypedDict
    kind = make("kind", types, total=False)
    kind.__pydantic_config__ = ConfigDict(extra="allow")
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


Numbers = list[FiniteFloat | None]
_READING: dict[str, Any] = {
    "lengths": list[int], "position_edges": list[int], "position_loss": Numbers, "sliding_loss": FiniteFloat | None,
    "reasons": list[str], **dict.fromkeys(BY_LENGTH, Numbers),
}  # fmt: skip
_DATA: dict[str, Any] = {
    "source": Required[str], "digest": Required[str], "tokenizer": str,
    **dict.fromkeys(("train_pictures", "validation_pictures", "test_pictures"), int),
}  # fmt: skip
Reading = Annotated[dict[str, Any], _named(**_READING)]
Dog = Annotated[dict[str, Any], _named(layers=Numbers, probe=FiniteFloat | None, error=str | None)]
Fit = Annotated[dict[str, Any], _named(residual=Required[FiniteFloat | None])]
Swap = Annotated[dict[str, Any], _named(fits=list[Fit])]
Data = Annotated[dict[str, Any], _named(**_DATA)]
Changes = Annotated[dict[str, Any], _named(max_steps=int, train_length=int)]


class Run(BaseModel):
    """One training: its place in the study, and its figures or the reason why there are none."""

    task: str
    scheme: str
    config: dict[str, Any] | None
    seed: int
    status: Literal["finished", "unsupported", "diverged", "failed"]
    reason: str = ""
    start: str | None = Field(None, alias="from")
    training: Changes = {}
    swap_options: dict[str, Any] = {}
    notes: list[str] = []
    parameters: int | None = None
    seconds: FiniteFloat = 0.0
    cpu_seconds: FiniteFloat | None = None
    processor: str | None = None
    curve: dict[str, Numbers] = {}
    before: Reading | None = None
    by_length: Reading | None = None
    exact_match: Reading | None = None
    by_resolution: Reading | None = None
    dog: Dog | None = None
    swap: Swap | None = None
    model: str | None = None

    @property
    def finished(self) -> bool:
        """Whether it has figures."""
        return self.status == "finished"

    @property
    def reading(self) -> dict[str, Any]:
        """The figures by length or resolution."""
        return self.by_length or self.exact_match or self.by_resolution or {}

    @property
    def steps(self) -> int | None:
        """Number of steps of this training; 0 for a model that was only evaluated, `None` without figures."""
        return int(self.curve["step"][-1] or 0) if self.finished else None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.config is not None:
            scheme_from_dict(self.config)
        steps = self.curve.get("step", [])
        if self.finished and not (steps and self.reading.get("lengths")):
            raise ValueError(f"it is finished, but has no {'lengths' if steps else 'curve'}; expected both")
        counts = [(name, len(values), len(steps)) for name, values in self.curve.items() if values]
        for reading in (self.before or {}, self.reading):
            lengths, gaps = len(reading.get("lengths", ())), len(reading.get("position_edges", [0])) - 1
            counts += [(name, len(reading[name]), lengths) for name in BY_LENGTH if name in reading]
            counts.append(("position_loss", len(reading.get("position_loss", ())), gaps))
        for name, count, expected in counts:
            if count != expected:
                raise ValueError(f"{name} has {count} numbers; expected {expected}")
        return self


class Task(BaseModel, extra="allow"):
    """The models of a task, and how they were trained and evaluated."""

    kind: Literal["language_modeling", "generalization", "embedding", "image_classification"]
    model: str
    lengths: list[int] = Field(min_length=1)
    max_steps: int
    batch_size: int
    pretrained: str | None = None
    train_length: int | None = None
    train_lengths: list[int] = []
    tail_tokens: int | None = None
    unigram_cross_entropy: FiniteFloat | None = None
    pictures: Data | None = None
    objective: str | None = None
    causal: bool | None = None

    @property
    def causal_reader(self) -> bool:
        """Whether the part that reads a text has a causal mask. The encoder of an encoder-decoder has none."""
        if self.causal is None:  # results of earlier versions
            read = self.kind in ("language_modeling", "generalization")
            return read and self.objective in ("causal", None)
        return self.causal

    @property
    def axis(self) -> str:
        """The meaning of `lengths`: "length", or "resolution" for pictures."""
        return "resolution" if self.kind == "image_classification" else "length"

    @property
    def trained(self) -> list[int]:
        """The lengths of training."""
        return self.train_lengths or [self.train_length or self.lengths[0]]


class Study(BaseModel):
    """All results of a study."""

    name: str
    description: str = ""
    settings: dict[str, Any]
    command: str
    corpus: Data | None
    tasks: dict[str, Task]
    runs: list[Run]
    versions: dict[str, str]
    machine: dict[str, Any]

    def of(self, task: str, scheme: str | None = None) -> list[Run]:
        """The runs of a task, or of one scheme in it."""
        return [run for run in self.runs if run.task == task and scheme in (None, run.scheme)]

    @model_validator(mode="after")
    def _runs_fit_together(self) -> Self:
        names = [f"task {run.task!r}, scheme {run.scheme!r}, seed {run.seed}" for run in self.runs]
        for name, run in zip(names, self.runs, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"{name} is listed twice; expected one run for each")
            if run.task not in self.tasks:
                raise ValueError(f"{name}: expected one of the tasks {', '.join(self.tasks)}")
            if run.finished and MAIN[self.tasks[run.task].kind] not in run.reading:
                raise ValueError(f"{name} is finished; expected its {MAIN[self.tasks[run.task].kind]!r}")
            if run.finished and run.reading["lengths"] != (lengths := self.tasks[run.task].lengths):
                raise ValueError(
                    f"{name} was measured at {run.reading['lengths']}; expected those of its task, {lengths}"
                )
            first = next(other for other in self.of(run.task, run.scheme) if other.finished or not run.finished)
            compared = ("config", "start", "training", "swap_options", *(["parameters", "steps"] * run.finished))
            for key in compared:
                if getattr(first, key) != getattr(run, key):
                    raise ValueError(
                        f"{name} and seed {first.seed} differ in {key} ({getattr(run, key)!r} and "
                        f"{getattr(first, key)!r}), so they cannot be averaged. Give one of them a different label"
                    )
        return self


def check_results(results: Any, file: str | Path = "results", kind: Any = Study) -> Any:
    """Returns the content of a file as a `Study` or `Run`. Raises `ResultsError` if it would be reported wrongly."""
    try:
        return kind.model_validate(results)
    except pydantic.ValidationError as error:
        raise ResultsError(f"{file}: {described(error)}.") from error
