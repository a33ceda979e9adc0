"""Trains the same small models once per position encoding and compares them.

    accelerate launch training/compare.py
    python training/compare.py --schemes none,alibi,rope --tasks causal --max_steps 300 --seeds 0,1,2
    python training/compare.py training/studies/findings.yaml

A small Llama learns to predict the next token, a small BERT to fill in masked tokens, another Llama to copy or to add,
a small ViT to classify pictures: once per scheme and seed, from the same weights and on the same batches. Each model is
then evaluated at the lengths or resolutions of training, and at others. The output folder gets `results.json`,
`table.md`, `report.html` and plots. Run the same command again to resume an interrupted study, or with more schemes,
tasks or seeds to extend it. Processes on several machines can share the folder, and then share the training runs.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, which has modules of common names

from accelerate import PartialState
from tqdm.auto import tqdm

from hf_posenc.metrics.images.pictures import DIGITS
from training.checkpoints import latest_complete_checkpoint
from training.errors import SettingsError
from training.machine import check_met, launched_on_cpu
from training.one_run import exit_status
from training.report.outputs import write_outputs
from training.report.results import Run, check_results
from training.study.cells import FAILED, FINISHED, Cell, study_cells
from training.study.corpus import Corpus, load_corpus, study_tokenizer
from training.study.curve import check_trackers
from training.study.executors import Executor, in_this_process, open_executor
from training.study.folder import check_cells, taken
from training.study.models import task_model
from training.study.rates import rates_study, with_chosen_rates
from training.study.results import study_results
from training.study.settings import StudySettings, parse_study
from training.study.tasks import IMAGES
from training.study.tasks.images import pictures_summary
from training.study.workers import quiet, run_cells


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0; 1 if a training failed or none finished; 2 for invalid settings."""
    words = sys.argv[1:] if arguments is None else arguments
    results: dict[str, Any] = {}
    status = exit_status("compare", lambda: results.update(compare(parse_study(words, __doc__ or ""), words)))
    ended = {run["status"] for run in results.get("runs", ())}
    return status or int(FAILED in ended or FINISHED not in ended)


def compare(study: StudySettings, command: list[str]) -> dict[str, Any]:
    """Starts the training runs that have not ended, and writes results, tables, plots, report and cards.

    Returns:
        The content of `results.json`.
    """
    quiet()
    if study.learning_rates:
        study_cells(study)  # so that nothing is trained for settings that are refused afterwards
        study = with_chosen_rates(study, compare(rates_study(study), command))
    cells = study_cells(study)
    state = PartialState(cpu=launched_on_cpu())
    check_met(
        state.num_processes,
        "Start them with `accelerate launch` or torchrun, and not more than there are GPUs, if there are any.",
    )
    together = state.num_processes > 1
    if together and (study.executor != "local" or study.workers > 1):
        raise SettingsError(
            f"--executor and --workers send each training run to one process, but {state.num_processes} processes were "
            "launched to share every training run. Launch one process, or omit --executor and --workers."
        )
    check_trackers(study)
    folder = Path(study.output_dir)
    with ExitStack() as stack:
        with taken(folder, state.is_main_process):
            todo = sum(cell.result() is None for cell in cells)
            executor = stack.enter_context(in_this_process() if together else open_executor(study, todo))
            tokenizer = study_tokenizer(study)
            with state.main_process_first():
                corpus, models, identities = _prepare(study, cells, tokenizer, state)
        outcomes = _run(cells, identities, state, executor)
    results = study_results(study, command, corpus, models, tokenizer, outcomes, cells)
    if state.is_main_process:
        with taken(folder, True):
            written = write_outputs(results, folder)
        print((folder / "table.md").read_text(encoding="utf-8"))
        print(f"Written to {folder}: {len(written)} files; open {folder / 'report.html'}.")
        print("\n".join(_about_models(study, cells, results)))
    return results


#: The evaluation that measures models of a kind of task as the study does, and its options.
_EVALUATIONS = {
    "language_modeling": "loss {models} --text FILE --lengths {lengths} --plot loss.png",
    "generalization": "generalization {models} --task {task} --lengths {lengths}",
    "image_classification": "resolution {models} --dataset {pictures} --resolutions {lengths}",
    "embedding": "dog {models} --plot dog.png",
}


