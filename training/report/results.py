"""The format of a study's `results.json`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

#: The quantity that models are compared by, for each kind of task.
MAIN = {
    "language_modeling": "loss", "generalization": "accuracy", "embedding": "similarity",
    "image_classification": "accuracy",
}  # fmt: skip


class ResultsError(ValueError):
    """Results of a study that cannot be reported."""


class Run(BaseModel):
    """One training: its place in the study, and its figures or the reason why there are none."""

    task: str
    scheme: str
    config: dict[str, Any] | None
    seed: int
    status: Literal["finished", "unsupported", "diverged", "failed"]
    reason: str = ""
    start: str | None = Field(None, alias="from")
    training: dict[str, Any] = {}
    swap_options: dict[str, Any] = {}
    notes: list[str] = []
    parameters: int | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = None
    processor: str | None = None
    curve: dict[str, list[float | None]] = {}
    before: dict[str, Any] | None = None
    by_length: dict[str, Any] | None = None
    exact_match: dict[str, Any] | None = None
    by_resolution: dict[str, Any] | None = None
    dog: dict[str, Any] | None = None
    swap: dict[str, Any] | None = None
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
    unigram_cross_entropy: float | None = None
    pictures: dict[str, Any] | None = None
    causal: bool | None = None

    @property
    def causal_reader(self) -> bool:
        """Whether the part that reads a text has a causal mask. The encoder of an encoder-decoder has none."""
        if self.causal is None:  # results of earlier versions
            read = self.kind in ("language_modeling", "generalization")
            return read and getattr(self, "objective", "causal") == "causal"
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
    corpus: dict[str, Any] | None
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
                raise ValueError(f"{name} is listed twice")
            if run.task not in self.tasks:
                raise ValueError(f"{name}: the tasks are {', '.join(self.tasks)}")
            measured = [MAIN[self.tasks[run.task].kind], "lengths"] if run.finished else []
            missing = [key for key in measured if key not in run.reading]
            if missing or (run.finished and not run.curve.get("step")):
                raise ValueError(f"{name} is finished but has no {(missing or ['curve'])[0]!r}")
            if run.finished and run.reading["lengths"] != self.tasks[run.task].lengths:
                raise ValueError(f"{name} was measured at {run.reading['lengths']}, but its task has other lengths")
            first = next(other for other in self.of(run.task, run.scheme) if other.finished or not run.finished)
            compared = ("config", "start", "training", "swap_options", *(["parameters", "steps"] * run.finished))
            for key in compared:
                if getattr(first, key) != getattr(run, key):
                    raise ValueError(
                        f"{name} and seed {first.seed} differ in {key} ({getattr(run, key)!r} and "
                        f"{getattr(first, key)!r}), so they cannot be averaged. Give one of them a different label"
                    )
        return self


def check_results(results: dict[str, Any]) -> Study:
    """Validates results, and refuses those that would be reported wrongly."""
    try:
        return Study.model_validate(results)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("results", *problem["loc"])))
        raise ResultsError(f"{place}: {problem['msg'].removeprefix('Value error, ')}.") from error
