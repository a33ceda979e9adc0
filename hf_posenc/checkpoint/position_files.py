"""`position_encoding.json` and `position_encoding.safetensors`: a scheme without its model.

They are saved next to a PEFT adapter or in a separate folder. The JSON file contains the scheme, a fingerprint of the
weights it was trained on, and the hashes of the file with the scheme's parameters, if it has any, of the weights of the
adapter, and of its own content. Each file is replaced atomically, the JSON file last. So an interrupted save leaves the
old files, the new ones, or files with a wrong hash, and an edited file has a wrong hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from hf_posenc.checkpoint.atomic_folder import replace_file
from hf_posenc.checkpoint.configuration import CheckpointError, built_scheme, check_format, damaged, is_length
from hf_posenc.entry import find_file
from hf_posenc.patching.anatomy.weights import Fingerprint, check_entry
from hf_posenc.schemes import SchemeConfig
from hf_posenc.schemes.validation import shown
from hf_posenc.version import __version__

JSON_FILE = "position_encoding.json"
TENSORS_FILE = "position_encoding.safetensors"
#: Since format 2, the file has the hash of its content, and that of an adapter's weights.
FORMAT = 2
#: The weights of a PEFT adapter. If both exist, PEFT reads the first.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class PositionFiles:
    """The contents of the two files.

    Attributes:
        config: the scheme.
        base_model_type: `config.model_type` of the base model.
        fingerprint: fingerprint of its weights.
        parameters: parameters of the scheme, by their names in `model.position_encoding`.
        adapter: hub id or folder of the PEFT adapter on top, if it is in another place.
        length: the context length set with `extend_context`, or `None`. Files of older versions have none.
    """

    config: SchemeConfig
    base_model_type: str
    fingerprint: Fingerprint
    parameters: Mapping[str, Tensor]
    adapter: str | None = None
    length: int | None = None

    def write(self, folder: str | os.PathLike[str], *, beside_adapter: bool = False) -> None:
        """Writes both files.

        Args:
            folder: created if needed.
            beside_adapter: whether they belong to the adapter whose weights were just written there.
        """
        directory = Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        data = save({name: tensor.contiguous() for name, tensor in self.parameters.items()}, {"format": "pt"})
        tensors = {"file": TENSORS_FILE, "sha256": hashlib.sha256(data).hexdigest()}
        weights = [path for name in ADAPTER_WEIGHTS if (path := directory / name).is_file()] if beside_adapter else []
        newest = max(weights, key=lambda path: path.stat().st_mtime_ns, default=None)
        entry = {
            "format": FORMAT,
            "hf_posenc_version": __version__,
            "base_model_type": self.base_model_type,
            "scheme": self.config.to_dict(),
            "parameters": tensors if self.parameters else None,
            "adapter": self.adapter,
            "length": self.length,
            "fingerprint": self.fingerprint,
            "adapter_weights": None if newest is None else _hash_of_file(newest),
        }
        entry["sha256"] = hash_of(entry)
        if self.parameters:
            replace_file(directory / TENSORS_FILE, data)
        replace_file(directory / JSON_FILE, (json.dumps(entry, indent=1) + "\n").encode())


def hash_of(entry: Mapping[str, Any]) -> str:
    """The hash of a dictionary as JSON stores it, without the key for the hash itself."""
    content = json.loads(json.dumps({name: value for name, value in entry.items() if name != "sha256"}))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_hash(entry: Mapping[str, Any], expected: Any, file: str) -> None:
    """Raises `CheckpointError` if the content of a file was edited."""
    if expected != hash_of(entry):
        raise CheckpointError(
            f"{file} was edited after it was saved: its content does not match its hash. The scheme in it may not be "
            "the one that was trained. Restore the file, or save it again from the model. To use another scheme with "
            "the same base, call patch_model."
        )


def _hash_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_position_files(source: str | os.PathLike[str], hub: Mapping[str, Any]) -> PositionFiles | None:
    """Reads both files of a folder or of a hub repository; `None` if there are none.

    Raises:
        CheckpointError: for files that are damaged, do not belong together, or are in a newer format.
    """
    path = find_file(source, JSON_FILE, hub, download=True)
    if path is None:
        return None
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(source, f"no readable JSON ({error})", file=JSON_FILE) from error
    check_format(entry, FORMAT, source, JSON_FILE)
    if entry["format"] >= 2 or "sha256" in entry:
        check_hash(entry, entry.get("sha256"), f"{JSON_FILE} in {source}")
    _check_adapter_weights(entry.get("adapter_weights"), source, hub)
    files = PositionFiles(
        config=built_scheme(_field(entry, "scheme", dict, source), source, JSON_FILE),
        base_model_type=_field(entry, "base_model_type", str, source),
        fingerprint=_checked_fingerprint(_field(entry, "fingerprint", dict, source), source),
        parameters=_read_parameters(entry.get("parameters"), source, hub),
        adapter=None if entry.get("adapter") is None else _field(entry, "adapter", str, source),
        length=None if entry.get("length") is None else _field(entry, "length", int, source),
    )
    if files.length is not None and not is_length(files.length):
        raise damaged(source, f"the length {files.length!r}", "a number of tokens", file=JSON_FILE)
    return files


def _field(entry: dict[str, Any], name: str, kind: type, source: Any) -> Any:
    value = entry.get(name)
    if not isinstance(value, kind):
        expected = {dict: "a dictionary", str: "a string", int: "an integer"}[kind]
        raise damaged(source, f"{shown(value)} under {name!r}", expected, file=JSON_FILE)
    return value


def _checked_fingerprint(entries: dict[str, Any], source: Any) -> Fingerprint:
    for name, entry in entries.items():
        try:
            check_entry(entry)
        except ValueError as error:
            found_there = f"a fingerprint of {name!r} that cannot be read ({error})"
            raise damaged(source, found_there, file=JSON_FILE) from error
    return entries


def _check_adapter_weights(expected: Any, source: Any, hub: Mapping[str, Any]) -> None:
    if expected is None:
        return
    paths = (find_file(source, name, hub, download=True) for name in ADAPTER_WEIGHTS)
    path = next((path for path in paths if path is not None), None)
    if path is None or _hash_of_file(path) != expected:
        problem = "misses the weights" if path is None else f"has another {path.name} than those"
        raise CheckpointError(
            f"{source} {problem} that {JSON_FILE} there was saved with: the files come from different saves, or saving "
            "was interrupted. The weights may have been trained with another scheme. Copy all files of one save, or "
            "save the adapter again."
        )


def _read_parameters(entry: Any, source: Any, hub: Mapping[str, Any]) -> dict[str, Tensor]:
    if entry is None:
        return {}
    expected = entry.get("sha256") if isinstance(entry, dict) else None
    path = find_file(source, TENSORS_FILE, hub, download=True)
    if path is None:
        raise CheckpointError(
            f"{source} has {JSON_FILE}, but not {TENSORS_FILE}, which contains the parameters of the scheme. Copy "
            "both files."
        )
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(
            f"{TENSORS_FILE} in {source} is not the file that {JSON_FILE} there was written with: one of them comes "
            "from another save, or saving was interrupted. Save both again from the model."
        )
    return load(data)
