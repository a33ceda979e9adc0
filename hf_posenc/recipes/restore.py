"""Putting the encoding of a model back."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding
from hf_posenc.patching.place.transaction import Transaction


def restore_encoding(model: PreTrainedModel, before: PositionEncoding | None) -> None:
    """Gives a model the encoding that it had.

    Args:
        model: is changed in place.
        before: what `current_encoding` returned; `None` for a model that was not patched.
    """
    if current_encoding(model) is not before:
        transaction = Transaction(model)
        transaction.undo() if before is None else transaction.install(before)
