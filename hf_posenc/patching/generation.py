"""`generate` of a patched model: refuses at the call what would fail, or change something, halfway through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.patching.encoding import PositionEncoding

_DEPTH = "num_hidden_layers"


@dataclass(frozen=True)
class GenerateCall:
    """One call of `generate`, before anything has run.

    Args:
        model: the patched model.
        encoding: what is in force in it.
        arguments: the keyword arguments of the call.
    """

    model: PreTrainedModel
    encoding: PositionEncoding
    arguments: dict[str, Any]

    def setting(self, name: str) -> Any:
        """A field of the generation config as this call would have it, or an argument of `generate`; else `None`."""
        if self.arguments.get(name) is not None:
            return self.arguments[name]
        given = self.arguments.get("generation_config")
        own = getattr(given, name, None)
        return getattr(self.model.generation_config, name, None) if own is None else own


#: Raises `UnsupportedError` for a call that the scheme in force cannot serve.
GenerateCheck = Callable[[GenerateCall], None]

#: Run in this order at every call.
CHECKS: list[GenerateCheck] = []


class CheckedGenerate:
    """Stands in for `generate` on one model instance.

    Plain data, so that a deep copy or a pickle of the model calls the copy's own `generate`.

    Args:
        model: the patched model.
        encoding: what is in force in it.
        before: a `generate` that somebody had put on the instance, or `None` for that of its class.
    """

    def __init__(self, model: PreTrainedModel, encoding: PositionEncoding, before: Any) -> None:
        self.model = model
        self.encoding = encoding
        self.before = before

    @property
    def __wrapped__(self) -> Any:
        """What is called, for those who ask for the signature."""
        return type(self.model).generate.__get__(self.model) if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the checks, then `generate`.

        Raises:
            UnsupportedError: if a check refuses the call.
        """
        if "holder" in self.encoding.__dict__:  # else the scheme is out, and somebody has kept this function
            call = GenerateCall(self.model, self.encoding, kwargs)
            for check in CHECKS:
                check(call)
        # An early exit (`assistant_early_exit`) makes the config shallower for each draft, and an error or an
        # interrupt in a draft would leave it so: every later call would run the first layers only.
        config = self.model.base_model.config
        depth = getattr(config, _DEPTH, None)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            if depth is not None and getattr(config, _DEPTH) != depth:
                setattr(config, _DEPTH, depth)


def check_generation(encoding: PositionEncoding, model: PreTrainedModel) -> None:
    """Lets the checks run at every `generate` of a model that has one; the encoding's journal takes it back."""
    if getattr(model, "generation_config", None) is not None and hasattr(model, "generate"):
        guard = CheckedGenerate(model, encoding, model.__dict__.get("generate"))
        encoding.journal.set(model, "generate", guard)
