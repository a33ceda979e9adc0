"""The schemes that files of weights and folders of checkpoints name. Only the marks are read."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_posenc.checkpoint.adapter_config import names_a_scheme
from hf_posenc.checkpoint.agreement import NamedSchemes, check_shard, of_variant, read_index, warn_of_older_version
from hf_posenc.checkpoint.configuration import from_disk
from hf_posenc.checkpoint.position_files import read_position_files
from hf_posenc.entry import ADAPTER_CONFIG, ATTRIBUTE, find_file, find_marks, stored_config

#: Weight files of a whole model: indices of shards or single files.
WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors", "pytorch_model.bin")
#: A file that FSDP saves in addition, without a mark.
_FSDP_WEIGHTS = "pytorch_model_fsdp.bin"


def named_schemes(path: Path) -> NamedSchemes:
    """The schemes that a weight file, or the index of several, names.

    Weights of an older version do not name a scheme. They belong to the config next to them.
    """
    schemes = _marks_in(path)
    if not schemes and (disk := stored_config(path.parent, {})) is not None:
        entry = from_disk(disk, str(path.parent))[ATTRIBUTE]
        if entry["format"] < 2:
            warn_of_older_version(path.parent)
            return NamedSchemes(str(path), {ATTRIBUTE: entry["scheme"]})
    return NamedSchemes.of(schemes, str(path))


def schemes_of_checkpoint(folder: Path) -> NamedSchemes | None:
    """The schemes that the folder of a checkpoint names; `None` if it does not say whether its weights have one."""
    file = next((folder / name for name in (*WEIGHTS, _FSDP_WEIGHTS) if (folder / name).is_file()), None)
    if file is not None and ((named := named_schemes(file)).schemes or file.name != _FSDP_WEIGHTS):
        return named
    stock = NamedSchemes(str(folder), {})
    if (folder / ADAPTER_CONFIG).is_file() and not names_a_scheme(folder, {}):
        return stock
    beside_adapter = read_position_files(folder, {})
    if beside_adapter is not None:
        return NamedSchemes(str(folder), {ATTRIBUTE: beside_adapter.config.to_dict()})
    disk = stored_config(folder, {})
    if disk is not None:  # FSDP has saved the weights in shards, or in a file without a mark.
        return NamedSchemes(str(folder), {ATTRIBUTE: from_disk(disk, str(folder))[ATTRIBUTE]["scheme"]})
    return stock if file is not None or (folder / "config.json").is_file() else None


def schemes_of_source(source: Any, arguments: dict[str, Any]) -> NamedSchemes | None:
    """The schemes that the weights name which `from_pretrained` reads; `None` if it finds no local file.

    Args:
        source: the first argument of `from_pretrained`.
        arguments: its other arguments.
    """
    if arguments.get("state_dict") is not None:
        return NamedSchemes.of(arguments["state_dict"])
    names = [of_variant(name, arguments.get("variant")) for name in reversed(WEIGHTS)]
    if arguments.get("use_safetensors") is not False:
        names.sort(key=lambda name: "safetensors" not in name)
    files = (find_file(source, name, arguments) for name in names)
    file = next(filter(None, files), None)
    return None if file is None else named_schemes(file)


def _marks_in(path: Path) -> dict[str, Any]:
    if path.suffix != ".json":
        with path.open("rb") as raw:  # Loaders accept any name. The header of safetensors is JSON after its length.
            is_safe = raw.read(9)[8:] == b"{"
        if is_safe:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in find_marks(file.keys())}
        # torch can memory-map files in its current format but not in its legacy format.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return {key: state[key] for key in find_marks(state)} if isinstance(state, dict) else {}
    index = read_index(path)
    shards = index.get("weight_map", index)
    marks: dict[str, Any] = {}
    for shard in {shards[key] for key in find_marks(shards)}:
        marks |= _marks_in(path.parent / shard)
    for shard in set(shards.values()) if marks else ():
        check_shard(index, path.parent / shard)
    return marks
