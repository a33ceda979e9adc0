"""The native scheme of bias tables over displacements."""

from __future__ import annotations

import math

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.sites import Stack
from hf_posenc.schemes import SwinConfig
from hf_posenc.schemes.config import SchemeConfig

#: Rows of a table for pairs with a class token.
_CLASS_ROWS = 3


def grid_bias_scheme(stack: Stack) -> SchemeConfig | None:
    """The scheme of the biases of a stack; `None` if it has none.

    Raises:
        UnsupportedError: if no scheme describes them.
    """
    assert stack.grid is not None
    biases = stack.grid.biases
    if not biases:
        return None
    if any(bias.table is None for bias in biases):
        raise UnsupportedError(
            f"The native mechanism in the attention of {type(stack.module).__name__} ({biases[0]}) is not among the "
            "schemes of this library. Any scheme can replace it, and unpatch_model restores it."
        )
    found = set()
    for bias in biases:
        table, window = bias.table, bias.window
        assert table is not None
        rows = 0 if window is None else math.prod(2 * size - 1 for size in window)
        if window is None or table.shape[0] - rows not in (0, _CLASS_ROWS):
            raise UnsupportedError(
                f"{bias} has {table.shape[0]} rows, which are not the displacements in a window of {window}, so its "
                "native scheme cannot be described. Any scheme can replace it."
            )
        found.add(SwinConfig(grid=window, class_entries=table.shape[0] > rows, shared=len(biases) == 1))
    if len(found) > 1:
        raise UnsupportedError(
            f"The layers of {type(stack.module).__name__} have windows of different sizes, which a single scheme "
            "cannot describe. Any scheme can replace them, and unpatch_model restores them."
        )
    return found.pop()
