"""Trainings of a study on each executor: equal results, also where a worker is killed, and one worker at a time."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease

from tests.training.run_cases import REPOSITORY, environment, refused, study_figures, study_words
from training import compare
from training.errors import SettingsError
from training.files import write_json
from training.study import executors, folder, workers
from training.study.cells import FINISHED, Cell, study_cells
from training.study.executors import Executor, in_this_process, open_executor
from training.study.folder import LOCK
from training.study.settings import StudySettings

pytestmark = pytest.mark.usefixtures("no_figures")

Words = Callable[..., list[str]]
#: Checkpoints are many, so that a worker is killed before it has ended.
OPTIONS = {"tasks": "masked", "schemes": "none", "max_steps": 40, "eval_every": 20, "checkpoint_every": 1}
EXECUTORS: dict[str, dict[str, Any]] = {
    "local": {"schemes": "none,alibi", "workers": 2},
    "dask": {"executor": "dask"},
    "submitit": {"executor": "submitit"},
}


def installed(executor: str) -> None:
    package = {"dask": "distributed"}.get(executor, executor)
    if executor != "local" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'hf-posenc[executors]'")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, texts: Path, no_figures: None) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("straight") / "out"
    assert compare.main(study_words(texts, folder, **OPTIONS)) == 0
    return study_figures(folder)


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A study in another process."""
    command = [sys.executable, "training/compare.py", *words]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def training_process(folder: Path, coordinator: subprocess.Popen[str]) -> int:
    """The process that has saved the first checkpoint."""
    limit = time.monotonic() + 120
    while True:
        for state in folder.glob("trainings/*/checkpoint-*/trainer_state.json"):
            if (pid := SoftFileLease(state.parents[1] / LOCK).pid) is not None:
                return pid
        assert coordinator.poll() is None, "ended before its first checkpoint"
        assert time.monotonic() < limit, "no checkpoint within two minutes"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_killed_worker_is_replaced(executor: str, tiny: Words, tmp_path: Path, straight: dict[str, Any]) -> None:
    installed(executor)
    with started(tiny(**OPTIONS | EXECUTORS[executor])) as coordinator:
        worker = training_process(tmp_path / "out", coordinator)
        assert worker != coordinator.pid
        os.kill(worker, signal.SIGKILL)
        _, said = coordinator.communicate(timeout=600)
    assert coordinator.returncode == 0, said
    assert study_figures(tmp_path / "out").items() >= straight.items()


@pytest.mark.parametrize(
    ("setting", "ours", "given"),
    [("deploy.lost-worker-timeout", "1 hour", "7s"), ("nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_", 2**33, 5)],
)
@pytest.mark.parametrize("is_given", [False, True])
def test_a_setting_of_the_user_for_dask_stays(
    setting: str, ours: Any, given: Any, is_given: bool, monkeypatch: Any
) -> None:
    installed("dask")
    import dask
    import distributed

    found = []

    def started(**_: Any) -> None:
        found.append(dask.config.get(f"distributed.{setting}"))
        raise OSError("far enough")

    monkeypatch.setattr(distributed, "LocalCluster", started)
    mine = {f"distributed.{setting}": given} if is_given else {}
    with (
        dask.config.set(mine),
        pytest.raises(SettingsError, match="far enough"),
        executors.open_executor(StudySettings(executor="dask", workers=1), 1),
    ):
        pass
    assert found == [given if is_given else ours]


@pytest.mark.long
def test_a_dask_cluster_that_runs_already_is_used(tiny: Words, tmp_path: Path, straight: dict[str, Any]) -> None:
    installed("dask")
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster:
        options = {"executor": "dask", "executor_options": f"address={cluster.scheduler_address}"}
        assert compare.main(tiny(**OPTIONS | options | {"schemes": "none,alibi"})) == 0
    assert study_figures(tmp_path / "out").items() >= straight.items()


def cells_in(folder: Path, schemes: str = "none", **settings: Any) -> list[Cell]:
    """Cells that a study has begun there."""
    cells = study_cells(StudySettings(tasks="causal", schemes=schemes, output_dir=str(folder), **settings))
    for cell in cells:
        write_json(cell.folder / "settings.json", {})
    return cells


def run_here(cells: list[Cell], executor: Executor | None = None) -> list[dict[str, Any]]:
    with in_this_process() as here:
        return [result for _, result in workers.run_cells(cells, {}, executor or here)]


def forked(cells: list[Cell]) -> Any:
    """Another process that runs them."""
    process = multiprocessing.get_context("fork").Process(target=run_here, args=(cells,))
    process.start()
    return process


def ended(cell: Cell) -> dict[str, Any]:
    """The result of a training that took no time."""
    result = {**cell.head(), "status": FINISHED, "process": os.getpid()}
    write_json(cell.folder / "result.json", result)
    return result


def test_two_studies_in_one_folder_share_the_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(cell: Cell, on_step: Any) -> dict[str, Any]:
        with (tmp_path / "log").open("a") as log:
            log.write(f"{cell.name} {os.getpid()}\n")
        time.sleep(0.3)
        return ended(cell)

    monkeypatch.setattr(workers, "run_cell", trained)
    cells = cells_in(tmp_path, "none,alibi,rope,t5,kerple,learned")
    other = forked(cells)
    assert len(run_here(cells)) == 6
    other.join(60)
    assert other.exitcode == 0
    begun = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(name for name, _ in begun) == sorted(cell.name for cell in cells)
    assert {int(process) for _, process in begun} == {os.getpid(), other.pid}