def _about_models(study: StudySettings, cells: list[Cell], results: dict[str, Any]) -> Iterator[str]:
    """Says where the trained models are, with a command per task that compares them, or how to keep them."""
    names = {cell.task.name for cell in cells if cell.model_folder.is_dir()}
    if not study.save_models:
        yield "The trained models were not kept, except those that others start from. Use --save_models to keep them."
        return
    yield f"The trained models are in {Path(study.output_dir) / 'models'}. To evaluate them:"
    imports = "".join(f" --import {name}" for name in study.imports)
    for name, task in results["tasks"].items():
        if name in names:
            command = _EVALUATIONS[task["kind"]].format(
                models=f"{shlex.quote(str(Path(study.output_dir) / 'models'))}/{name}-*",
                lengths=" ".join(map(str, task["lengths"])),
                task=name,
                pictures=shlex.quote(study.dataset_name or DIGITS),
            )
            yield f"  hf-posenc{imports} eval {command}"


def _prepare(
    study: StudySettings, cells: list[Cell], tokenizer: Any, state: PartialState
) -> tuple[Corpus | None, dict[str, str], dict[str, dict[str, Any]]]:
    """Returns the text, the model class of each task, and the cells' settings. Refuses a folder with other settings."""
    identities: dict[str, dict[str, Any]] = {}
    models: dict[str, str] = {}
    digests: dict[str, str] = {}
    corpus = None
    for task in {cell.task.name: cell.task for cell in cells}.values():
        models[task.name], digest = task_model(study, task, tokenizer)
        digests |= {} if digest is None else {"model": digest}
    if any(cell.task.name == IMAGES for cell in cells):
        digests["pictures"] = pictures_summary(study)["digest"]
    reading = [cell for cell in cells if cell.task.reads_text]
    if reading:
        train_length = max(cell.settings.train_length for cell in reading)
        corpus = load_corpus(study, tokenizer, train_length, max(cell.task.lengths[-1] for cell in reading))
        digests["corpus"] = corpus.summary["digest"]
    if state.is_main_process:
        folder = Path(study.output_dir)
        identities = check_cells(cells, digests)
        if corpus is not None:
            corpus.save(folder / "data")
    return corpus, models, identities


def _run(
    cells: list[Cell], identities: dict[str, dict[str, Any]], state: PartialState, executor: Executor
) -> dict[str, dict[str, Any]]:
    """Starts the training runs without a result, and returns the results of all training runs by name."""
    outcomes = {cell.name: result for cell in cells if (result := cell.result()) is not None}
    for cell in cells:
        if cell.name in outcomes:
            check_results(outcomes[cell.name], cell.folder / "result.json", Run)
    todo = [cell for cell in cells if cell.name not in outcomes]
    resumed = [cell.name for cell in todo if latest_complete_checkpoint(cell.folder, state.num_processes)]
    if resumed and state.is_main_process:
        print(f"Resuming from checkpoints: {', '.join(resumed)}.")
    with _progress_bar(todo, disable=not todo or not state.is_main_process) as bar:
        for cell, result in run_cells(todo, identities, executor):
            outcomes[cell.name] = result
            if state.is_main_process:
                bar.write(f"{cell.name:28} {result['status']} {result.get('reason', '')}", file=sys.stderr)
    return outcomes


@contextmanager
def _progress_bar(cells: list[Cell], disable: bool) -> Iterator[tqdm]:
    """A progress bar for the steps of all training runs. Every second it reads the steps recorded by their workers."""
    ended = Event()
    total, done = sum(cell.settings.max_steps for cell in cells), sum(cell.steps_done() for cell in cells)
    with tqdm(total=total, initial=done, unit="step", disable=disable) as bar:

        def follow() -> None:
            while not ended.wait(1.0):
                steps = sum(cell.steps_done() for cell in cells)
                if bar.n == done < steps:
                    bar.unpause()  # The time until the first step is no measure of those that follow.
                bar.n = steps
                running = [cell.name for cell in cells if cell.step_file.exists()]
                bar.set_postfix_str(", ".join(running) or "starting")

        follower = Thread(target=follow, daemon=True)
        if not disable:
            follower.start()
        try:
            yield bar
        finally:
            ended.set()
            if not disable:
                follower.join()


if __name__ == "__main__":
    sys.exit(main())
