"""Declarations of properties of an architecture that structural discovery cannot find.

Most architectures in transformers need none. A declaration contains only the special properties of an architecture:
how to silence a mechanism that is neither a rotary function nor a table, how to count heads, or why it is refused.
"""

from __future__ import annotations

from hf_posenc.patching.anatomy.architectures.audio import declare_audio_architectures
from hf_posenc.patching.anatomy.architectures.deberta import declare_deberta
from hf_posenc.patching.anatomy.architectures.declaration import (
    Architecture,
    Silencer,
    architecture_of,
    register_architecture,
)
from hf_posenc.patching.anatomy.architectures.stock import declare_stock_architectures
from hf_posenc.patching.anatomy.architectures.vision import declare_vision_architectures

declare_stock_architectures()
declare_deberta()
declare_vision_architectures()
declare_audio_architectures()

__all__ = ["Architecture", "Silencer", "architecture_of", "register_architecture"]
