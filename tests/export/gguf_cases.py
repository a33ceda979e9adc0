"""Tiny models and tokenizers for exports to GGUF."""

from __future__ import annotations

import struct
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedModel, PreTrainedTokenizerFast, T5Tokenizer

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


def tiny_encoder(name: str, **options: Any) -> PreTrainedModel:
    """A BERT or T5 with large weights and, in a T5, a strong bias, so that wrong positions are far above rounding."""
    torch.manual_seed(0)
    model: PreTrainedModel = tiny(name, vocab_size=VOCABULARY, **({"max_position_embeddings": 256} | options)).eval()
    return with_strong_weights(model)


def with_strong_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Draws all weights of a model, and of its scheme, from a wide distribution."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            wide = "relative" in name or "position" in name
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * (1.0 if wide else 0.2) + (weight if weight.ndim == 1 and not wide else 0.0))
    return model


#: Nodes of the map of characters below, as SentencePiece builds it (a double array; all others are empty).
_NODES = {
    0: 8192, 1: 2313, 2: 1290, 3: 2147483648, 4: 7584, 5: 6413, 6: 133248, 7: 4483, 8: 2433, 9: 131244,
    10: 2147483650, 202: 112834, 231: 67823, 234: 110818,
}  # fmt: skip


def charsmap() -> bytes:
    """Tab, line breaks, U+00A0 and U+2003 become spaces, and the ligature of f and i two letters."""
    nodes = struct.pack("<256I", *(_NODES.get(place, 0) for place in range(256)))
    return struct.pack("<I", len(nodes)) + nodes + b" \0fi\0"


def unigram_tokenizer(normalized: bool = True) -> Any:
    """A T5 tokenizer with a few pieces.

    Args:
        normalized: whether it has a map of characters.
    """
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁d", -3.5), ("og", -3.2)]
    pieces += [("the", -4.1), ("12", -4.0), ("fi", -4.5)]
    pieces += [(letter, -5.0 - place / 50) for place, letter in enumerate("abcdefghijklmnopqrstuvwxyzDITMCH0123.,'!?")]
    pieces += [("<extra_id_1>", 0.0), ("<extra_id_0>", 0.0)]
    return T5Tokenizer(vocab=pieces, extra_ids=2, _spm_precompiled_charsmap=charsmap() if normalized else None)


def word_piece_tokenizer(words: str = "", **options: Any) -> Any:
    """A BERT tokenizer with a few pieces.

    Args:
        words: more pieces, separated by spaces.
        **options: of the tokenizer.
    """
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] the dog do ##g ##s a b ##c ! ? . 1 ##2 é e 日 a b ##a ##b The"
    found = dict.fromkeys([*pieces.split(), *words.split()])
    return BertTokenizer(vocab={piece: place for place, piece in enumerate(found)}, **options)
