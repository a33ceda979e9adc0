"""The configs of a patched model: copies that no caller and no other model holds."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


class OwnConfig:
    """Copies of a model's config and generation config, which stand in every module that holds the originals.

    A patch writes its entry and lengths into the copies. Other models that were built from the same objects keep them.

    Args:
        model: a stock model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        copies: dict[int, Any] = {}
        originals = (model.config, getattr(model, "generation_config", None))
        self._pairs = [(original, copy.deepcopy(original, copies)) for original in originals if original is not None]
        self._places = [
            (module, name, value, copies[id(value)])
            for module in model.modules()
            for name, value in module.__dict__.items()
            if isinstance(value, PreTrainedConfig | GenerationConfig) and id(value) in copies
        ]

    @property
    def config(self) -> PreTrainedConfig:
        """The copy of the model's config."""
        config: PreTrainedConfig = self._pairs[0][1]
        return config

    def belongs_to(self, model: PreTrainedModel) -> bool:
        """Whether a model has this config, or the original of it."""
        return any(model.config is one for one in self._pairs[0])

    def place(self) -> None:
        """Gives the copies to the model. Calling it again changes nothing."""
        for module, name, original, own in self._places:
            if module.__dict__.get(name) is original:
                module.__dict__[name] = own

    def remove(self) -> None:
        """Gives the model its original configs, except one that was changed: then the model keeps the copy.

        A change to the copy (such as a resized vocabulary) belongs to the model, and a change to the original does not.
        """
        same = {isinstance(own, GenerationConfig): _are_same(original, own) for original, own in self._pairs}
        for module, name, original, own in self._places:
            if module.__dict__.get(name) is own and same[isinstance(own, GenerationConfig)]:
                module.__dict__[name] = original


def _are_same(original: Any, own: Any) -> bool:
    """Whether two values are equal, with the private fields of configs, which their `==` leaves out."""
    if type(original) is not type(own):
        return False  # A name that carries a scheme equals the plain name.
    if not isinstance(own, PreTrainedConfig | GenerationConfig):
        return bool(original == own)
    fields, others = original.__dict__, own.__dict__
    return fields.keys() == others.keys() and all(_are_same(fields[name], others[name]) for name in fields)
