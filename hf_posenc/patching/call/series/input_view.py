"""Encoders that accept one number of frames only, run with as many as a call has.

Such an encoder adds all rows of its position table to its tokens, and raises an error unless the config says that there
are as many. Its own forward runs with another `self`: a view that shares all attributes of the encoder, except that the
table and the config state the number of tokens of this call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.call.view import view_of
from hf_posenc.patching.find.series.found import SOURCE_LENGTH, FixedInput
from hf_posenc.patching.find.tables import table_origin


class InputView:
    """Makes the view of one encoder.

    Args:
        module: the encoder.
        found: what fixes its number of tokens.
        runtime: its runtime, which knows the number of tokens of the call in progress.
    """

    def __init__(self, module: Any, found: FixedInput, runtime: StackRuntime) -> None:
        self.module = module
        self.found = found
        self.runtime = runtime
        self._view: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_view": None}

    @property
    def tokens(self) -> int:
        """Number of tokens of the call in progress."""
        return int(getattr(self.runtime.state, "expected"))  # noqa: B009

    @property
    def view(self) -> Any:
        """The encoder with another table and config. It shares all other attributes, later changes included."""
        if self._view is None:
            own: dict[str, Any] = {
                "config": property(lambda _: _StatedConfig(self.module.config, self.tokens)),
                self.found.table: property(lambda _: _WholeTable(getattr(self.module, self.found.table), self.tokens)),
            }
            self._view = view_of(self.module, own)
        return self._view


class _StatedConfig:
    """A config that states another number of tokens; everything else is that of the encoder's config."""

    def __init__(self, config: Any, tokens: int) -> None:
        self.__dict__["_config"] = config
        self.__dict__[SOURCE_LENGTH] = tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)


class _WholeTable:
    """A table with a row for every token of the call. Its rows are looked up in the patched table."""

    def __init__(self, table: Any, tokens: int) -> None:
        self.table = table
        self.num_embeddings = tokens

    def __call__(self, rows: Tensor) -> Any:
        return self.table(rows)

    @property
    def weight(self) -> Tensor:
        """`(tokens, hidden)`, or one row of zeros for no vectors."""
        origin = table_origin(self.table)
        device = next(self.table.parameters()).device
        rows: Tensor = self.table(torch.arange(origin, origin + self.num_embeddings, device=device))
        return rows.squeeze(0)
