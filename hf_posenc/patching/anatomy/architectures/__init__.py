"""Declarations of properties of an architecture that structural discovery cannot find.

Most architectures in transformers need none. A declaration contains only the special properties of an architecture:
how to silence a mechanism that is neither a rotary function nor a table, how to count heads, or why it is refused.
"""

from __future__ import annotations

from hf_posenc.patching.anatomy.architectures.declaration import (
    Architecture,
    Silencer,
    architecture_of,
    register_architecture,
)
from hf_posenc.patching.anatomy.architectures.pixels_and_sound import PIXELS, SOUND
from hf_posenc.patching.anatomy.architectures.text import TEXT

for _names, _architecture in {**TEXT, **PIXELS, **SOUND}.items():
    register_architecture(*_names, architecture=_architecture)

__all__ = ["Architecture", "Silencer", "architecture_of", "register_architecture"]
