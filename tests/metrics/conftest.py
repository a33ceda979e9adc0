from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("the", "dog", "chased", "another", "cat", "ran", "after", "a")


def build_word_tokenizer(words: tuple[str, ...] = WORDS) -> PreTrainedTokenizerFast:
    """One token per lower-case word, between [CLS] and [SEP]; unknown words are spelled with ##letters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*special, *words, *(letter for letter in letters if letter not in words)]
    tokens += ["##" + letter for letter in letters]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def build_byte_tokenizer(merged: tuple[str, ...] = ("dog",)) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges for words after a space only: " dog" is one token, "dog" at the start three."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for word in merged:
        piece = "Ġ"
        for letter in word:
            merges.append((piece, letter))
            piece += letter
            vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def word_tokenizer() -> PreTrainedTokenizerFast:
    return build_word_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[tuple[str, ...]], PreTrainedTokenizerFast]:
    return build_word_tokenizer


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return build_byte_tokenizer()


@pytest.fixture
def tiny_bert() -> Callable[..., torch.nn.Module]:
    from transformers import BertConfig, BertModel

    def build(**options: object) -> torch.nn.Module:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=80,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            initializer_range=0.2,
            **options,
        )
        return BertModel(config).eval()

    return build


@pytest.fixture
def tiny_llama() -> Callable[..., torch.nn.Module]:
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(**options: object) -> torch.nn.Module:
        torch.manual_seed(0)
        settings: dict = {
            "vocab_size": 80,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
        }
        return LlamaForCausalLM(LlamaConfig(**settings | options)).eval()

    return build
