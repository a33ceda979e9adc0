"""Other sizes of blocks, so that short inputs are divided as long ones are."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posenc.attention import blockwise


def set_sizes(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Changes sizes on all devices."""
    changed = {is_cpu: sizes._replace(**values) for is_cpu, sizes in blockwise.SIZES.items()}
    for is_cpu, sizes in changed.items():
        monkeypatch.setitem(blockwise.SIZES, is_cpu, sizes)
