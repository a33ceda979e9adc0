"""Part (d): a small study on this repository's own pages and code, which every copy of the kit has.

The trainings are those of `training/compare.py`, without its report, figures and intervals, which need more packages.
One that is stopped goes on from its checkpoint in a later call.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.errors import BenchmarkError
from tests.kits.gpu.rows import CRASHED, OK, REFUSED, Row
from tests.kits.gpu.worker import OutOfTimeError, Part
from training.data.text import TokenStream
from training.errors import SettingsError
from training.study.cells import DIVERGED, FINISHED, UNSUPPORTED, study_cells
from training.study.corpus import Corpus, study_tokenizer
from training.study.folder import check_cells
from training.study.run import run_cell
from training.study.settings import StudySettings, parse_study
from training.study.workers import quiet

_ROOT = Path(__file__).resolve().parents[3]
_STATUSES = {FINISHED: OK, UNSUPPORTED: REFUSED, DIVERGED: CRASHED}
_SMOKE: dict[str, Any] = {
    "schemes": ["none", "alibi", "rope"],
    "tasks": ["causal"],
    "task_options": {"causal": {"train_length": 16, "length_factor": 2, "max_steps": 2, "eval_windows": 2}},
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "batch_size": 2,
}
_SMOKE_FILES = 16
#: One file of so many is kept for validation.
_HELD_OUT = 16


class Study(Part):
    """The fourth part of the kit."""

    @property
    def _work(self) -> Path:
        return self.folder / "work"

    @functools.cached_property
    def _study(self) -> StudySettings:
        study = parse_study([str(Path(__file__).with_name("study.yaml"))], "").model_dump(exclude_unset=True)
        return StudySettings(**study | {"output_dir": str(self._work), "workers": 1} | (_SMOKE if self.smoke else {}))

    def settings(self) -> dict[str, Any]:
        """What all rows depend on."""
        # The schemes and tasks may grow; the settings of a training are checked where it goes on.
        return self._study.changed({}, "").fingerprint()

    def cells(self) -> list[str]:
        """The trainings."""
        return [cell.name for cell in study_cells(self._study)]

    def run(self, cell: str) -> Row:
        """One training, or as much of it as there is time for.

        Raises:
            OutOfTimeError: if it goes on with the next call.
            BenchmarkError: if it was begun with other settings or other text.
        """
        quiet()
        training = next(candidate for candidate in study_cells(self._study) if candidate.name == cell)
        try:
            check_cells([training], {"corpus": self._corpus.summary["digest"]} if training.task.reads_text else {})
        except SettingsError as error:
            raise BenchmarkError(f"{error} Here that is {self._work}, which can be removed.") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result = run_cell(training, self._on_step)
        shutil.rmtree(training.folder, ignore_errors=True)
        row: Row = {"status": _STATUSES[result["status"]], "task": training.task.name, "scheme": training.label}
        if result["status"] != FINISHED:
            return row | {"reason": result["reason"]}
        steps = training.settings.max_steps
        row |= {
            "seed": training.seed,
            "steps": steps,
            "milliseconds_per_step": round(result["seconds"] / steps * 1e3, 2) if steps else None,
            "lengths": training.task.lengths,
        }
        measured = ("parameters", "curve", "dog", "by_length", "exact_match")
        row |= {name: result[name] for name in measured if name in result}
        return row | ({"peak_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {})

    def _on_step(self, step: int) -> None:
        if self.remaining() <= 0:
            raise OutOfTimeError

    @functools.cached_property
    def _corpus(self) -> Corpus:
        """Tokens of the repository's files, one document each, closed by the end token; held out are whole files."""
        kinds = (("docs", "*.md"), ("hf_posenc", "*.py"), ("training", "*.py"))
        files = [file for folder, kind in kinds for file in sorted((_ROOT / folder).rglob(kind))]
        # In an order that has nothing to do with what is in them.
        files.sort(key=lambda file: hashlib.sha256(file.relative_to(_ROOT).as_posix().encode()).digest())
        files = files[: _SMOKE_FILES if self.smoke else None]
        if len(files) < _HELD_OUT:
            raise BenchmarkError(f"{_ROOT} holds {len(files)} pages and modules: run the kit in a checkout.")
        tokenizer = study_tokenizer(self._study)
        texts = [file.read_text(encoding="utf-8") for file in files]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        documents = [[*tokens, tokenizer.eos_token_id] for tokens in encoded]
        held_out = _stream(documents[::_HELD_OUT])
        others = _stream([document for number, document in enumerate(documents) if number % _HELD_OUT])
        corpus = Corpus.of(others, held_out, "pages and code of this repository", tokenizer)
        corpus.save(self._work / "data")
        return corpus


def _stream(documents: list[list[int]]) -> TokenStream:
    bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return TokenStream(np.concatenate([np.asarray(tokens, np.int32) for tokens in documents]), bounds)
