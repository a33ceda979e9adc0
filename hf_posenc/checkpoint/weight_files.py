"""What weight files say about themselves: the schemes that they name, and which shards were saved together.

Only headers, indices and a few bytes of each tensor are read.

One shard of several names the scheme. So that the others cannot be those of another model, the index holds a digest of
each shard. It is added to the index that transformers has written; other programs ignore it. An index without digests,
of a stock tool or of an older version, is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.atomic_folder import variant_of
from hf_posenc.checkpoint.configuration import CheckpointError, from_disk
from hf_posenc.entry import ATTRIBUTE, find_marks, is_on_disk_form
from hf_posenc.patching.place.record import marked_scheme

#: The key of the digests in the metadata of an index, `{"hf_posenc_shards": {file: digest}}`.
_SHARDS = "hf_posenc_shards"
#: Number of bytes that are read at each of a few places of a tensor.
_SAMPLE, _PLACES = 64, 4


def record_shards(folder: Path) -> None:
    """Adds the digests of the shards to every index of safetensors in a folder."""
    for path in folder.glob("*.safetensors.index*.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        digests = {shard: _digest(folder / shard) for shard in set(index["weight_map"].values())}
        index["metadata"][_SHARDS] = digests
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_shard(index: dict[str, Any], path: Path) -> None:
    """Compares a shard with the digest in its index.

    Args:
        index: the contents of the index.
        path: the shard.

    Raises:
        CheckpointError: if they differ.
    """
    metadata = index.get("metadata")
    digests = metadata.get(_SHARDS) if isinstance(metadata, dict) else None
    if digests is None or path.suffix != ".safetensors":  # A tool has converted the files, and kept the metadata.
        return
    try:
        same = digests[path.name] == _digest(path)
    except (OSError, ValueError, LookupError, TypeError):  # one of them is damaged
        same = False
    if not same:
        raise CheckpointError(
            f"{path} is not the file that the index next to it was saved with: it comes from another save, was edited, "
            "or is being replaced by a save that goes on. Its weights may belong to another position encoding. Copy "
            "all files of one save together, or save the model again. If the change is intended, remove "
            f"{_SHARDS!r} from the index."
        )


def files_read(source: Any, subfolder: str) -> dict[str, tuple[int, ...]] | None:
    """Identifies the files of a model in a local folder. If it changes, they were replaced; `None` for a hub id."""
    folder = os.path.join(source, subfolder) if isinstance(source, str | os.PathLike) else ""
    if not os.path.isdir(folder):
        return None
    found: dict[str, tuple[int, ...]] = {}
    for entry in os.scandir(folder):
        if entry.name == "config.json" or variant_of(entry.name) is not None:
            status = entry.stat()
            found[entry.name] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def _digest(path: Path) -> str:
    """A digest of the header of a safetensors file, and of some bytes of each tensor."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, os.fstat(file.fileno()).st_size))
        digest.update(header)
        places = (entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
        for start, end in sorted(places):
            for number in range(_PLACES):
                file.seek(8 + len(header) + start + max(end - start - _SAMPLE, 0) * number // (_PLACES - 1))
                digest.update(file.read(min(_SAMPLE, end - start)))
    return digest.hexdigest()


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
    for shard in set(shards.values()) if found else ():
        check_shard(index, path.parent / shard)
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
