"""Tiny models and tokenizers for exports to GGUF."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.models import tiny

VOCABULARY = 300


def tiny_llama(name: str = "LlamaForCausalLM", **options: Any) -> PreTrainedModel:
    """A model whose logits depend strongly on positions, with a vocabulary for `byte_tokenizer`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.1}
    model: PreTrainedModel = tiny(name, **(sizes | options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # Biases are zero and norms are one in a new model.
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def byte_tokenizer(split: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, some of them of digits.

    Args:
        split: how a text is split into words; GPT-2's rule by default.
        **options: of the tokenizer.
    """
    words = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        words[letter] = len(words)
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "d"),
        ("1", "2"),
        ("12", "3"),
        ("3", "4"),
        ("Ġ", "Ġ"),
        ("!", "!"),
        ("'", "L"),
    ]
    for first, second in merges:
        words[first + second] = len(words)
    backend = Tokenizer(models.BPE(words, merges))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options)
