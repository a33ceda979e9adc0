"""Exchanging the encoding of a model as a whole: after an error or an interrupt it is the old one or the new one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from hf_posenc.patching.call.placed_forward import refuse_foreign_forward
from hf_posenc.patching.find.discovery import find_stacks
from hf_posenc.patching.find.sites import FoundAttention, FoundModule
from hf_posenc.patching.place.apply import current_encoding, encodings, install, uninstall
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.running_batches import drop_kept_pages, refuse_running_batches
from hf_posenc.patching.place.sharded_weights import refuse_late_parameters


def exchange(model: PreTrainedModel, encoding: PositionEncoding) -> None:
    """Puts an encoding into a model, in place of the one in force. If that fails, the model is left as it was.

    Raises:
        UnsupportedError: if the encoding cannot be placed, or the one in force cannot be taken out to come back, or
            while continuous batching runs on the model.
    """
    refuse_running_batches(model)
    refuse_late_parameters(model, encoding)
    before = current_encoding(model)
    check_forwards(model)
    try:
        _put(model, encoding)
    except BaseException:
        _put(model, before)
        raise


def take_out(model: PreTrainedModel) -> None:
    """Leaves a model without any encoding, even if it is interrupted.

    Raises:
        UnsupportedError: while continuous batching runs on the model.
    """
    refuse_running_batches(model)
    try:
        _put(model, None)
    except BaseException:
        _put(model, None)
        raise


@contextmanager
def temporarily(model: PreTrainedModel, encoding: PositionEncoding | None) -> Iterator[None]:
    """A model with another encoding, or none, for the length of a `with` block. What it had before is back afterwards.

    Raises:
        UnsupportedError: if the encoding cannot be placed, or the one in force cannot be taken out to come back, or
            while continuous batching runs on the model.
    """
    before = current_encoding(model)
    if before is encoding:
        yield
        return
    refuse_running_batches(model)
    check_forwards(model)
    try:
        _put(model, encoding)
        yield
    finally:
        # Not a function of its own: an interrupt may come between its call and its first line.
        try:
            _put(model, before)
        except BaseException:
            _put(model, before)
            raise


def check_forwards(model: PreTrainedModel) -> None:
    """Refuses a model in which somebody else's forward stands where an encoding is to be placed, or placed again.

    Raises:
        UnsupportedError: with the name of the module.
    """
    for stack in find_stacks(model):
        sites: list[FoundAttention | FoundModule] = [*stack.attentions, *stack.rotaries, *stack.tables]
        for found in sites:
            refuse_foreign_forward(found.module, f"{stack.path}.{found.path}".lstrip("."))


def _put(model: PreTrainedModel, encoding: PositionEncoding | None) -> None:
    """Takes out what a model has, whole or in part, and puts the encoding in; it may be called again to finish."""
    drop_kept_pages(model)
    for found in encodings(model):
        uninstall(found)
    if encoding is not None:
        install(encoding, model)
