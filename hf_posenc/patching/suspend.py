"""Looking at the stock model underneath a patched one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from hf_posenc.patching.apply import current_encoding, install, uninstall, unwrapped


@contextmanager
def suspended(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model without its scheme for the length of a `with` block; the scheme is back afterwards."""
    target = unwrapped(model)
    encoding = current_encoding(target)
    if encoding is None:
        yield target
        return
    uninstall(encoding)
    try:
        yield target
    finally:
        install(encoding, target)
