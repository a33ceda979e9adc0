"""Tiny models with a tokenizer in a folder, and a scheme registered by other code."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import BertTokenizer, ByT5Tokenizer

from hf_posenc import patch_model
from hf_posenc.metrics.sensitivity_material import ENGLISH
from hf_posenc.schemes import SchemeConfig, registry
from tests.models import tiny

#: The words of the tokenizers of `save_evaluated_models`.
EVALUATED_WORDS = (*ENGLISH.nouns, *ENGLISH.verbs, *ENGLISH.fillers, "the", "another", "today", "chased")


def save_tokenizer(folder, words=("the", "dog", "chased", "another", "cat"), mask="[MASK]"):
    """One token per lower-case word, between [CLS] and [SEP]."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    ids = {word: index for index, word in enumerate(vocabulary)}
    BertTokenizer(vocab=ids, mask_token=mask).save_pretrained(folder)


def save_evaluated_models(factory):
    """Folders of models and tokenizers. "bytes" is patched and reads bytes; "words" is a tokenizer without a mask."""
    torch.manual_seed(0)
    paths = {name: factory.mktemp(name) for name in ("bert", "headless", "llama", "bytes", "vit", "words")}
    sizes = {"vocab_size": 64, "initializer_range": 0.2}
    encoder = sizes | {"hidden_dropout_prob": 0.1}
    kinds = {
        "bert": ("BertForMaskedLM", encoder),
        "headless": ("BertModel", encoder),
        "llama": ("LlamaForCausalLM", sizes),
    }
    for name, (kind, options) in kinds.items():
        tiny(kind, **options).save_pretrained(paths[name])
        save_tokenizer(paths[name], EVALUATED_WORDS)
    save_tokenizer(paths["words"], EVALUATED_WORDS, mask=None)
    byte_level = {"vocab_size": 384, "num_hidden_layers": 1, "eos_token_id": 1, "initializer_range": 0.2}
    patch_model(tiny("LlamaForCausalLM", **byte_level), "alibi").save_pretrained(paths["bytes"])
    ByT5Tokenizer().save_pretrained(paths["bytes"])
    images = {"image_size": 32, "patch_size": 4, "num_labels": 10, "initializer_range": 0.2}
    tiny("ViTForImageClassification", **images).save_pretrained(paths["vit"])
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    tiny("BertForMaskedLM", vocab_size=16, max_position_embeddings=32, initializer_range=0.2).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"vocab_size": 16, "num_hidden_layers": 3, "max_position_embeddings": 32}
    tiny("LlamaForCausalLM", **sizes, initializer_range=0.2).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def third_party(monkeypatch):
    """A registered scheme that has no default options."""

    @dataclass(frozen=True)
    class ThirdParty(SchemeConfig):
        """A custom scheme."""

        name: ClassVar[str] = "third_party"
        strength: float

    monkeypatch.setitem(registry._SCHEMES, "third_party", ThirdParty)


@pytest.fixture
def typed_options(monkeypatch):
    """A registered custom scheme with options of every plain type, none of which it checks."""

    @dataclass(frozen=True)
    class TypedOptions(SchemeConfig):
        """Options of many types."""

        name: ClassVar[str] = "typed_options"
        strength: float | None = None
        rows: int = 4
        switch: bool = False
        word: str = "half"
        weights: tuple[float, ...] = ()

    monkeypatch.setitem(registry._SCHEMES, "typed_options", TypedOptions)
