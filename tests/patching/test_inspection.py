"""Descriptions of a model: its native scheme, the report of a patch, and `inspect_model`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_posenc
from hf_posenc import (
    NoneConfig,
    ScheduleConfig,
    native_scheme,
    patch_model,
)
from hf_posenc.patching import Architecture, register_architecture
from tests.matrix.running import distance, outputs, patched, tokens


@torch.no_grad()
def test_layers_keep_their_native_scheme_elsewhere() -> None:
    model = patched("llama_gqa", None)
    native = native_scheme(model)
    patch_model(model, "none", layers=[1])
    assert model.position_encoding.config == ScheduleConfig(layers=(native, NoneConfig()))
    mixed, stock = outputs(model, tokens()), outputs(patched("llama_gqa", None), tokens())
    assert distance(mixed, outputs(patched("llama_gqa", "none"), tokens())) > 1e-3
    assert distance(mixed, stock) > 1e-3
    patch_model(model, native, layers=[1])
    assert distance(outputs(model, tokens()), stock) <= 2e-5


def test_the_report_and_an_inspection_name_the_scheme_and_what_it_replaced() -> None:
    model = patched("bert", "alibi")
    report = model.position_encoding.report
    text = str(report)
    assert "position table" in text
    # One line for all layers.
    assert "placed: logit_bias: encoder.layer.0-1.attention.self\n" in f"{text}\n"
    assert report.to_dict()["stacks"][0]["attention_layers"] == [0, 1]
    assert "alibi" in repr(model).lower()
    inspected = str(hf_posenc.inspect_model(model))
    assert "patched with: alibi\n" in inspected
    assert "native scheme: learned(num_positions=" in inspected


def test_a_declared_table_and_direction_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posenc.patching.anatomy.architectures import declaration

    monkeypatch.setattr(declaration, "_ARCHITECTURES", dict(declaration._ARCHITECTURES))
    model = patched("bert", None)
    model.bert.embeddings.add_module("pos", nn.Embedding(64, 32))
    register_architecture("bert", architecture=Architecture(tables=("embeddings.pos",), causal=True))
    assert any("embeddings.pos " in table for table in hf_posenc.inspect_model(model).stacks[0].tables)
    assert hf_posenc.inspect_model(model).stacks[0].causal
