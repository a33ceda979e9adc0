"""The plug-in for axolotl: `axolotl train` on the YAML file of the page, from the command line to the saved model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import patch_model
from tests.checkpoint.checkpoint_cases import write_stock_llama
from tests.documentation.pages import saved_files
from tests.matrix.running import tokens

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("axolotl") is None,
    reason="axolotl is not installed; it needs an environment of its own: docs/how_to/train_with_other_tools.md",
)
ROOT = Path(__file__).resolve().parents[2]
#: What a tiny model on a CPU needs beside the page's settings.
SMALL = {"max_steps": 4, "save_steps": 2, "bf16": False, "attn_implementation": "sdpa", "lr_scheduler": "constant"}
LORA = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_modules": ["q_proj"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_stock_llama(tmp_path / "smollm2-135m")
    rows = [{"text": " ".join(f"word{(row + place) % 50}" for place in range(6 + row % 9))} for row in range(32)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def axolotl(folder: Path, command: str, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command of axolotl with the settings of the page and others."""
    page = yaml.safe_load(saved_files("train_with_other_tools")["axolotl.yml"])
    (folder / "axolotl.yml").write_text(yaml.safe_dump(page | SMALL | settings))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    program = [str(Path(sys.executable).parent / "axolotl"), command, "axolotl.yml", *words]
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)


def trained(folder: Path, **settings: Any) -> Path:
    done = axolotl(folder, "train", "--launcher", "python", **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / settings.get("output_dir", "out")


def test_a_model_is_trained_with_the_scheme_saved_and_resumed(folder: Path) -> None:
    whole = trained(folder)
    assert AutoModelForCausalLM.from_pretrained(whole).position_encoding.config.name == "alibi"
    resumed = trained(folder, output_dir="again", resume_from_checkpoint="out/checkpoint-2")
    first, second = (load_file(path / "model.safetensors") for path in (whole, resumed))
    assert first.keys() == second.keys()
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, msg=name)


def test_packed_documents_do_not_see_each_other(folder: Path) -> None:
    """The first loss of packed rows is that of the documents one by one."""
    settings = {"sample_packing": True, "max_steps": 1, "micro_batch_size": 1, "sequence_len": 512, "warmup_steps": 0}
    out = trained(folder, position_encoding={"scheme": "alibi"}, **settings)
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder / "smollm2-135m"), "alibi").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2-135m")
    losses = []
    for line in (folder / "data.jsonl").read_text().splitlines():
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]])
        logits = model(ids, use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    history = json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=2e-3)


def test_an_adapter_is_trained_with_the_parameters_of_the_scheme(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    out = trained(folder, position_encoding={"scheme": "t5", "num_buckets": 8}, **LORA)
    base = AutoModelForCausalLM.from_pretrained(folder / "smollm2-135m", position_encoding={"scheme": "t5", "num_buckets": 8})
    before = [parameter.detach().clone() for parameter in base.position_encoding.parameters()]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(out)
    after = list(model.get_base_model().position_encoding.parameters())
    assert before
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    merged = axolotl(folder, "merge-lora", "--lora-model-dir=out", position_encoding={"scheme": "t5", "num_buckets": 8}, **LORA)
    assert merged.returncode == 0, merged.stderr[-3000:]
    found = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32).eval()
    ids = tokens() % 60
    torch.testing.assert_close(found(ids).logits, model.eval()(ids).logits.float(), atol=1e-4, rtol=0)


def test_an_unknown_scheme_is_found_before_the_data_is_read(folder: Path) -> None:
    (folder / "data.jsonl").unlink()
    done = axolotl(folder, "train", "--launcher", "python", position_encoding="alibbi")
    assert done.returncode != 0
    assert "Did you mean 'alibi'" in done.stderr
    assert "data.jsonl" not in done.stderr
