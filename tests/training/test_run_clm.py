"""run_clm from its command line: what it writes, what it reloads as, and how it stops."""

from __future__ import annotations

import copy
import errno
import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    set_seed,
)

import hf_posenc
from tests.thinning import mostly_slow
from tests.training.run_cases import SIZES, curve, losses, results, run, trained_on, words

#: Renamed within the supported range of transformers.
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)


def test_a_run_learns_and_writes_its_figures(alibi: Path) -> None:
    figures, logged = results(alibi), losses(alibi)
    assert len(logged) == 12
    assert logged[-1] < logged[0] - 1
    assert figures["eval_perplexity"] == pytest.approx(math.exp(figures["eval_loss"]))
    assert figures["eval_loss"] < logged[0] - 1
    assert [entry["eval_loss"] for entry in curve(alibi) if "eval_loss" in entry][-1] == figures["eval_loss"]


def test_a_finished_run_is_not_trained_further(alibi: Path, texts: Path, capsys: Any) -> None:
    before, weights = curve(alibi), (alibi / "model.safetensors").read_bytes()
    assert run(words(texts, alibi, scheme="alibi", eval_strategy="steps", eval_steps=6)) == 0
    assert "Resuming from" in capsys.readouterr().err
    assert curve(alibi)[:-1] == before[:-1]
    assert (alibi / "model.safetensors").read_bytes() == weights


