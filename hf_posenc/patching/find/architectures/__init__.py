"""What structural discovery cannot see, declared per architecture.

Most of transformers needs nothing here. A declaration says only what is special: how to silence a mechanism that is
neither a rotary function nor a table, where heads are counted differently, or why an architecture is refused.
"""

from __future__ import annotations

from hf_posenc.patching.find.architectures.declaration import (
    Architecture,
    Silencer,
    architecture_of,
    register_architecture,
)
from hf_posenc.patching.find.architectures.stock import declare_stock_architectures

declare_stock_architectures()

__all__ = ["Architecture", "Silencer", "architecture_of", "register_architecture"]
