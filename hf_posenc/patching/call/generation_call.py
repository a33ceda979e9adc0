"""A call of `generate` in which transformers counts the positions, so that no step has to read them from the device."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError


class Generation:
    """A call of `generate` that was given no `position_ids`: they are counted over its mask, to which it appends ones.

    That is taken for granted in each step, compared on the device, and read once, at the end.
    """

    def __init__(self) -> None:
        #: The ids of the caches that it has filled.
        self.caches: set[int] = set()
        self._differs: dict[torch.device, Tensor] = {}

    def has_filled(self, cache: Any) -> bool:
        """Whether it has filled a cache, which therefore holds nothing else."""
        return id(cache) in self.caches

    def compare(self, differs: Tensor) -> None:
        """Keeps a 0-dim bool: whether a step had other positions, or a mask that hides a new token."""
        known = self._differs.get(differs.device)
        self._differs[differs.device] = differs if known is None else known | differs

    def check(self) -> None:
        """Reads what was compared.

        Raises:
            UnsupportedError: if a step differs.
        """
        if any(map(bool, self._differs.values())):
            raise UnsupportedError(
                "A call of the model in `generate` had position_ids that are not the count over its mask, or a mask "
                "that hides a new token, though `generate` was given no position_ids. A logits processor, or another "
                "part of the loop, calls the model with its own. Pass position_ids to `generate`, whose steps are then "
                "read one by one."
            )


#: The call in progress.
GENERATION: ContextVar[Generation | None] = ContextVar("hf_posenc_generation", default=None)