def test_the_control_is_the_stock_model(texts: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert run(words(texts, tmp_path / "out", max_steps=2, use_cpu=None, eval_strategy="epoch")) == 0
    assert [str(warning.message) for warning in recwarn if not issubclass(warning.category, DeprecationWarning)] == []
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


def test_a_patched_folder_is_trained_on(alibi: Path, texts: Path, tmp_path: Path) -> None:
    rope = {"scheme": "rope", "scheme_options": '{"theta": 5e5}'}
    schemes: dict[str, Any] = {}
    for name, options in (("on", {}), ("swap", rope)):
        assert run(words(texts, tmp_path / name, max_steps=1, **trained_on(alibi), **options)) == 0
        schemes[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name).position_encoding.config
    assert schemes == {"on": hf_posenc.AlibiConfig(), "swap": hf_posenc.RopeConfig(theta=5e5)}
    assert curve(tmp_path / "on")[0]["loss"] < curve(alibi)[0]["loss"] - 1


def test_settings_from_a_file_several_schemes_and_other_text(tmp_path: Path) -> None:
    rows = [{"body": f"number {number} " * 30} for number in range(6)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows[:1]).to_parquet(str(tmp_path / "held.parquet"))
    settings = f"""
model_type: llama
config_overrides: {json.dumps(SIZES)}
tokenizer_name: bytes
dataset_name: {tmp_path / "train.jsonl"}
text_column: body
validation_file: {tmp_path / "held.parquet"}
packing: concatenate
output_dir: {tmp_path / "out"}
scheme: [{{scheme: rope, theta: 5e5}}, kerple]
scheme_layers: "1"
elsewhere: none
block_size: 32
learning_rate: 1e-3
max_steps: 9
report_to: [none]
disable_tqdm: true
use_cpu: true
"""
    path = tmp_path / "settings.yaml"
    path.write_text(settings, encoding="utf-8")
    assert run([str(path), "--max_steps", "2"]) == 0
    recorded = json.loads((tmp_path / "out/run_settings.json").read_text())
    assert (recorded["max_steps"], recorded["learning_rate"]) == (2, 1e-3)
    first, second = AutoModelForCausalLM.from_pretrained(tmp_path / "out").position_encoding.config.layers
    assert (first, second.parts[0]) == (hf_posenc.NoneConfig(), hf_posenc.RopeConfig(theta=5e5))
    assert results(tmp_path / "out")["eval_rows"] == (len("number 0 " * 30) + 1) // 32


#: Parameters in each layer, and no scheme; a scheme with a network of its own is trained by the same code.
@pytest.mark.parametrize("scheme", mostly_slow(["kerple", "fire", None], lambda scheme: scheme != "fire"), ids=str)
def test_lora_trains_resumes_and_merges(
    texts: Path, tmp_path: Path, scheme: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    from peft import PeftModel

    set_seed(5)
    sizes = SIZES | {"vocab_size": 384, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {
        "model_type": None, "config_overrides": None, "model_name_or_path": tmp_path / "base", "scheme": scheme,
        "lora": "true", "lora_dropout": 0.1, "max_steps": 8, "save_steps": 4,
    }  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(words(texts, whole, **options)) == 0
    assert [str(warning.message) for warning in recwarn if issubclass(warning.category, FutureWarning)] == []
    assert run(words(texts, cut, **options)) == 0
    for path in (cut / "checkpoint-8", cut / "adapter"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    (cut / "all_results.json").unlink()
    assert run(words(texts, cut, **options)) == 0
    assert curve(cut) == curve(whole)
    assert results(cut)["eval_loss"] == results(whole)["eval_loss"]

    merged = AutoModelForCausalLM.from_pretrained(whole).eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if scheme is not None:
        assert merged.position_encoding.config.name == scheme
        fresh = hf_posenc.patch_model(copy.deepcopy(base), scheme).position_encoding.named_parameters()
        trained = dict(merged.position_encoding.named_parameters())
        assert any(not torch.equal(value, trained[name]) for name, value in fresh)
    adapted = PeftModel.from_pretrained(base, whole / "adapter").eval()
    tokens = torch.arange(3, 35)[None]
    difference = (merged(input_ids=tokens).logits - adapted(input_ids=tokens).logits).abs().max()
    assert difference < 1e-5  # adding the correction to the weights rounds


def test_the_best_checkpoint_is_what_a_run_ends_with(texts: Path, tmp_path: Path) -> None:
    """Highest loss counts as best here, so that the best checkpoint is not the last."""
    arguments = words(
        texts, tmp_path / "out", load_best_model_at_end="true", eval_strategy="steps", eval_steps=2, save_steps=2,
        save_total_limit=2, greater_is_better="true", metric_for_best_model="eval_loss", max_steps=6, scheme="t5",
    )  # fmt: skip
    assert run(arguments) == 0
    evaluated = [entry["eval_loss"] for entry in curve(tmp_path / "out") if "eval_loss" in entry]
    assert max(evaluated) > evaluated[2] + 0.1
    assert results(tmp_path / "out")["eval_loss"] == max(evaluated)


def test_mixed_precision_and_checkpointing_change_little(texts: Path, tmp_path: Path) -> None:
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {}, "checkpointed": {CHECKPOINTING: "true"}, "bf16": {"bf16": "true"},
    }  # fmt: skip
    for name, options in ways.items():
        output = tmp_path / name
        plain = json.dumps(SIZES)
        assert run(words(texts, output, scheme="kerple", max_steps=3, config_overrides=plain, **options)) == 0
        found[name] = losses(output)
    assert found["checkpointed"] == pytest.approx(found["plain"], rel=1e-6)
    # bfloat16 has 8 bits: each logit is off by up to 0.4 %.
    assert found["bf16"] == pytest.approx(found["plain"], rel=1e-2)
    assert found["bf16"] != found["plain"]


def test_a_pretrained_model_is_led_to_another_scheme(alibi: Path, texts: Path, tmp_path: Path) -> None:
    """From ALiBi, whose biases a learned T5 table can start at, with the model before as its teacher."""
    options = trained_on(alibi) | {"scheme": "t5", "max_steps": 4, "learning_rate": 1e-4}
    ways: dict[str, dict[str, Any]] = {
        "plain": {}, "fitted": {"initialization": "fitted"},
        "led": {"initialization": "fitted", "gradual_steps": 3, "distill": "true"},
    }  # fmt: skip
    first = {}
    for name, way in ways.items():
        assert run(words(texts, tmp_path / name, **(options | way))) == 0
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).position_encoding.config.name == "t5"
        first[name] = losses(tmp_path / name)[0]
    assert first["fitted"] != first["plain"]
    assert first["led"] != first["fitted"]
    recorded = json.loads((tmp_path / "led/run_settings.json").read_text())
    assert (recorded["healing.gradual_steps"], recorded["healing.distill"]) == (3, True)
    assert "healing.distill" not in json.loads((tmp_path / "plain/run_settings.json").read_text())


@pytest.mark.parametrize("file", ["run_settings.json", "trainer_state.json", "all_results.json"])
def test_a_disk_that_is_full_beside_the_checkpoints(
    file: str, texts: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """The small files of a run: none is left incomplete, and the same command completes the run."""
    output, write = tmp_path / "out", Path.write_text
    arguments = words(texts, output, max_steps=2, save_steps=2)

    def fail(path: Path, text: str, *rest: Any, **more: Any) -> int:
        if path.name.startswith(file):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, text, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        if file == "trainer_state.json":
            patch.setattr("training.trainer.SchemeTrainer.save_state", lambda self: fail(output / file, ""))
        assert run(arguments) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "run the same command again" in said
    assert not (output / "all_results.json").exists()
    assert run(arguments) == 0
    assert results(output)["eval_loss"] > 0


def test_starting_anew(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run(words(texts, output, max_steps=2, seed=1)) == 0
    assert run(words(texts, output, max_steps=3, seed=2, overwrite_output_dir="true")) == 0
    assert json.loads((output / "run_settings.json").read_text())["seed"] == 2
    assert not (output / "checkpoint-2").exists()
    assert run(words(texts, output, max_steps=3, seed=2, resume_from_checkpoint=output / "checkpoint-2")) == 2


def test_nan_stops_the_run_with_status_1(texts: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(words(texts, tmp_path / "out", learning_rate=1e30, max_grad_norm=0, save_steps=1, max_steps=6)) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in ("run_clm: ", "step", "--learning_rate"))
    assert not (tmp_path / "out/model.safetensors").exists()
