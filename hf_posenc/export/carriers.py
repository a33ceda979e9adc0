"""The loop over carriers: each form that could hold a scheme is written, run, and compared with the model."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.comparison import accepted, excess, largest
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.models import other_modalities
from hf_posenc.export.records import Check
from hf_posenc.export.targets import TARGETS, Target
from hf_posenc.installation import install_command
from hf_posenc.schemes.needs import Environment, Need


@dataclass(frozen=True, kw_only=True)
class Form:
    """A model in the terms of a target, before it is written.

    Args:
        carrier: what carries the scheme, in a few words: "LlamaForCausalLM with rope_type 'longrope'".
        restriction: inputs of the model that the export does not take, as a sentence; empty if it takes all.
    """

    carrier: str
    restriction: str = ""


F = TypeVar("F", bound=Form)


@dataclass(frozen=True)
class Carrier(Generic[F]):
    """A way to express schemes in a target.

    Args:
        name: in messages.
        form: returns what would be written, or raises `UnsupportedError` with the reason.
        gives: the kinds of parts that it has a place for; `None` if `form` looks at them itself.
        fits: whether it is worth trying for a model, judged by its config.
    """

    name: str
    form: Callable[[ModelParts], F]
    gives: Collection[Need] | None = None
    fits: Callable[[PreTrainedModel], bool] = lambda model: True

    def form_of(self, parts: ModelParts, program: str) -> F:
        """The form of a model, if the carrier has all that its scheme needs.

        Raises:
            UnsupportedError: with the reason.
        """
        if self.gives is not None and (problem := Environment.giving(program, self.gives).problem(parts.needs())):
            raise UnsupportedError(problem)
        return self.form(parts)


def of_types(*model_types: str) -> Callable[[PreTrainedModel], bool]:
    """Returns a function that tells whether a model has one of these types."""
    return lambda model: model.config.model_type in model_types


class Export(ABC, Generic[F]):
    """The export of one model: how a form is written, run, and described. It does not change the model.

    A target's file has the subclass of it, a dataclass whose fields are the options of the target.
    """

    def of(self, parts: ModelParts, draft: Path, tokenizer: Any) -> Self:
        """Sets what is exported.

        Args:
            parts: the model.
            draft: a folder to write into.
            tokenizer: the model's tokenizer, if it was given.
        """
        self.parts, self.model, self.draft, self.tokenizer = parts, parts.model, draft, tokenizer
        return self

    @abstractmethod
    def carriers(self) -> Sequence[Carrier[F]]:
        """The carriers to try, in this order."""

    def prepare(self) -> None:
        """Called before anything is written. Raises `UnsupportedError` for what no carrier can change."""

    @abstractmethod
    def write(self, form: F) -> None:
        """Writes a form into the folder, replacing one that was written before."""

    @abstractmethod
    def checks(self, form: F) -> Iterable[Check]:
        """Runs what was written in the target's program, and compares it with the model.

        Raises:
            UnsupportedError: if the program cannot run it.
        """

    def finished(self, form: F, checks: tuple[Check, ...]) -> tuple[Check, ...]:
        """Writes the files of the export other than the form. Returns all checks, given those of the form."""
        return checks

    @abstractmethod
    def usage(self, form: F) -> str:
        """Markdown with the code or command that runs it; `{folder}` stands for its folder or hub id."""


def carry(export: Export[F], target: Target, approximate: bool) -> tuple[F, tuple[Check, ...]]:
    """Writes the first form that gives the numbers of the model; returns it with what was measured.

    Args:
        export: the export.
        target: its target.
        approximate: whether to write the nearest form if none is exact.

    Raises:
        ExportError: if there is none, with the reason of each carrier.
    """
    reasons: dict[str, list[str]] = defaultdict(list)
    inexact: list[tuple[F, tuple[Check, ...]]] = []
    prepared = False
    for carrier in export.carriers():
        try:
            form = carrier.form_of(export.parts, target.program)
        except UnsupportedError as error:
            reasons[str(error)].append(carrier.name)
            continue
        if not prepared:
            export.prepare()
            prepared = True
        try:
            export.write(form)
            checks = largest(export.checks(form))
        except UnsupportedError as error:
            reasons[str(error)].append(carrier.name)
            continue
        problem = form.restriction or excess(target.program, checks)
        if not problem:
            return form, export.finished(form, checks)
        inexact.append((form, checks))
        reasons[problem].append(carrier.name)
    if not (approximate and inexact):
        raise ExportError(export.parts, target, reasons, bool(inexact))
    form, checks = min(inexact, key=lambda pair: max(check.size for check in pair[1]))
    export.write(form)
    return form, export.finished(form, accepted(checks))


class ExportError(UnsupportedError):
    """A target has no carrier for a scheme.

    Args:
        parts: the model that was to be exported.
        target: where to.
        reasons: why carriers do not fit: those with the same reason, by the reason.
        inexact: whether a carrier was found whose numbers differ, so that `approximate=True` would write it.

    Attributes:
        reasons: the reasons, one sentence each.
    """

    is_list = True

    def __init__(self, parts: ModelParts, target: Target, reasons: dict[str, list[str]], inexact: bool) -> None:
        self.reasons = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        others = (_advice(other, parts) for other in TARGETS if other is not target)
        rounded = "export model.float(): weights that an export computes are not rounded then"
        ways = [
            *([rounded] if inexact and parts.model.dtype != torch.float32 else []),
            *(["accept the difference: approximate=True, or --approximate"] if inexact else []),
            *filter(None, others),
            "run the checkpoint where hf_posenc is installed: import it before from_pretrained, or use hf-posenc serve",
        ]
        super().__init__(
            f"{target.program.replace('plain', 'Plain')} cannot run the scheme {parts.label} of this {parts.name}."
            + "".join(f"\n- {reason}" for reason in self.reasons)
            + "\nWhat can be done:"
            + "".join(f"\n- {way}" for way in ways)
        )


def _advice(target: Target, parts: ModelParts) -> str:
    """The advice to export a model to this target after another one has refused it, as far as is known before anything
    is written; empty if the target has nothing that could carry the scheme.
    """
    if other_modalities(parts.model):
        return ""
    advice, missing = f"export it to {target.name!r}", target.missing_packages()
    if target.takes_almost_all:
        several = parts.model.config.is_encoder_decoder
        return "" if several else f"{advice}: {target.program} runs almost every scheme"
    if missing:
        return f"{advice}, if {target.program} can express it; to find out, try it after {install_command(target.name)}"
    carrier = proposal(target, parts)
    return carrier and f"{advice}: {target.program} has {carrier}"


def proposal(target: Target, parts: ModelParts) -> str:
    """The first carrier that may hold the scheme of a model in a target, before anything is run; empty if none may."""
    with contextlib.suppress(UnsupportedError):
        for carrier in target.export({}).of(parts, Path(), None).carriers():
            with contextlib.suppress(UnsupportedError):
                form = carrier.form_of(parts, target.program)
                if not form.restriction:
                    return form.carrier
    return ""
