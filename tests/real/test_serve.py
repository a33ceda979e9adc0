"""`hf-posenc serve` with SmolLM2, as on its how-to page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc

pytest.importorskip("openai")
pytest.importorskip("fastapi")

from tests.serving.chats import chat, client, expected, free_port, wait_for

YARN = {
    "scheme": "rope", "theta": 100000.0, "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 8192}
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.parametrize("scheme", ["alibi", YARN], ids=["alibi", "yarn"])
def test_hf_posenc_serve_streams_smollm2(scheme: Any, smollm2_folder: Path, tmp_path: Path) -> None:
    coder = AutoTokenizer.from_pretrained(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    hf_posenc.patch_model(model, scheme).save_pretrained(tmp_path)
    coder.save_pretrained(tmp_path)
    port = free_port()
    command = [sys.executable, "-m", "hf_posenc", "serve", str(tmp_path), "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        wait_for(f"http://127.0.0.1:{port}", 120)
        for text in ("What is the capital of France?", "Name three colours."):
            messages = [{"role": "user", "content": text}]
            found = chat(client(port), tmp_path, messages, new_tokens=24)
            assert found == expected(model, coder, messages, new_tokens=24)
            assert found
    finally:
        process.terminate()
        process.wait(timeout=30)
