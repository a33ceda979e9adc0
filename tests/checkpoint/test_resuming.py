"""`Trainer` continues from checkpoints of the same model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import hf_posenc
from hf_posenc.checkpoint.agreement import SchemeMismatchError
from hf_posenc.recipes import SchemePhases, SchemePhasesCallback
from tests.checkpoint.checkpoint_cases import made, refused, without_mark
from tests.recipes.test_phases import Copying, arguments_of


def trainer(model: Any, folder: Path, steps: int, callbacks: Any = None, **options: Any) -> Any:
    settings = arguments_of(folder, steps, **({"save_strategy": "steps", "save_steps": 2} | options))
    return Trainer(model, settings, train_dataset=Copying(), eval_dataset=Copying(), callbacks=callbacks)


def losses(made: Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a whole training, and its losses."""
    folder = tmp_path_factory.mktemp("run")
    whole = trainer(made("t5"), folder, 4)
    whole.train()
    return folder, losses(whole)


@pytest.fixture(params=["whole", "bin", "older"])
def checkpoint(request: pytest.FixtureRequest, run: tuple[Path, list[float]], tmp_path: Path) -> Path:
    """A copy of its first half."""
    folder = Path(shutil.copytree(run[0] / "checkpoint-2", tmp_path / "run" / "checkpoint-2"))
    if request.param == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return without_mark(folder) if request.param == "older" else folder


WRONG = {
    "forgotten": ({"scheme": None}, "t5.*stock positions"),
    "another scheme": ({"scheme": "alibi"}, "t5.*alibi"),
    "other options": ({"scheme": "t5", "max_distance": 64}, r"t5.*t5\(max_distance=64\)"),
}


def test_only_a_model_with_the_same_scheme_is_trained_on(
    run: tuple[Path, list[float]], checkpoint: Path, tmp_path: Path
) -> None:
    for kind, message in WRONG.values():
        model = made(**kind)
        with refused(message, model, error=SchemeMismatchError):
            trainer(model, tmp_path / "again", 4).train(resume_from_checkpoint=str(checkpoint))
    again = trainer(made("t5"), tmp_path / "again", 4)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert losses(again)[-2:] == run[1][-2:]


def test_stock_checkpoints_and_stock_weights_in_a_patched_checkpoint(
    run: tuple[Path, list[float]], tmp_path: Path
) -> None:
    trainer(made(), tmp_path / "stock", 2).train()
    stock = tmp_path / "stock" / "checkpoint-2"
    trainer(made(), tmp_path / "again", 3).train(resume_from_checkpoint=str(stock))
    unmarked = without_mark(Path(shutil.copytree(run[0] / "checkpoint-2", tmp_path / "checkpoint-2")), entry_format=2)
    for scheme, folder in (("alibi", stock), ("t5", unmarked)):
        with pytest.raises(SchemeMismatchError, match="do not name a position encoding"):
            trainer(made(scheme), tmp_path / "again", 3).train(resume_from_checkpoint=str(folder))


def test_a_best_model_of_another_scheme_is_not_loaded(tmp_path: Path) -> None:
    class Repatching(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                hf_posenc.patch_model(kwargs["model"], "none")

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.5}
    with pytest.raises(SchemeMismatchError, match=r"alibi.*none"):
        # A learning rate at which no later model is the best one.
        trainer(made("alibi"), tmp_path, 4, [Repatching()], **best).train()


def test_a_model_that_changes_its_scheme_goes_on_from_every_phase(tmp_path: Path) -> None:
    phases = SchemePhases(((0, "native"), (3, "alibi"), (5, "none")))
    whole = trainer(made(), tmp_path / "run", 8, [SchemePhasesCallback(phases)])
    whole.train()
    for step in (2, 4, 6):
        again = trainer(made(), tmp_path / f"from-{step}", 8, [SchemePhasesCallback(phases)], save_strategy="no")
        again.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert losses(again)[-8 + step :] == losses(whole)[step:]
        assert again.model.position_encoding.config == hf_posenc.NoneConfig()
    with pytest.raises(SchemeMismatchError, match=r"alibi.*stock"):
        trainer(made(), tmp_path / "plain", 8).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
