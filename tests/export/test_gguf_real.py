"""Tiny files in a second program that contains llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import InterleavedConfig, NoneConfig, RopeConfig, ScheduleConfig, SchemeConfig, YarnScaling
from hf_posenc.export.comparison import random_ids
from hf_posenc.export.export_model import export_model
from tests.export.gguf_cases import byte_tokenizer, tiny_llama

pytest.importorskip("xllamacpp")
ROOT = Path(__file__).parents[2]
#: Folder in which `npm install node-llama-cpp` has been run.
NODE = os.environ.get("NODE_LLAMA_CPP", "")


@pytest.mark.slow
@pytest.mark.skipif(
    not (NODE and shutil.which("node")),
    reason="needs node and node-llama-cpp: run `npm install node-llama-cpp` in a folder, and set NODE_LLAMA_CPP to it",
)
@pytest.mark.parametrize(
    "scheme",
    [
        None,
        "none",
        "p_rope",
        "alibi",
        RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64)),
        InterleavedConfig(),
        ScheduleConfig((RopeConfig(), NoneConfig(), NoneConfig(), RopeConfig(), NoneConfig())),
    ],
    ids=str,
)
def test_a_second_program_gives_the_same_probabilities(scheme: SchemeConfig | str | None, tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=5)
    if scheme is not None:
        hf_posenc.patch_model(model, scheme)
    export_model(model, tmp_path / "out", to="gguf", tokenizer=byte_tokenizer())
    prompts = [random_ids(model, length)[0].tolist() for length in (2, 48, 200)]
    ran = subprocess.run(
        ["node", str(ROOT / "benchmarks" / "llama_cpp.mjs"), NODE, str(tmp_path / "out" / "model.gguf")],
        input=json.dumps(prompts), capture_output=True, text=True, check=True,
    )  # fmt: skip
    for prompt, found in zip(prompts, json.loads(ran.stdout), strict=True):
        expected = next_probabilities(model, prompt)
        probabilities = torch.tensor([found[str(token)] for token in range(len(expected))])
        # Its cache is float16, which rounds keys and values by up to 5e-4 of their value.
        assert (probabilities - expected).abs().max() < 1e-3 * expected.max()


@torch.no_grad()
def next_probabilities(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
