"""The result of a check, and the bounds that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from hf_posenc import SequenceLengthError, UnsupportedError
from hf_posenc.patching.anatomy.short_runs import NotRunnableError

Measured = TypeVar("Measured")

#: Bounds on differences of logits whose standard deviation is 1.
NATIVE_BOUND = 1e-5
SAME_BOUND = 1e-4
EFFECT_BOUND = 1e-3
#: Uniform attention shows rounding errors only, about 1e-7.
CONTENT_BOUND = 1e-5
#: For architectures that keep a position-dependent temperature (declared as `kept`).
KEPT_BOUND = 1e-2


@dataclass
class Finding:
    """One check of one scheme.

    Args:
        verdict: "pass", "fail", "stock" (the stock model fails too), "refused" (with a reason, instead of a wrong
            answer) or "skip".
        value: what was measured, `None` where nothing was.
        note: the error, or why the check does not apply.
    """

    verdict: str
    value: float | None = None
    note: str = ""


@dataclass
class Record:
    """Everything found for one pair.

    Args:
        pair: its name.
        native: the native scheme as text, or why it has no name.
        part: the part of the model; empty for models of text.
        columns: "text", "vision" or "series": which schemes are placed in the part.
        refusal: the reason of an `UnsupportedError` that rules out every scheme, or empty.
        without: what the model has instead of softmax self-attention, or empty.
        unbuilt: why no tiny model of it can be built or called, or empty.
        findings: scheme -> check -> finding.
    """

    pair: str
    native: str = ""
    refusal: str = ""
    part: str = ""
    columns: str = "text"
    without: str = ""
    unbuilt: str = ""
    findings: dict[str, dict[str, Finding]] = field(default_factory=dict)

    def failed(self, scheme: str) -> list[str]:
        """Names of the checks a scheme fails."""
        return [name for name, finding in self.findings.get(scheme, {}).items() if finding.verdict == "fail"]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of what is not empty. Of the checks of a scheme, those that passed are left out."""
        fields = {name: value for name, value in asdict(self).items() if value}
        findings = {scheme: _remarkable(found) for scheme, found in self.findings.items()}
        return fields | ({"findings": findings} if findings else {})


def _remarkable(found: dict[str, Finding]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "verdict": finding.verdict,
            "value": None if finding.value is None else float(f"{finding.value:.2g}"),
            "note": finding.note,
        }
        for name, finding in found.items()
        if finding.verdict in ("fail", "stock", "refused")
    }


def at_most(value: float, bound: float) -> Finding:
    return Finding("pass" if value <= bound else "fail", value)


def above(value: float) -> Finding:
    return Finding("pass" if value > EFFECT_BOUND else "fail", value)


def failure(error: Exception) -> Finding:
    return Finding("fail", note=f"{type(error).__name__}: {error}"[:300])


def refused_or_failed(error: Exception) -> Finding:
    """A refusal, if the error describes the model; an error that only says that it could not be run does not count."""
    if isinstance(error, UnsupportedError | SequenceLengthError) and not isinstance(error, NotRunnableError):
        return Finding("refused", note=str(error))
    return failure(error)


def attempt(compute: Callable[[], Measured], *, refusable: bool = False) -> Measured | Finding:
    """The measurement of a check, or a finding that it failed.

    Args:
        compute: patches or calls a model.
        refusable: whether an `UnsupportedError` counts as a refusal instead of a failure.
    """
    try:
        return compute()
    except Exception as error:
        # The code of a hundred architectures, called in ways that some of them do not serve, may raise anything. None
        # of it may end the sweep, and all of it stands in the record with its type.
        return refused_or_failed(error) if refusable else failure(error)
