"""Embeddings of exported encoders, beside those of the patched model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import hf_posenc
from hf_posenc.report import Record
from tests.kits.everywhere import text
from tests.kits.everywhere.decoders import CONTROL, ONNX
from tests.kits.everywhere.launch import run_script
from tests.kits.everywhere.models import loaded
from tests.kits.everywhere.plan import Plan, Variant


def run_encoder(source: Path, variant: Variant, onnx: Path, plan: Plan) -> list[Record]:
    """Embeds passages of the speech, as one padded batch, in transformers and in onnxruntime."""
    tokens = text.speech_tokens(source)
    with loaded(source, decoder=False) as model:
        # The stock model has a table of this length. What replaces it has no end.
        longest = max(plan.passages) if variant.scheme else model.config.max_position_embeddings
    lengths = [length for length in plan.passages if length <= longest]
    starts = np.linspace(0, len(tokens) - max(lengths), len(lengths)).astype(int)
    passages = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    records: list[Record] = []
    with loaded(source, decoder=False) as model:
        expected = embeddings(model, passages)
        if variant.scheme:
            native = [passage for passage in passages if len(passage) <= model.config.max_position_embeddings]
            stock = embeddings(hf_posenc.unpatch_model(model), native)
            records += _records(variant, CONTROL, expected[[passage in native for passage in passages]], stock, native)
    for program, file in ONNX.items():
        arrays, _ = run_script("in_onnxruntime.py", onnx / file, kind="embed", passages=passages)
        records += _records(variant, program, expected, arrays["embeddings"], passages)
    return records


@torch.no_grad()
def embeddings(model: Any, passages: list[list[int]]) -> np.ndarray:
    """Mean-pooled states of passages in one padded batch; unit vectors, `(passages, hidden)`."""
    rows = [torch.tensor(passage) for passage in passages]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    unit: np.ndarray = torch.nn.functional.normalize(pooled, dim=-1).numpy()
    return unit


def _records(
    variant: Variant, program: str, expected: np.ndarray, computed: np.ndarray, passages: list[list[int]]
) -> list[Record]:
    at, count = {"program": program}, len(passages)
    cosine = float((expected * computed).sum(-1).min())
    gap = float(np.abs(expected - computed).max())
    return [
        Record(variant.name, "embedding_difference", gap, at, count=count),
        Record(variant.name, "cosine", cosine, at, count=count, shown=f"{cosine:.6f}"),
        Record(variant.name, "longest", max(map(len, passages)), at, count=count),
    ]
