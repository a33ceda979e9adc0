"""Which scheme runs where: every scheme of the table, exported from a tiny Llama and a tiny BERT to every target."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_posenc
from hf_posenc import PositionEncodingError
from tests.models import tiny
from tests.schemes.table import TABLE

#: Bytes, and some room for special tokens.
VOCABULARY = 288


@dataclass(frozen=True)
class Runtime:
    """A column of the page.

    Args:
        name: heading.
        target: value of `to=`.
        options: options of the target.
        mode: which of the measured differences it shows.
        of_checks: part of the name of the checked runtime, where an export is checked in two forms.
    """

    name: str
    target: str
    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)
    of_checks: str = ""


def llama() -> PreTrainedModel:
    return tiny("LlamaForCausalLM", vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2)


def bert() -> PreTrainedModel:
    return tiny("BertForMaskedLM", vocab_size=VOCABULARY)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"Llama": llama, "BERT": bert}
RUNTIMES: dict[str, tuple[Runtime, ...]] = {
    "Llama": (
        Runtime("transformers", "stock", "prefill"),
        Runtime("transformers, decode", "stock", "decode"),
    ),
    "BERT": (Runtime("transformers", "stock", "prefill"),),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with one merge, as GPT-2 splits texts."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokens = Tokenizer(models.BPE({token: place for place, token in enumerate(alphabet)}, [("t", "h")]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|endoftext|>")


def patched(model: str, scheme: str) -> PreTrainedModel:
    """A tiny model with the first variant of a scheme, whose parameters are large enough to matter."""
    torch.manual_seed(0)
    stock = MODELS[model]()
    with torch.no_grad():
        for weight in stock.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    hf_posenc.patch_model(stock, TABLE[scheme].variants[0])
    with torch.no_grad():
        for weight in stock.position_encoding.parameters():
            if weight.ndim == 2 and weight.std() < 0.1:
                weight.normal_(std=0.3)
    return stock.eval()


def outcome(model: str, scheme: str, target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`{"carrier": ..., "checks": [...]}` of an export, or `{"refused": reason}`. Any other error is raised."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given = patched(model, scheme)
        except PositionEncodingError as refusal:
            return {"refused": f"The model cannot be patched: {refusal}"}
        try:
            report = hf_posenc.export_model(given, Path(folder, "export"), to=target, tokenizer=tokenizer(), **options)
        except hf_posenc.UnsupportedError as refusal:
            return {"refused": str(refusal)}
        found = report.to_dict()
        return {"carrier": found["carrier"], "checks": found["checks"]}
