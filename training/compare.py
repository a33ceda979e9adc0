"""Trains the same small models once per position encoding, on real text, and compares them.

    accelerate launch training/compare.py
    python training/compare.py --schemes none,alibi,rope --tasks causal --max_steps 300

A small Llama learns to predict the next token and a small BERT to fill in masked ones, once per scheme, from the same
weights, on the same batches. Then each is read at the length it was trained on and at up to four times that. The
output folder gets `results.json`, `table.md` and plots. Run the same command again to resume an interrupted run.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

from hf_posenc import PositionEncodingError, __version__
from hf_posenc.plots.curves import plot_comparison
from training.batches import IGNORED, validation_batch, validation_windows
from training.corpus import Corpus, load_corpus, load_tokenizer, unigram_cross_entropy
from training.evaluation import TAIL
from training.files import latest_checkpoint, write_json, write_text
from training.loop import FAILED, FINISHED, Training
from training.models import DEFAULT_OPTIONS
from training.output_folder import check_settings, check_training, clear, lock
from training.report import format_tables
from training.settings import CompareSettings, SettingsError
from training.workers import run_here, run_in_workers


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, 1 if a training failed, 2 for settings that cannot work."""
    try:
        (settings,) = HfArgumentParser(CompareSettings, description=__doc__).parse_args_into_dataclasses(arguments)
        settings.check_scheme_options()
        results = compare(settings)
    except (SettingsError, PositionEncodingError, RuntimeError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again to go on from the last checkpoints.", file=sys.stderr)
        return 130
    return int(any(training["status"] == FAILED for training in results["trainings"]))


def compare(settings: CompareSettings) -> dict[str, Any]:
    """Runs what has not ended yet, and writes results, table and plots.

    Returns:
        The content of `results.json`.

    Raises:
        SettingsError: for settings that cannot work, or that differ from those this output folder began with.
        UnknownNameError: for an unknown scheme or option.
    """
    transformers_logging.set_verbosity_error()
    state = PartialState()
    folder = Path(settings.output_dir)
    with _exclusive(folder, state):
        with state.main_process_first():
            corpus = _prepare(settings, state)
        trainings = _trainings(settings)
        outcomes = {training.name: training.result() for training in trainings}
        todo = [training for training in trainings if outcomes[training.name] is None]
        if state.is_main_process:
            for training in trainings:
                check_training(training)
        state.wait_for_everyone()
        outcomes |= _run(todo, settings, state)
        results = _results(settings, corpus, [outcomes[training.name] or {} for training in trainings])
        if state.is_main_process:
            write_json(folder / "results.json", results)
            write_text(folder / "table.md", format_tables(results))
            plots = plot_comparison(results, folder / "plots")
            print(f"\n{format_tables(results)}\nWritten: {folder}/results.json, table.md, plots/ ({len(plots)} files)")
    return results


def _prepare(settings: CompareSettings, state: PartialState) -> Corpus:
    tokenizer = load_tokenizer(settings.tokenizer_name)
    corpus = load_corpus(settings, tokenizer)
    if state.is_main_process:
        if settings.overwrite:
            clear(Path(settings.output_dir))
        check_settings(settings, corpus.summary)
        corpus.save(Path(settings.output_dir) / "data")
        summary = corpus.summary
        print(
            f"Text: {summary['source']}, {summary['train_documents']} documents to train on "
            f"({summary['train_tokens']:,} tokens), {summary['validation_documents']} held out "
            f"({summary['validation_tokens']:,} tokens)."
        )
    return corpus


def _trainings(settings: CompareSettings) -> list[Training]:
    options = settings.options_by_scheme()
    return [
        Training(settings, task, scheme, DEFAULT_OPTIONS.get(scheme, {}) | options.get(scheme, {}))
        for task in settings.task_names()
        for scheme in settings.scheme_names()
    ]


def _run(todo: list[Training], settings: CompareSettings, state: PartialState) -> dict[str, dict[str, Any]]:
    """Runs the trainings under one progress bar, and returns their results by name."""
    outcomes: dict[str, dict[str, Any]] = {}
    steps = {training.name: 0 for training in todo}
    resumed = [training.name for training in todo if latest_checkpoint(training.folder)]
    if resumed and state.is_main_process:
        print(f"Resuming from checkpoints: {', '.join(resumed)}.")
    bar = tqdm(
        total=len(todo) * settings.max_steps,
        unit="step",
        desc=f"{len(todo)} trainings",
        disable=not todo or not state.is_main_process,
        smoothing=0.05,
    )

    def report(name: str, step: int) -> None:
        bar.update(step - steps[name])
        steps[name] = step

    def on_result(training: Training, result: dict[str, Any]) -> None:
        report(training.name, settings.max_steps)
        outcomes[training.name] = result
        if state.is_main_process:
            bar.write(_line(training, result), file=sys.stderr)

    workers = 1 if state.num_processes > 1 else settings.worker_count(len(todo), state.device.type != "cpu")
    with contextlib.closing(bar):
        if workers > 1:
            run_in_workers(todo, workers, report, on_result)
        else:
            run_here(todo, report, on_result)
    return outcomes


def _line(training: Training, result: dict[str, Any]) -> str:
    if result["status"] != FINISHED:
        return f"{training.name:20} {result['status']}: {result['reason']}"
    loss = result["by_length"]["loss"]
    lengths = result["by_length"]["lengths"]
    return (
        f"{training.name:20} loss {loss[0]:.3f} at {lengths[0]} tokens, {loss[-1]:.3f} at {lengths[-1]}; "
        f"{result['seconds']:.0f} s"
    )


def _results(settings: CompareSettings, corpus: Corpus, trainings: list[dict[str, Any]]) -> dict[str, Any]:
    tokenizer = load_tokenizer(settings.tokenizer_name)
    windows = validation_windows(corpus.validation, settings)
    targets = validation_batch(windows, tokenizer, "causal", settings)["labels"]
    return {
        "settings": {
            name: value for name, value in settings.to_dict().items() if name not in ("output_dir", "overwrite")
        },
        "corpus": corpus.summary,
        "lengths": settings.lengths,
        "tail_tokens": min(TAIL, settings.train_length // 2),
        "evaluation_tokens": windows.numel(),
        "unigram_cross_entropy": round(
            unigram_cross_entropy(corpus.train, targets[targets != IGNORED].numpy(), len(tokenizer)), 4
        ),
        "trainings": trainings,
        "versions": {"python": platform.python_version(), "hf-posenc": __version__}
        | {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def _exclusive(folder: Path, state: PartialState) -> Iterator[None]:
    held = lock(folder) if state.is_main_process else None
    try:
        yield
    finally:
        if held is not None:
            held.release()


if __name__ == "__main__":
    sys.exit(main())