@pytest.mark.long
def test_only_a_silent_worker_loses_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = os.getpid()

    def trained(cell: Cell, on_step: Any) -> dict[str, Any]:
        while os.getpid() != this:
            on_step(1)
            time.sleep(0.02)
        return ended(cell)

    monkeypatch.setattr(workers, "run_cell", trained)
    monkeypatch.setattr(folder, "_LEASE_SECONDS", 3)
    cells = cells_in(tmp_path)
    other, lease = forked(cells), folder.lease_of(cells[0])
    try:
        until = time.monotonic() + 6
        while lease.pid != other.pid or time.monotonic() < until:
            assert lease.pid is None or not folder.is_free(lease)
            time.sleep(0.1)
        os.kill(other.pid, signal.SIGSTOP)
        (result,) = run_here(cells)
        assert result["process"] == this
        os.kill(other.pid, signal.SIGCONT)
        other.join(60)
        # It noticed, and took over the result.
        assert other.exitcode == 0
    finally:
        other.kill()


def test_what_loses_every_worker_is_given_up_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def submit(slot: int, function: Any, cell: Cell, *rest: Any) -> Future[Any]:
        sent.append(cell.label)
        job: Future[Any] = Future()
        if cell.label == "alibi":
            job.set_exception(BrokenProcessPool("killed"))
        else:
            job.set_result(ended(cell))
        return job

    first, second = run_here(cells_in(tmp_path, "alibi,none"), Executor(2, submit))
    assert (first["scheme"], second["status"]) == ("none", "failed")
    assert "lost its worker 3 times (BrokenProcessPool: killed)" in second["reason"]
    assert sent.count("alibi") == 3


def test_a_training_waits_for_its_start_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that is stopped has the same schemes with each seed."""
    monkeypatch.setattr(workers, "run_cell", lambda cell, on_step: ended(cell))
    options = {"stretched": {"scheme": "rope", "from": "rope", "training": {"max_steps": 0}}}
    cells = cells_in(tmp_path, "stretched,rope", scheme_options=options, seeds=[0, 1])
    order = [(result["scheme"], result["seed"]) for result in run_here(cells)]
    assert order == [("rope", 0), ("stretched", 0), ("rope", 1), ("stretched", 1)]


def test_a_training_that_another_study_began_with_other_settings_is_not_run(tmp_path: Path) -> None:
    (cell,) = cells_in(tmp_path)
    result = workers.train(cell, {"max_steps": 3}, None)
    assert result is not None
    assert "started it with other settings: max_steps was 'absent' and is now 3" in result["reason"]


@pytest.mark.parametrize(
    ("executor", "options", "message"),
    [
        ("slurm", "", "'local', 'submitit' or 'dask'"),
        ("local", "mem_gb=8", "for dask and submitit"),
        ("dask", "memory", "written name=value, got 'memory'"),
        ("dask", "n_workers=2", "n_workers is --workers"),
        ("dask", "address=tcp://127.0.0.1:1,timeout=1", "Timed out trying to connect"),
        ("dask", "address=tcp://127.0.0.1:1,memory_limit=8GB", "Unexpected keyword arguments: ['memory_limit']"),
        ("dask", "memory=8GB", "Unknown option 'memory' of dask's LocalCluster. Did you mean 'memory_limit'?"),
        ("submitit", "memory=8", "Parameter 'memory' need to be prefixed"),
        ("submitit", "mem_gb=8", "the cluster is 'local', which ignores mem_gb"),
        ("submitit", "slurm_partition=gpu", "which ignores slurm_partition"),
        ("submitit", "cluster=debug,nodes=2", "one task on one node"),
    ],
)
def test_options_that_an_executor_does_not_take(
    tiny: Words, capsys: Any, executor: str, options: str, message: str
) -> None:
    if executor in EXECUTORS:
        installed(executor)
    said = refused(capsys, compare.main, tiny(executor=executor, executor_options=options or None))
    assert message in said
    assert said.count("compare: ") == 1
    assert said[said.index("compare: ") :].count("\n") < 4


def test_slurm_takes_the_options_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("submitit")
    (tmp_path / "srun").write_text("#!/bin/sh")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    page = (REPOSITORY / "docs/how_to/studies.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"--executor_options (slurm\S+)", page)
    study = {"executor": "submitit", "output_dir": str(tmp_path)}
    with open_executor(StudySettings(**study, executor_options=options), jobs=3) as executor:
        assert executor.slots == 3
    misspelt = StudySettings(**study, executor_options=options.replace("partition", "partitio"))
    with pytest.raises(SettingsError, match="Unknown argument 'partitio'"), open_executor(misspelt, jobs=3):
        pass


def test_a_missing_package_is_told_with_its_extra(tiny: Words, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for executor, package in (("dask", "distributed"), ("submitit", "submitit")):
        monkeypatch.setitem(sys.modules, package, None)
        assert compare.main(tiny(executor=executor)) == 2
        assert "pip install 'hf-posenc[executors] @ git+https://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tracker", "files", "count"),
    [
        ("tensorboard", "out/trainings/*/runs/*/events.out.*", 2),
        ("trackio", "trackio/compare.db", 1),  # one file for a study
        ("wandb", "wandb/offline-run-*", 2),
    ],
)
def test_trackers_receive_each_training(
    tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, files: str, count: int
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    pytest.importorskip(tracker)  # reads its variables
    assert compare.main(tiny(report_to=tracker)) == 0
    assert len(list(tmp_path.glob(files))) == count


def test_a_tracker_that_cannot_be_used_is_refused_before_anything_is_trained(tiny: Words, capsys: Any) -> None:
    for tracker, message in (("tensorbord", "tensorbord is not supported"), ("comet_ml", "comet")):
        assert message in refused(capsys, compare.main, tiny(report_to=tracker))
