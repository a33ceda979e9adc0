"""The files of a patched checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from tests.checkpoint.checkpoint_cases import bert, llama, made, outputs
from tests.hostile.kinds import FileKind, Input, json_bytes, special_files
from tests.hostile.mutations import Change, change_of_json, damaged_bytes, nested
from tests.schemes.table import TABLE

#: Every registered scheme once, and arrangements of several.
SUBJECTS: dict[str, Any] = {name: row.variants[0] for name, row in TABLE.items()} | {
    "several": ["t5", "learned", "rope"],
    "layers": {"scheme": "schedule", "layers": [{"scheme": "fire"}, {"scheme": "shaw", "max_distance": 8}]},
    "yarn": {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 64}},
}


#: Those that are put into a BERT instead of a Llama.
MASKED = ("alibi", "t5", "learned")


class Checkpoint(FileKind):
    """Patched checkpoints of all schemes, one of whose files is damaged."""

    file: str
    subjects: tuple[str, ...] = tuple(SUBJECTS)
    #: Of the save.
    options: Mapping[str, Any] = {}

    def prepare(self, folder: Path) -> None:
        self.folders = [folder / name for name in self.subjects]
        self.path = self.folders[0] / self.file
        self.expected = {}
        for name in self.subjects:
            model = made(SUBJECTS[name], build=bert if name in MASKED else llama)
            model.save_pretrained(folder / name, **self.options)
            self.expected[name] = outputs(model)

    def ours(self, path: Path) -> bool:
        return path.name != "config.json" or (path.is_file() and b"hf_posenc" in path.read_bytes())

    def read(self, path: Path, number: int) -> str:
        folder = path.parent
        masked = folder.name in MASKED
        names = [("AutoModelForCausalLM", "AutoModelForMaskedLM"), ("LlamaForCausalLM", "BertForMaskedLM")][number % 2]
        model, info = getattr(transformers, names[masked]).from_pretrained(folder, output_loading_info=True)
        found, expected = outputs(model), self.expected[folder.name]
        if found.shape == expected.shape and torch.equal(found, expected):
            return "same"
        if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")):
            return "reported"
        if not found.isfinite().all():
            return "not finite"
        return "different" if hasattr(model, "position_encoding") else "stock"


class ConfigEntry(Checkpoint):
    """Structured mutation of what the library reads of `config.json`."""

    title = "`config.json`: types, extremes, missing and unknown keys, nesting, replaced schemes"
    file = "config.json"
    inputs = 260

    def fixed(self) -> list[tuple[Path, Input]]:
        path = next(folder for folder in self.folders if folder.name == "rope") / self.file
        disk = json.loads(path.read_text())
        scheme = ("position_encoding", "scheme")
        alibi = {"scheme": "alibi"}
        hard = {
            "2 schemes deep": nested(alibi, 2),
            "17 schemes deep": nested(alibi, 17),
            "400 schemes deep": nested(alibi, 400),
            "100,000 parts": {"scheme": "composed", "parts": [alibi] * 100_000},
            "200,000 layers": {"scheme": "schedule", "layers": [alibi] * 200_000},
            "1,000,000 frequencies": {"scheme": "rope", "inverse_frequencies": [0.5] * 1_000_000},
            "lists in lists": {"scheme": "composed", "parts": nested_lists(300)},
            "blends in blends": blends(40),
            "fire of 10**8 units": {"scheme": "fire", "width": 10**8},
            "sandwich of 2**31": {"scheme": "sandwich", "width": 2**31},
            "learned, 4e7 rows": {"scheme": "learned", "num_positions": 40_000_000},
            "learned, the most rows": {"scheme": "learned", "num_positions": 2**20},
            "learned, offset 4e7": {"scheme": "learned", "offset": 40_000_000},
            "shaw, 4e7 distances": {"scheme": "shaw", "max_distance": 40_000_000},
            "low rank of 10**6": {"scheme": "low_rank_relative", "rank": 10**6},
            "cope, 4e7 rows": {"scheme": "cope", "num_positions": 40_000_000},
            "pope, theta 2**64": {"scheme": "pope", "theta": 2**64},
            "integer, scale 3e38": {"scheme": "integer", "scale": 3e38},
        }
        found = [(path, given) for given in special_files(path.read_bytes())]
        for what, value in hard.items():
            change = Change(scheme, what, value)
            # 2**20 rows are allowed, and not these weights'.
            found.append((path, Input(what, json_bytes(change.applied(disk)), words=(value["scheme"],))))
        reordered = json.dumps(dict(reversed(disk.items()))).encode()
        found.append((path, Input("other order", reordered, neutral=True)))
        renamed = Change(("position_encoding", "hf_posenc_version"), "another version", "99.0", neutral=True)
        found.append((path, Input(renamed.what, json_bytes(renamed.applied(disk)), neutral=True)))
        return found

    def draw(self, rng: Random) -> tuple[Path, Input]:
        path = rng.choice(self.folders) / self.file
        disk = json.loads(path.read_text())
        if rng.random() < 0.15:
            # Of the same class of model: another one is refused by the stock code, as that of another task.
            masked = path.parent.name in MASKED
            folder = rng.choice([folder for folder in self.folders if (folder.name in MASKED) == masked])
            other = json.loads((folder / self.file).read_text())["position_encoding"]
            key = rng.choice([("position_encoding",), ("position_encoding", "scheme")])
            value = other if len(key) == 1 else other["scheme"]
            change = Change(key, f"that of {folder.name}", value, neutral=folder == path.parent)
        else:
            roots: list[tuple[Any, ...]] = [("position_encoding",)] * 6 + [("architectures",), ("model_type",)]
            change = change_of_json(disk, [*roots, ("transformers_weights",)], rng)
        words = (*map(str, change.where), str(change.value)[:40], "hf_posenc")
        return path, Input(f"{path.parent.name}: {change}", json_bytes(change.applied(disk)), change.neutral, words)


def nested_lists(depth: int) -> Any:
    inner: Any = "alibi"
    for _ in range(depth):
        inner = [inner]
    return inner


def blends(depth: int) -> Any:
    inner: Any = {"scheme": "alibi"}
    for _ in range(depth):
        inner = {"scheme": "position_shift", "inner": {"scheme": "blended", "old": inner, "new": "t5"}}
    return inner


class ConfigBytes(Checkpoint):
    """Damage to the bytes of `config.json`."""

    title = "`config.json`: flipped bits, truncations, insertions in its position encoding"
    file = "config.json"
    inputs = 60
    subjects = ("t5", "rope", "several")

    def fixed(self) -> list[tuple[Path, Input]]:
        return []

    def draw(self, rng: Random) -> tuple[Path, Input]:
        path = rng.choice(self.folders) / self.file
        data = path.read_bytes()
        start, end = data.index(b'"position_encoding"'), data.index(b"}", data.index(b'"scheme": {'))
        what, piece = damaged_bytes(data[start:end], rng)
        return path, Input(f"{path.parent.name}: {what}", data[:start] + piece + data[end:], words=("scheme", "option"))


class WeightsHeader(Checkpoint):
    """Damage to the header of `model.safetensors`. The numbers behind it have no checksum in this format."""

    title = "`model.safetensors`: damage to the header, truncation anywhere"
    file = "model.safetensors"
    inputs = 60
    subjects = ("t5", "rope", "several", "layers")

    def fixed(self) -> list[tuple[Path, Input]]:
        path, data = self.path, self.path.read_bytes()
        lengths = {"0": 0, "2**63": 2**63, "100 MB": 10**8, "one more": int.from_bytes(data[:8], "little") + 1}
        return [
            (path, Input("empty", b"")),
            (path, Input("its last byte is gone", data[:-1])),
            (path, Input("one byte more", data + b"\0")),
            (path, Input("offsets overlap", data.replace(b'"data_offsets":[', b'"data_offsets":[0', 3))),
            *(
                (path, Input(f"header length {what}", length.to_bytes(8, "little") + data[8:]))
                for what, length in lengths.items()
            ),
        ]

    def draw(self, rng: Random) -> tuple[Path, Input]:
        path = rng.choice(self.folders) / self.file
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        if rng.random() < 0.15:
            end = rng.randrange(len(data))
            return path, Input(f"cut at {end} of {len(data)}", data[:end])
        what, changed = damaged_bytes(data, rng, header)
        return path, Input(f"{path.parent.name}: {what}", changed)


class WeightsIndex(Checkpoint):
    """Structured mutation of the index of a checkpoint in several files."""

    title = "`model.safetensors.index.json`: types, missing keys, names of files"
    file = "model.safetensors.index.json"
    inputs = 40
    subjects = ("t5", "several")
    options: Mapping[str, Any] = {"max_shard_size": "20KB"}

    def draw(self, rng: Random) -> tuple[Path, Input]:
        path = rng.choice(self.folders) / self.file
        index = json.loads(path.read_text())
        change = change_of_json(index, [(), ("weight_map",)], rng)
        return path, Input(str(change), json_bytes(change.applied(index)), change.neutral)
