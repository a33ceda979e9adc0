"""Small texts, and command lines of runs over them that take seconds."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import run_together
from tests.processes import free_port
from tests.training.trainer_cases import without_clocks
from training import run_clm, run_mlm

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "training/accelerate"
SENTENCE = "the ship left harbour before dawn nobody saw letter captain far beyond evening wind turned mood town winter"
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip


def write_texts(folder: Path, documents: int = 8) -> Path:
    """Files of 100 to 200 words."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    for number in range(documents):
        (folder / f"{number}.txt").write_text(
            " ".join(drawn.choices(SENTENCE.split(), k=100 + 15 * number)), encoding="utf-8"
        )
    return folder


def words(texts: Path, output: Path, causal: bool = True, **changes: Any) -> list[str]:
    """A command line; an option changed to `None` is left out."""
    options: dict[str, Any] = {
        "model_type": "llama" if causal else "bert",
        "config_overrides": json.dumps(SIZES | ({"attention_dropout": 0.1} if causal else {})),
        "tokenizer_name": "bytes",
        "dataset_name": texts,
        "output_dir": output,
        "block_size": 32,
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 5,
        "disable_tqdm": "true",
        "use_cpu": "true",
    } | changes  # fmt: skip
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def trained_on(model: Path) -> dict[str, Any]:
    """Options of a run that begins with a pretrained model and its tokenizer."""
    return {"model_type": None, "config_overrides": None, "tokenizer_name": None, "model_name_or_path": model}


def run(arguments: list[str], causal: bool = True) -> int:
    """In this process."""
    return (run_clm if causal else run_mlm).main(arguments)


def refused(capsys: Any, main: Callable[[list[str]], int], arguments: list[str], status: int = 2) -> str:
    """What a command says that ends with a status."""
    assert main(arguments) == status
    return capsys.readouterr().err


def environment() -> dict[str, str]:
    """For another process: one thread, no hub."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}


def launch(config: Path, script: Path, arguments: list[str], fails: bool = False) -> str:
    """`accelerate launch` on a free port; returns what was said."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port",
        str(free_port()), str(script), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done.stdout + done.stderr


def start_two(script: Path, arguments: list[str]) -> str:
    """Two processes with the variables that `accelerate launch` sets, in a fraction of its time; what they said."""
    common = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    ranks = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    both = run_together(program, script, *arguments, environments=ranks)
    assert [done.returncode for done in both] == [0, 0], both[0].stderr[-3000:] + both[1].stderr[-3000:]
    return "".join(done.stdout + done.stderr for done in both)


def study_words(text: Path, output: Path, **changes: Any) -> list[str]:
    """Arguments of a comparison that takes seconds. An option changed to `None` is left out; mappings become JSON."""
    options: dict[str, Any] = {
        "dataset_name": text, "output_dir": output, "schemes": "none,alibi", "tasks": "causal", "max_steps": 2,
        "eval_every": 2, "checkpoint_every": 2, "batch_size": 4, "train_length": 16, "hidden_size": 16, "num_heads": 2,
        "num_layers": 1, "eval_windows": 6, "warmup_steps": 1, "validation_fraction": 0.25, "workers": 1,
    } | changes  # fmt: skip
    written = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in options.items()}
    return [f"--{name}={value}" for name, value in written.items() if value is not None]


def study_runs(output: Path) -> dict[str, dict[str, Any]]:
    """The trainings of a study, such as "causal-none-0", without figures that have no value."""
    content = json.loads(
        (output / "results.json").read_text(encoding="utf-8"),
        object_hook=lambda named: {name: value for name, value in named.items() if value is not None},
    )
    return {f"{run['task']}-{run['scheme']}-{run['seed']}": run for run in content["runs"]}


def study_figures(output: Path) -> dict[str, list[Any]]:
    """What a study measured, which must not depend on how often it was interrupted."""
    names = ("curve", "before", "by_length", "exact_match", "dog", "swap")
    return {name: [run.get(figure) for figure in names] for name, run in study_runs(output).items()}


def curve(output: Path) -> list[dict[str, float]]:
    """What a run logged, without clocks."""
    return without_clocks(json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"])


def losses(output: Path) -> list[float]:
    """The losses of its steps."""
    return [entry["loss"] for entry in curve(output) if "loss" in entry]


def recorded_calls(patch: pytest.MonkeyPatch, model_class: Any) -> list[tuple[bool, Any, Any]]:
    """Fills with whether each forward trained, and its positions and mask."""
    found: list[tuple[bool, Any, Any]] = []
    forward = model_class.forward

    @functools.wraps(forward)
    def recording(model: Any, *args: Any, **given: Any) -> Any:
        found.append((model.training, given.get("position_ids"), given.get("attention_mask")))
        return forward(model, *args, **given)

    patch.setattr(model_class, "forward", recording)
    return found


def results(output: Path) -> dict[str, float]:
    """What a run came to."""
    content: dict[str, float] = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    return content
