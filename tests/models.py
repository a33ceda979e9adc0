"""The tiny random models of the tests, by the name of their class in transformers.

They have 2 layers of 4 heads with 8 numbers each, 96 words, 64 positions and no dropout. Options of the config say what
is different.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 96

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_STACK: dict[str, Any] = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
_ENCODER = _STACK | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BLOCKS: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("BertConfig", "RobertaConfig", "RoFormerConfig", "MPNetConfig"), _ENCODER),
    **dict.fromkeys(("GPTNeoXConfig", "ModernBertConfig", "PhiConfig"), _STACK),
    **dict.fromkeys(("GPT2Config", "GPTJConfig", "CTRLConfig", "CodeGenConfig"), _BLOCKS),
    **dict.fromkeys(("T5Config", "UMT5Config"), _T5),
    **dict.fromkeys(("BartConfig", "MarianConfig", "M2M100Config"), _BART),
    "WhisperConfig": _BART
    | {
        "vocab_size": 40,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 20,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "BloomConfig": {
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "OPTConfig": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
}


def tiny_config(name: str, **options: Any) -> Any:
    """The config of a class of models.

    Args:
        **options: fields of the config. Two query heads share a key head where there are key heads and none says how
            many.
    """
    kind = getattr(transformers, name).config_class
    sizes = _SIZES.get(kind.__name__, _STACK | {"num_key_value_heads": 2})
    return kind(**(sizes | options))


def tiny(name: str, **options: Any) -> Any:
    """A model of a class. Its weights are drawn from torch's generator."""
    return getattr(transformers, name)(tiny_config(name, **options))


def word_tokenizer(words: Iterable[str], **options: Any) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with one token for each word of a text. It adds no special tokens.

    Args:
        words: in the order of their ids, or a dictionary of ids. The first one stands for unknown words.
        **options: of the tokenizer.
    """
    ids = words if isinstance(words, dict) else {word: index for index, word in enumerate(words)}
    options = {"unk_token": next(iter(ids))} | options
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=options["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
