"""A stock checkpoint with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.checkpoint.checkpoint_cases import VOCABULARY, llama, randomize


def write_stock_llama(folder: Path) -> Path:
    """A Llama with random weights, and words `word3` to `word63` for its tokens."""
    torch.manual_seed(0)
    randomize(llama()).save_pretrained(folder)
    words = {"[UNK]": 0, "[PAD]": 1, "[END]": 2} | {f"word{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", eos_token="[END]")
    fast.save_pretrained(folder)
    return folder
