"""The facts that the rules for inputs read about a model: configs by modality, signature, and earlier arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .population import Pair
from .shrinking import FIRST_TOKEN, VOCABULARY

BATCH = 2


class NotYet(Exception):
    """A rule reads an argument that another rule has not given yet."""


class Context:
    """One model, and the arguments that are being made for it.

    Args:
        size: 0 for the size that the config names, 1 for another resolution or duration.
    """

    def __init__(self, model: PreTrainedModel, pair: Pair, generator: torch.Generator, size: int) -> None:
        self.model, self.pair, self.generator, self.size = model, pair, generator, size
        self.config: Any = model.config
        self.parameters = inspect.signature(type(model).forward).parameters
        self.given: dict[str, Any] = {}
        self.batch = BATCH

    def normal(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, generator=self.generator)

    def tokens(self, length: int, batch: int | None = None) -> Tensor:
        """Random ordinary tokens."""
        shape = (self.batch if batch is None else batch, length)
        return torch.randint(FIRST_TOKEN, VOCABULARY - 8, shape, generator=self.generator)

    def part(self, *names: str) -> Any:
        """The first config inside the model's config that has one of these names; else the config itself."""
        for config in configs_in(self.config):
            for name in names:
                part = getattr(config, name, None)
                if isinstance(part, PreTrainedConfig):
                    return part
        return self.config

    def value(self, name: str, default: Any = None) -> Any:
        """A field of the first config, outside in, that has it."""
        for config in configs_in(self.config):
            found = getattr(config, name, None)
            if found is not None:
                return found
        return default

    def first(self, *names: str) -> Any:
        """The first of several fields that any config has."""
        return next((found for name in names if (found := self.value(name)) is not None), None)

    def needed(self, name: str) -> Any:
        """An argument that another rule gives first."""
        if name not in self.given:
            raise NotYet(name)
        return self.given[name]

    def wants(self, name: str) -> bool:
        """Whether the forward has an argument of this name."""
        return name in self.parameters


def configs_in(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and all configs inside it, outside in."""
    pending = [config]
    while pending:
        one = pending.pop(0)
        yield one
        parts = (getattr(one, name, None) for name in type(one).sub_configs)
        pending += [part for part in parts if isinstance(part, PreTrainedConfig)]


def pair_of_ints(value: Any) -> tuple[int, int]:
    """(rows, columns) of a size that may be one number."""
    if isinstance(value, dict):
        return int(value["height"]), int(value["width"])
    if isinstance(value, list | tuple):
        return (int(value[-2]), int(value[-1])) if len(value) > 1 else (int(value[0]), int(value[0]))
    return int(value), int(value)
