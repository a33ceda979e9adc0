"""The models and tokenizers that the tools are given, and what their results are compared with."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.matrix.running import patched, tokens
from tests.models import VOCABULARY, word_tokenizer

#: float32 sums in another order, over two layers.
TOLERANCE = 1e-4
NEW_TOKENS = 6


def llama(scheme: Any, **overrides: Any) -> Any:
    """A tiny random Llama with grouped heads; `None` leaves it stock."""
    return _named(patched("llama_gqa", scheme, **overrides))


def bert(scheme: Any, **overrides: Any) -> Any:
    """A tiny random BERT with a language modelling head; `None` leaves it stock."""
    return _named(patched("bert", scheme, **overrides))


def _named(model: Any) -> Any:
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        model.generation_config.bos_token_id = 1
    return model


def tokenizer(padding_side: str = "left") -> PreTrainedTokenizerFast:
    """One word, `w5`, for each id of the tiny vocabulary."""
    special = ["[PAD]", "[BOS]", "[UNK]", "[MASK]", "[EOS]"]
    found = word_tokenizer(
        [*special, *(f"w{i}" for i in range(5, VOCABULARY))], pad_token="[PAD]", bos_token="[BOS]", unk_token="[UNK]",
        mask_token="[MASK]", eos_token="[EOS]", padding_side=padding_side,
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )  # fmt: skip
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A $B:1", special_tokens=[]
    )
    return found


def text(ids: Tensor) -> str:
    """The words of a row of ids."""
    return " ".join(f"w{index}" for index in ids.tolist())


@torch.no_grad()
def argmax_decoding(model: Any, prompt: Tensor, count: int = NEW_TOKENS) -> Tensor:
    """`(batch, length + count)`: the most likely continuation, every token from a whole forward without a cache."""
    ids = prompt
    for _ in range(count):
        logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    return ids


def left_padded(prompt: Tensor, padding: int = 3) -> dict[str, Tensor]:
    """The same rows behind `padding` tokens that the mask hides."""
    pad = torch.zeros(prompt.shape[0], padding, dtype=prompt.dtype)
    mask = torch.cat((pad, torch.ones_like(prompt)), dim=1)
    return {"input_ids": torch.cat((pad, prompt), dim=1), "attention_mask": mask}


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Compares relative to the largest output."""
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    assert difference <= tolerance, f"the outputs differ by {difference:.3g}"


def assert_same_tokens(found: Tensor, expected: Tensor) -> None:
    """Compares generated ids."""
    assert torch.equal(found, expected), f"generated {found.tolist()}, expected {expected.tolist()}"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder to save to."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@contextlib.contextmanager
def saved(model: Any, padding_side: str = "left") -> Iterator[str]:
    """A folder with the model and the tokenizer."""
    with folder() as path:
        model.save_pretrained(path)
        tokenizer(padding_side).save_pretrained(path)
        yield os.fspath(path)


__all__ = [
    "NEW_TOKENS", "TOLERANCE", "VOCABULARY", "argmax_decoding", "assert_close", "assert_same_tokens", "bert", "folder",
    "left_padded", "llama", "saved", "text", "tokenizer", "tokens",
]  # fmt: skip
