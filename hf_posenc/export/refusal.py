"""The error of a target that cannot carry a scheme."""

from __future__ import annotations

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.request import Request
from hf_posenc.export.targets import TARGETS

#: Why carriers were refused: those that have the same reason, by the reason.
Reasons = dict[str, list[str]]


class ExportError(UnsupportedError):
    """A target has no carrier for a scheme.

    Args:
        request: what was to be exported.
        target: name of the target.
        program: the program that would run the export, as the start of a sentence: "Stock transformers".
        reasons: why each carrier that was tried does not fit.
        inexact: whether a carrier was found whose numbers differ, so that `approximate=True` would write it.

    Attributes:
        reasons: the reasons, one sentence each.
    """

    is_list = True

    def __init__(self, request: Request, target: str, program: str, reasons: Reasons, inexact: bool) -> None:
        self.reasons = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        others = (one.advice(request.model) for one in TARGETS if one.name != target)
        ways = [
            *(["accept the difference: approximate=True, or --approximate"] if inexact else []),
            *(advice for advice in others if advice is not None),
            "run the checkpoint where hf_posenc is installed: import it before from_pretrained, or use hf-posenc serve",
        ]
        super().__init__(
            f"{program} cannot run the scheme {request.label()} of this {type(request.model).__name__}."
            + "".join(f"\n- {reason}" for reason in self.reasons)
            + "\nWhat can be done:"
            + "".join(f"\n- {way}" for way in ways)
        )
