from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from tests.models import tiny

WORDS = ("the", "dog", "chased", "another", "cat", "ran", "after", "a")
TEXT = ["the dog chased another cat after a dog ran " * 20]


def build_word_tokenizer(words: tuple[str, ...] = WORDS) -> BertTokenizer:
    """One token per lower-case word, between [CLS] and [SEP]; unknown words are spelled with ##letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words, *(letter for letter in letters if letter not in words)]
    tokens += ["##" + letter for letter in letters]
    return BertTokenizer(vocab={token: index for index, token in enumerate(tokens)}, mask_token=None)


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


@pytest.fixture
def word_tokenizer() -> BertTokenizer:
    return build_word_tokenizer()


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return build_byte_tokenizer()


SIZES = {"vocab_size": 80, "num_hidden_layers": 3, "intermediate_size": 64, "initializer_range": 0.2}


def build(name: str, **options: object) -> torch.nn.Module:
    """A model with the same weights every time, large enough that its positions are seen."""
    torch.manual_seed(0)
    return tiny(name, **SIZES | options).eval()


@pytest.fixture
def tiny_bert() -> Callable[..., torch.nn.Module]:
    return partial(build, "BertModel")


@pytest.fixture
def tiny_llama() -> Callable[..., torch.nn.Module]:
    return partial(build, "LlamaForCausalLM")


def train(model: torch.nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> torch.nn.Module:
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-3)
    model.train()
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def fingerprint(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list, list, str]:
    """Everything that a measurement must leave alone."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [(name, module.training) for name, module in model.named_modules()],
        [(name, parameter.requires_grad, parameter.dtype) for name, parameter in model.named_parameters()],
        model.config.to_json_string(),
    )


def assert_same(before: tuple, after: tuple) -> None:
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """`evaluate.load` of an evaluation, offline and with caches of its own."""
    import evaluate

    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    module = Path(__file__).parents[2] / "eval" / "position_encoding"
    return lambda name: evaluate.load(str(module), name, cache_dir=str(tmp_path / "cache"))
