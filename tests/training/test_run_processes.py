"""Runs in other processes: killed and resumed, two at once, and sharded."""

from __future__ import annotations

import json
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc  # noqa: F401
from tests.training.run_cases import (
    CONFIGS,
    REPOSITORY,
    SIZES,
    curve,
    launch,
    refused,
    results,
    run,
    start_two,
    words,
)
from tests.versions import since


@pytest.mark.long
@pytest.mark.parametrize("causal", [pytest.param(True, marks=pytest.mark.slow), False], ids=["clm", "mlm"])
def test_a_killed_run_resumes_to_the_identical_curve(causal: bool, texts: Path, tmp_path: Path) -> None:
    """Killed as soon as its second checkpoint appears, whole or not; with dropout and accumulated batches."""
    options: dict[str, Any] = {
        "scheme": "kerple" if causal else "t5", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
        "max_steps": 40, "save_steps": 4, "save_total_limit": 3, "logging_steps": 3, "eval_strategy": "steps",
        "eval_steps": 10,
    }  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(words(texts, whole, causal, **options), causal) == 0
    process = get_context("forkserver").Process(target=run, args=(words(texts, killed, causal, **options), causal))
    process.start()
    while not (killed / "checkpoint-8").exists():
        assert process.is_alive(), "ended before its second checkpoint"
        time.sleep(0.005)
    process.kill()
    process.join()
    assert not (killed / "all_results.json").exists()
    assert run(words(texts, killed, causal, **options), causal) == 0
    assert curve(killed) == curve(whole)
    first, second = load_file(whole / "model.safetensors"), load_file(killed / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def close(first: list[dict[str, float]], second: list[dict[str, float]]) -> None:
    """The same figures up to sums in another order, which training amplifies."""
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        for name in ("loss", "eval_loss", "grad_norm", "train_loss"):
            if name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-4), (name, ours, theirs)


@pytest.mark.long
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["clm", "mlm"])
def test_two_processes_are_one(causal: bool, texts: Path, tmp_path: Path) -> None:
    """Same global batch, no dropout (which each process draws for itself), more than one epoch; one is resumed, too."""
    sizes = json.dumps(SIZES | ({} if causal else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    common: dict[str, Any] = {
        "scheme": "kerple" if causal else "t5", "config_overrides": sizes, "block_size": 64, "eval_strategy": "steps",
        "eval_steps": 6, "per_device_eval_batch_size": 3, "max_steps": 16, "save_steps": 13,
    }  # fmt: skip
    alone = tmp_path / "alone"
    assert run(words(texts, alone, causal, per_device_train_batch_size=16, **common), causal) == 0
    assert curve(alone)[-1]["epoch"] > 1
    script = REPOSITORY / "training" / ("run_clm.py" if causal else "run_mlm.py")
    # The launcher's config alone says that they use the CPU.
    accumulated: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "use_cpu": None}
    both = words(texts, tmp_path / "both", causal, **accumulated, **common)
    again = start_two if causal else partial(launch, CONFIGS / "ddp_cpu.yaml")
    again(script, both)
    close(curve(alone), curve(tmp_path / "both"))
    assert results(tmp_path / "both")["eval_loss"] == pytest.approx(results(alone)["eval_loss"], rel=1e-4)
    if not causal:
        return
    before = curve(tmp_path / "both")
    since("5.18", "the trainer cannot read an optimizer's state in several processes on CPUs")
    # Half a last checkpoint: the run goes on from step 13, which lies within its second epoch.
    (tmp_path / "both/checkpoint-16/rng_state_1.pth").unlink()
    said = again(script, both)
    assert "checkpoint-16, which cannot be resumed from: rng_state_1.pth is missing" in said
    assert "Resuming from" in said
    assert curve(tmp_path / "both") == before


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="with accelerators the two processes find each other")
def test_processes_that_do_not_find_each_other_are_refused(texts: Path, tmp_path: Path) -> None:
    arguments = words(texts, tmp_path / "out", max_steps=2, use_cpu="false")
    said = launch(CONFIGS / "ddp_cpu.yaml", REPOSITORY / "training/run_clm.py", arguments, fails=True)
    assert "2 processes were launched, but they did not form a group" in said
    assert not (tmp_path / "out").exists()


def test_a_run_of_two_processes_is_not_resumed_by_one(texts: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = words(texts, tmp_path / "out", max_steps=2)
    assert run(arguments) == 0
    settings = tmp_path / "out/run_settings.json"
    settings.write_text(settings.read_text().replace('"world_size": 1', '"world_size": 2'))
    assert "world_size was 2 and is now 1" in refused(capsys, run, arguments)


@pytest.mark.slow
def test_fsdp2_shards_and_gives_the_same_run(texts: Path, tmp_path: Path) -> None:
    config = tmp_path / "fsdp2_cpu.yaml"
    config.write_text((CONFIGS / "fsdp2.yaml").read_text().replace("use_cpu: false", "use_cpu: true"))
    common: dict[str, Any] = {
        "scheme": "kerple", "config_overrides": json.dumps(SIZES), "max_steps": 6, "save_steps": 4,
        "eval_strategy": "steps", "eval_steps": 3,
    }  # fmt: skip
    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    assert run(words(texts, alone, per_device_train_batch_size=8, **common)) == 0
    arguments = words(texts, sharded, per_device_train_batch_size=4, **common)
    script = REPOSITORY / "tests/training/fsdp_on_cpu.py"
    assert "sharded" in launch(config, script, arguments)
    close(curve(alone), curve(sharded))
    saved, expected = load_file(sharded / "model.safetensors"), load_file(alone / "model.safetensors")
    for name, value in expected.items():
        assert torch.allclose(saved[name], value, atol=1e-4), name
    model = AutoModelForCausalLM.from_pretrained(sharded)
    assert model.position_encoding.config.name == "kerple"
    assert len(AutoTokenizer.from_pretrained(sharded)) == model.config.vocab_size
    before = curve(sharded)
    (sharded / "checkpoint-6/trainer_state.json").unlink()
    assert "Resuming from" in launch(config, script, arguments)
    close(before, curve(sharded))


def test_fsdp_where_accelerate_would_not_shard_is_refused(
    texts: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "accelerate only shards on accelerators" in refused(capsys, run, words(texts, tmp_path / "out"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_accelerate_config_is_read(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.num_processes == (1 if path.stem == "one_process" else 2)
    assert config.use_cpu == path.stem.endswith("cpu")
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
