"""The kinds of tokens that a stack may have, and what a kind may do with a stock model to observe it.

The kinds themselves, with what their modules become in a patch, are in `patching/layouts`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.sites import Stack
    from hf_posenc.patching.layouts.layout import Layout


class TemporaryChanges(Protocol):
    """Changes of a stock model for short runs. A transaction makes them and takes them back."""

    def with_scheme(self, config: SchemeConfig, stacks: list[Stack]) -> AbstractContextManager[Any]:
        """Context manager that yields the encoding with which some stacks run."""

    def with_forwards(self, forwards: list[tuple[nn.Module, Any]]) -> AbstractContextManager[None]:
        """Context manager in which some modules have other forwards."""


_KINDS: list[type[Layout]] = []


def register_layouts(*kinds: type[Layout]) -> None:
    """Registers kinds of tokens. They are asked in this order."""
    _KINDS.extend(kinds)


def layout_of(module: PreTrainedModel) -> type[Layout]:
    """The kind of tokens of a stack, or of a part of a model."""
    return next(kind for kind in _KINDS if kind.recognises(module))
