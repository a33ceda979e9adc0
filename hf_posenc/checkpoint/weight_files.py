"""Reads the schemes named in weight files, from headers and indices, without reading other tensors."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.configuration import from_disk
from hf_posenc.entry import ATTRIBUTE, find_marks, is_on_disk_form
from hf_posenc.patching.place.mark import marked_scheme


def named_schemes(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the schemes named by weights, by the keys of their marks; empty for weights of a stock model.

    Args:
        path: a weight file in the safetensors or torch format, or the index of several.
    """
    if path.suffix != ".json":
        return {key: marked_scheme(mark) for key, mark in _marks_in(path).items()}
    index = json.loads(path.read_text(encoding="utf-8"))
    shards = index.get("weight_map", index)
    found: dict[str, dict[str, Any]] = {}
    for shard in {shards[key] for key in find_marks(shards)}:
        found |= named_schemes(path.parent / shard)
    return found


def schemes_of_older_version(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the scheme in the config next to weights of an older version that do not name a scheme."""
    config = path.parent / "config.json"
    disk = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if not is_on_disk_form(disk):
        return {}
    entry = from_disk(disk, str(path.parent))[ATTRIBUTE]
    if entry["format"] >= 2:
        return {}
    warnings.warn(
        f"{path.parent} was saved by an older hf_posenc, whose weights do not name their scheme, so it cannot be "
        "checked whether they belong to the config in the same folder. Save the model again to store the scheme with "
        "the weights.",
        UserWarning,
        stacklevel=5,
    )
    return {ATTRIBUTE: entry["scheme"]}


def _marks_in(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in find_marks(file.keys())}
    import torch

    # torch can memory-map files in its current format but not in its legacy format.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {key: state[key] for key in find_marks(state)} if isinstance(state, dict) else {}
