"""The scheme with which the tokens of a cache were encoded, a note about the cache.

Keys of another scheme usually have the same shape, so nothing else shows that they do not suit.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache_notes import note_of, set_note
from hf_posenc.patching.call.caches import cached_length, self_attention_cache
from hf_posenc.schemes.config import SchemeConfig

_NAME = "_hf_posenc_scheme"


def mark_cache(cache: Any, scheme: SchemeConfig) -> None:
    """Notes the scheme of a cache, unless a graph is compiled."""
    if torch.compiler.is_compiling():
        return
    set_note(self_attention_cache(cache), _NAME, scheme)


def check_cached_scheme(cache: Any, scheme: SchemeConfig) -> None:
    """Refuses a cache whose tokens were encoded with another scheme. One without a mark is accepted.

    Raises:
        UnsupportedError: if the cache holds tokens of another scheme.
    """
    if torch.compiler.is_compiling():
        return
    known = note_of(self_attention_cache(cache), _NAME)
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
