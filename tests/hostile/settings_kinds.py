"""Files of settings and of data that the library reads besides checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.hostile.kinds import FileKind, Input, json_bytes, special_files
from tests.hostile.mutations import change_of_json, damaged_bytes

STUDY = {
    "name": "small",
    "schemes": ["none", "rope", "yarn"],
    "scheme_options": {"yarn": {"scheme": "rope", "scaling": {"type": "linear", "factor": 4.0}, "from": "rope"}},
    "tasks": ["copy", "causal"],
    "task_options": {"copy": {"max_steps": 5}},
    "seeds": [0, 1],
    "max_steps": 10,
    "learning_rate": 0.001,
}
#: Words in errors about settings that were read but make no sense.
FIELDS = (*STUDY, "scheme", "type")
PAIRS = {
    "name": "agreement",
    "examples": [
        {"input": "The dog", "target_scores": {"runs": 1, "run": 0}, "comment": "singular"},
        {"input": "The dogs of the man", "target_scores": {"run": 1, "runs": 0}, "comment": "plural_singular"},
    ],
}


class Study(FileKind):
    """The settings of a study, in YAML."""

    title = "the YAML file of a study"
    inputs = 80
    same = False

    def prepare(self, folder: Path) -> None:
        self.path = folder / "study.yaml"
        self.path.write_text(yaml.safe_dump(STUDY))

    def fixed(self) -> list[tuple[Path, Input]]:
        text = self.path.read_bytes()
        named = [dataclasses.replace(given, words=FIELDS) for given in special_files(text)]
        return [(self.path, given) for given in named if given.what != "more spaces"]

    def draw(self, rng: Random) -> tuple[Path, Input]:
        if rng.random() < 0.4:
            what, data = damaged_bytes(self.path.read_bytes(), rng)
            return self.path, Input(what, data, words=FIELDS)
        change = change_of_json(STUDY, [()], rng)
        return self.path, Input(str(change), json_bytes(change.applied(STUDY)), words=FIELDS)

    def read(self, path: Path, number: int) -> str:
        from training.study.cells import study_cells
        from training.study.settings import parse_study

        assert study_cells(parse_study([str(path)], ""))
        return "settings"


class MinimalPairs(FileKind):
    """A task of minimal pairs, in JSON."""

    title = "the JSON file of a task of minimal pairs"
    inputs = 60
    same = False

    def prepare(self, folder: Path) -> None:
        self.path = folder / "task.json"
        self.path.write_text(json.dumps(PAIRS, indent=1))

    def draw(self, rng: Random) -> tuple[Path, Input]:
        if rng.random() < 0.3:
            what, data = damaged_bytes(self.path.read_bytes(), rng)
            return self.path, Input(what, data)
        change = change_of_json(PAIRS, [()], rng)
        return self.path, Input(str(change), json_bytes(change.applied(PAIRS)), words=tuple(map(str, change.where)))

    def read(self, path: Path, number: int) -> str:
        from hf_posenc.metrics.minimal_pairs import read_minimal_pairs

        task: Any = read_minimal_pairs(path)
        assert task.pairs
        return "a task"
