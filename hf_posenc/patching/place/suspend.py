"""Looking at the stock model underneath a patched one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from hf_posenc.patching.place.apply import unwrapped
from hf_posenc.patching.place.exchange import temporarily


@contextmanager
def suspended(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model without its scheme for the length of a `with` block; the scheme is back afterwards.

    Raises:
        UnsupportedError: if the scheme could not be put back, because somebody has wrapped the forward of a module.
    """
    target = unwrapped(model)
    with temporarily(target, None):
        yield target
