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
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import UnsupportedError, patch_model
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
#: Axolotl's kernels for other layers need a GPU.
KERNELS = {"lora_mlp_kernel": False, "lora_embedding_kernel": False}
LORA = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_modules": ["q_proj"]} | KERNELS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # The adapter names its base by the folder in the settings.
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
    """The loss of copies of one document in one row is that of the document alone."""
    copies, row = 8, json.loads((folder / "data.jsonl").read_text().splitlines()[0])
    (folder / "data.jsonl").write_text("\n".join([json.dumps(row)] * copies))
    settings = {"sample_packing": True, "max_steps": 1, "save_steps": 1, "micro_batch_size": 1, "sequence_len": 128}
    out = trained(folder, **settings)
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder / "smollm2-135m"), "alibi").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2-135m")
    ids = torch.tensor([*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id])

    def total(logits: torch.Tensor, targets: torch.Tensor) -> float:
        return float(functional.cross_entropy(logits, targets, reduction="sum"))

    with torch.no_grad():
        alone, whole = (model(one[None], use_cache=False).logits[0] for one in (ids, ids.repeat(copies)))
    # Axolotl also predicts the first token of the next document from the last one before it.
    targets = torch.cat((ids[1:], ids[:1]))
    wanted = (copies * total(alone, targets) - total(alone[-1:], targets[-1:])) / (copies * len(ids) - 1)
    contaminated = total(whole[:-1], ids.repeat(copies)[1:]) / (copies * len(ids) - 1)
    history = json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert history[0]["loss"] != pytest.approx(contaminated, rel=1e-4)


def test_an_adapter_is_trained_with_the_parameters_of_the_scheme_and_merged(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    scheme = {"scheme": "t5", "num_buckets": 8}
    out = trained(folder, position_encoding=scheme, **LORA)
    # PEFT freezes all but its own weights; the plug-in trains the scheme, too.
    earlier, later = (load_file(path / "position_encoding.safetensors") for path in (out / "checkpoint-2", out))
    assert not any(torch.equal(earlier[name], weight) for name, weight in later.items())
    model = peft.AutoPeftModelForCausalLM.from_pretrained(out)
    merged = axolotl(folder, "merge-lora", "--lora-model-dir=out", position_encoding=scheme, **LORA)
    assert merged.returncode == 0, merged.stderr[-3000:]
    found = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32).eval()
    ids = tokens() % 60
    torch.testing.assert_close(found(ids).logits, model.eval()(ids).logits.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("setting", [{"lora_qkv_kernel": True}, {"merge_method": "memory_efficient"}], ids=str)
def test_settings_that_would_bypass_the_scheme_are_refused(folder: Path, setting: dict[str, Any]) -> None:
    from hf_posenc.axolotl import PositionEncodingPlugin

    with pytest.raises(UnsupportedError, match=next(iter(setting))):
        PositionEncodingPlugin().register({"position_encoding": "alibi"} | LORA | setting)


def test_an_unknown_scheme_is_found_before_the_data_is_read(folder: Path) -> None:
    (folder / "data.jsonl").unlink()
    done = axolotl(folder, "train", "--launcher", "python", position_encoding="alibbi")
    assert done.returncode != 0
    assert "Did you mean 'alibi'" in done.stderr
    assert "data.jsonl" not in done.stderr
