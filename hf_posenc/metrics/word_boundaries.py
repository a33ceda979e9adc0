"""Where words begin, in the vocabulary of a tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SPACE_MARKS = ("Ġ", "▁", " ")
#: Byte-level BPE writes the bytes 0 to 32 and 127, spaces and control characters all, as the letters from here to here.
_BYTE_LEVEL_SPACES = ("\u0100", "\u0121")


def continues_word(tokenizer: Any, vocabulary: int) -> Tensor:
    """Which tokens go on with the word before them; the others begin a word, are punctuation, or end the text.

    Args:
        tokenizer: any transformers tokenizer. WordPiece marks the tokens that continue (`##s`), byte-level BPE and
            SentencePiece those that begin (`Ġthe`, `▁the`); with bytes or characters every letter continues.
        vocabulary: how many logits the model has; those without a token continue nothing.

    Returns:
        `(vocabulary,)` bool.
    """
    size = min(vocabulary, len(tokenizer))
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    wordpiece = any(token is not None and token.startswith("##") and len(token) > 2 for token in tokens) and not any(
        token is not None and token.startswith(_SPACE_MARKS[:2]) for token in tokens
    )
    byte_level = any(token is not None and token.startswith("Ġ") for token in tokens)
    first, last = _BYTE_LEVEL_SPACES
    flags = torch.zeros(vocabulary, dtype=torch.bool)
    for index, token in enumerate(tokens):
        if token is None or index in special:
            continue
        if wordpiece:
            flags[index] = token.startswith("##") and len(token) > 2
        else:
            space = token.startswith(_SPACE_MARKS) or (byte_level and first <= token[:1] <= last)
            flags[index] = not space and token[:1].isalnum()
    return flags
