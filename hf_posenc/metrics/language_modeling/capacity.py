"""How long a sequence a stock model has positions for."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.apply import current_encoding, unwrapped
from hf_posenc.patching.discovery import find_stacks
from hf_posenc.patching.table_site import table_origin, table_weight


def native_capacity(model: Any) -> int | None:
    """How many positions the learned table of an unpatched model has; `None` without a table, or for a patched model.

    A stock model fails past its table in a way of its own: with an index or a shape error on a CPU, and on a GPU with
    one that ends the process. A patched model raises `SequenceLengthError` by itself.
    """
    target = unwrapped(model)
    if current_encoding(target) is not None:
        return None
    try:
        stacks = find_stacks(target)
    except UnsupportedError:
        # Not an architecture that this library patches; its own forward is then the judge.
        return None
    rows = [
        table.module.weight.shape[0] - table_origin(table.module)
        for stack in stacks
        for table in stack.tables
        if isinstance(table.module, nn.Embedding) and table_weight(table.module) is not None
    ]
    return min(rows, default=None)
