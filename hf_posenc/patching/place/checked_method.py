"""A method of one model instance that checks its calls against the scheme in force before it runs."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedModel

from hf_posenc.patching.place.encoding import PositionEncoding


class CheckedMethod:
    """Stands in for a method on one model instance. A subclass defines `__call__`, which ends by calling `__wrapped__`.

    It is plain data, so that a deep copy or a pickle of the model calls the copy's own method.

    Args:
        model: the patched model.
        encoding: the encoding in force.
        before: the value that the instance had under this name, or `None` for the method of its class.
    """

    #: Name of the method.
    method: ClassVar[str]

    def __init__(self, model: PreTrainedModel, encoding: PositionEncoding, before: Any) -> None:
        self.model = model
        self.encoding = encoding
        self.before = before

    @property
    def __wrapped__(self) -> Any:
        """The original method, so that `inspect.signature` finds its parameters."""
        return getattr(type(self.model), self.method).__get__(self.model) if self.before is None else self.before

    @property
    def in_force(self) -> bool:
        """Whether the scheme is still in place. False if a tool calls this object after the scheme was removed."""
        return "holder" in self.encoding.__dict__

    @classmethod
    def place(cls, encoding: PositionEncoding, model: PreTrainedModel) -> None:
        """Sets an instance on a model that has the method; the journal of the encoding removes it."""
        if hasattr(model, cls.method):
            encoding.record.journal.set(model, cls.method, cls(model, encoding, model.__dict__.get(cls.method)))
