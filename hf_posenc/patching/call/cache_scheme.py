"""The scheme with which the tokens of a cache were encoded, stored on the cache object.

Keys of another scheme usually have the same shape, so nothing else shows that they do not suit.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.caches import cached_length, self_attention_cache
from hf_posenc.schemes.config import SchemeConfig

_NAME = "_hf_posenc_scheme"


def mark_cache(cache: Any, scheme: SchemeConfig) -> None:
    """Stores the scheme on a cache, unless its type does not allow attributes, or a graph is compiled."""
    if torch.compiler.is_compiling():
        return
    keeper = self_attention_cache(cache)
    if getattr(keeper, "__dict__", None) is not None:
        setattr(keeper, _NAME, scheme)


def check_cached_scheme(cache: Any, scheme: SchemeConfig) -> None:
    """Refuses a cache whose tokens were encoded with another scheme. One without a mark is accepted.

    Raises:
        UnsupportedError: if the cache holds tokens of another scheme.
    """
    if torch.compiler.is_compiling():
        return
    known = getattr(self_attention_cache(cache), _NAME, None)
    if known is None or known is scheme or known == scheme:
        return
    # A static cache is emptied and used again. Its length is read only here, because that waits for a GPU.
    length = cached_length(cache)
    if length is not None and int(length) > 0:
        raise UnsupportedError(
            f"The cache holds {int(length)} tokens that were encoded with {known.name!r}, and this model now has "
            f"{scheme.name!r}{' with other options' if known.name == scheme.name else ''}. Their keys do not suit it. "
            "Start with a new cache."
        )
