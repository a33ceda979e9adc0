"""The error for code of an architecture that cannot be read."""

from __future__ import annotations

import transformers

from hf_posenc.errors import UnsupportedError


def unknown_seam(found: str) -> UnsupportedError:
    """Returns the error for a name, a signature or a shape that discovery does not know, given what was found."""
    return UnsupportedError(
        f"{found} It was read in transformers {transformers.__version__}, which may differ from the versions that "
        "hf_posenc was tested with. Declare the architecture with hf_posenc.register_architecture, or use one of these."
    )
