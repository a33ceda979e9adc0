"""Masks for masked language modelling, as a function of seed, epoch and row alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from training.errors import SettingsError


class RowMasking:
    """Masks one row as BERT does (arXiv:1810.04805, section 3.1): of the targets 80 % are shown as the mask token, 10 %
    as a random token, 10 % as they are.

    The masks of a row are the same on any number of processes and workers, and after a run was resumed; they are
    others in every epoch.

    Args:
        tokenizer: whose mask token is shown; its special tokens are never targets.
        mlm_probability: share of the tokens that become targets.
        seed: of the masks; `stream` tells those of several datasets apart.

    Raises:
        SettingsError: if the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int, stream: int = 0) -> None:
        if tokenizer.mask_token is None:
            raise SettingsError(
                f"{type(tokenizer).__name__} has no mask token, so nothing can be masked. Use the tokenizer of a "
                "masked language model (--tokenizer_name), or --tokenizer_name bytes."
            )
        self.seed, self.stream = seed, stream
        self._mask = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=mlm_probability)
        self._mask.generator = torch.Generator()
        self._special = torch.tensor(sorted(set(tokenizer.all_special_ids)))

    def __call__(self, tokens: Tensor, epoch: int, row: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a row, each `(length,)`."""
        state = np.random.SeedSequence([self.seed, self.stream, epoch, row]).generate_state(1, np.uint64)
        self._mask.generator.manual_seed(int(state[0] >> np.uint64(1)))
        inputs, labels = self._mask.torch_mask_tokens(tokens[None].clone(), torch.isin(tokens, self._special)[None])
        return inputs[0], labels[0]
