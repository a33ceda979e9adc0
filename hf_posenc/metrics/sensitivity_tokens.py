"""Words and sentences of the sensitivity test as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.language_modeling.windows import Frame, special_frame, token_stream
from hf_posenc.metrics.sensitivity_material import Material

#: How many words of each kind the sentences need.
_NEEDED = {"nouns": 3, "verbs": 1, "fillers": 2, "article": 1, "another": 1, "closing": 1}


@dataclass(frozen=True)
class TokenizedMaterial:
    """A `Material` as token ids, with the special tokens around a sentence; the passage is `(tokens,)` int64."""

    nouns: tuple[int, ...]
    verbs: tuple[int, ...]
    fillers: tuple[int, ...]
    article: int
    another: int
    closing: int
    passage: Tensor
    frame: Frame
    mask_token_id: int | None
    pad_token_id: int

    def sentences(self, words: list[list[int]]) -> Tensor:
        """`(sentences, length)` with special tokens, of sentences of equal length."""
        return self.frame.around(torch.tensor(words), targets=False)


def tokenize_material(tokenizer: Any, material: Material) -> TokenizedMaterial:
    """Looks up each word as it stands within a sentence, that is behind a space.

    Raises:
        MeasurementError: if too few of the words are one token.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, needed in _NEEDED.items():
        value = getattr(material, name)
        encoded = [tokenizer(" " + word, add_special_tokens=False)["input_ids"] for word in _words(value)]
        known = [ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id]
        found[name] = tuple(dict.fromkeys(known))
        if len(found[name]) < needed:
            raise MeasurementError(
                f"The tokenizer has {len(found[name])} of the {name} {value!r} as one token, and at least {needed} are "
                f"needed. Pass material=Material(...) with words of its language."
            )
    words: dict[str, Any] = {
        name: ids[0] if isinstance(getattr(material, name), str) else ids for name, ids in found.items()
    }
    return TokenizedMaterial(
        **words,
        passage=token_stream(tokenizer, [material.passage]),
        frame=special_frame(tokenizer, causal=False),
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id or 0,
    )


def _words(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
