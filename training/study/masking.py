"""Masks for masked language modelling that depend on the row alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase


class MaskingCollator:
    """Masks each window by the seed and its place in the order, and by nothing else.

    The masks are therefore the same for every scheme, on any number of processes, and after a run was resumed.

    Args:
        tokenizer: whose mask token is shown.
        mlm_probability: share of the tokens that become targets.
        seed: of the masks.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int) -> None:
        self.seed = seed
        self.mask = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=mlm_probability)
        self.mask.generator = torch.Generator()

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each `(batch, length)`; rows that have labels are masked already."""
        if "labels" in items[0]:
            return default_collate(items)
        rows = [self._masked(item["input_ids"], item["place"]) for item in items]
        return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels")}

    def _masked(self, window: Tensor, place: int) -> dict[str, Tensor]:
        self.mask.generator.manual_seed(self.seed * 1_000_003 + place + 1)
        masked: dict[str, Tensor] = dict(self.mask([window]))
        return masked
