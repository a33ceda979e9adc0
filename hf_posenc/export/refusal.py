"""The error of a target that cannot carry a scheme."""

from __future__ import annotations

from collections.abc import Sequence

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.request import Request
from hf_posenc.export.targets import TARGETS


class ExportError(UnsupportedError):
    """A target has no carrier for a scheme.

    Args:
        request: what was to be exported.
        target: name of the target.
        program: the program that would run the export, as the start of a sentence: "Stock transformers".
        reasons: one sentence for each carrier that was tried.
        inexact: whether a carrier was found whose numbers differ, so that `approximate=True` would write it.

    Attributes:
        reasons: the reasons.
    """

    is_list = True

    def __init__(self, request: Request, target: str, program: str, reasons: Sequence[str], inexact: bool) -> None:
        self.reasons = list(reasons)
        others = [f"to={one.name!r}" for one in TARGETS if one.name != target]
        widest = "" if target == "onnx" else "; to='onnx' has almost every scheme"
        ways = [
            *(["accept the difference with approximate=True"] if inexact else []),
            f"try {', '.join(others)}{widest}",
            "save it with model.save_pretrained, and import hf_posenc where it is loaded",
        ]
        super().__init__(
            f"{program} cannot run the scheme {request.label()} of this {type(request.model).__name__}."
            + "".join(f"\n- {reason}" for reason in self.reasons)
            + "\nWhat can be done:"
            + "".join(f"\n- {way}" for way in ways)
        )
