"""The config of a patched model: a copy that no caller and no other model holds."""

from __future__ import annotations

import copy

from transformers import PreTrainedConfig, PreTrainedModel


class OwnConfig:
    """A copy of a model's config, with those of its parts, which stands in every module that holds the original.

    A patch writes its entry and lengths into the copy. Other models that were built from the same object keep it.

    Args:
        model: a stock model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        copies: dict[int, PreTrainedConfig] = {}
        self.original = model.config
        self.config: PreTrainedConfig = copy.deepcopy(model.config, copies)
        self._places = [
            (module, name, value, copies[id(value)])
            for module in model.modules()
            for name, value in module.__dict__.items()
            if isinstance(value, PreTrainedConfig) and id(value) in copies
        ]

    def place(self) -> None:
        """Gives the copy to the model. Calling it again changes nothing."""
        for module, name, original, own in self._places:
            if module.__dict__.get(name) is original:
                module.__dict__[name] = own

    def remove(self) -> None:
        """Gives the model its original config, unless one of the two was changed since: then it keeps the copy.

        A change to the copy (such as a resized vocabulary) belongs to the model, and a change to the original does not.
        """
        if self.config == self.original:
            for module, name, original, own in self._places:
                if module.__dict__.get(name) is own:
                    module.__dict__[name] = original
