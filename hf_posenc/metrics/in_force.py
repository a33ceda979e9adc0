"""The position encoding that a model has at the moment, by name."""

from __future__ import annotations

from typing import Any

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching import native_scheme
from hf_posenc.patching.apply import current_encoding, unwrapped
from hf_posenc.schemes.labels import scheme_label


def scheme_in_force(model: Any) -> str:
    """The scheme of a patched model with its options, or `"native (rope)"` and the like for a stock one.

    `"native"` alone stands for a stock model whose position encoding is no scheme of this library.
    """
    encoding = current_encoding(unwrapped(model))
    if encoding is not None:
        return scheme_label(encoding.config)
    try:
        return f"native ({native_scheme(model).name})"
    except UnsupportedError:
        return "native"
