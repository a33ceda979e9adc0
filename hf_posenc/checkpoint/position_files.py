"""`position_encoding.json` and `position_encoding.safetensors`: a scheme without its model.

They are saved next to a PEFT adapter or in a separate folder. The JSON file contains the scheme, a fingerprint of the
weights it was trained on, and the hash of the other file, which contains the scheme's parameters, if it has any. Each
file is replaced atomically, the JSON file last. So an interrupted save leaves the old pair, the new pair, or a pair
with a wrong hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from hf_posenc.checkpoint.configuration import CheckpointError, is_length
from hf_posenc.patching.find.fingerprint import Fingerprint, check_entry
from hf_posenc.schemes import SchemeConfig, scheme_from_dict
from hf_posenc.version import __version__

JSON_FILE = "position_encoding.json"
TENSORS_FILE = "position_encoding.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class PositionFiles:
    """The contents of the two files.

    Attributes:
        scheme: the output of `SchemeConfig.to_dict`.
        base_model_type: `config.model_type` of the base model.
        fingerprint: fingerprint of its weights.
        parameters: parameters of the scheme, by their names in `model.position_encoding`.
        adapter: hub id or folder of the PEFT adapter on top, if it is in another place.
        length: the context length set with `extend_context`, or `None`. Files of older versions have none.
    """

    scheme: dict[str, Any]
    base_model_type: str
    fingerprint: Fingerprint
    parameters: Mapping[str, Tensor]
    adapter: str | None = None
    length: int | None = None

    @property
    def config(self) -> SchemeConfig:
        """The scheme."""
        return scheme_from_dict(self.scheme)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes both files into `folder`, which is created if needed."""
        directory = Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        data = save({name: tensor.contiguous() for name, tensor in self.parameters.items()}, {"format": "pt"})
        tensors = {"file": TENSORS_FILE, "sha256": hashlib.sha256(data).hexdigest()}
        entry = {
            "format": FORMAT,
            "hf_posenc_version": __version__,
            "base_model_type": self.base_model_type,
            "scheme": self.scheme,
            "parameters": tensors if self.parameters else None,
            "adapter": self.adapter,
            "length": self.length,
            "fingerprint": self.fingerprint,
        }
        if self.parameters:
            replace_file(directory / TENSORS_FILE, data)
        replace_file(directory / JSON_FILE, (json.dumps(entry, indent=1) + "\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file atomically."""
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def find_file(source: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path | None:
    """Finds a file of a folder or of a hub repository; `None` if it does not exist or cannot be downloaded.

    Args:
        source: folder or hub id.
        name: name of the file.
        hub: arguments of `hf_hub_download`; others are ignored.
    """
    subfolder = hub.get("subfolder") or ""
    if os.path.isdir(source):
        path = Path(source, subfolder, name)
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    names = ("cache_dir", "revision", "token", "local_files_only", "force_download", "repo_type", "proxies")
    given = {key: hub[key] for key in names if hub.get(key) is not None}
    try:
        return Path(hf_hub_download(str(source), name, subfolder=subfolder or None, **given))
    except (HfHubHTTPError, OSError, HFValidationError):
        return None


def read_position_files(source: str | os.PathLike[str], hub: Mapping[str, Any]) -> PositionFiles | None:
    """Reads both files of a folder or of a hub repository; `None` if there are none.

    Raises:
        CheckpointError: for files that are damaged, do not belong together, or are in a newer format.
    """
    path = find_file(source, JSON_FILE, hub)
    if path is None:
        return None
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{JSON_FILE} in {source} is not readable JSON: {error} {_SAVE_AGAIN}") from error
    written = entry.get("format") if isinstance(entry, dict) else None
    if type(written) is not int or written < 1:
        raise CheckpointError(f"{JSON_FILE} in {source} has the format {written!r}; expected 1. {_SAVE_AGAIN}")
    if written > FORMAT:
        raise CheckpointError(
            f"{JSON_FILE} in {source} is in format {written}, from hf_posenc {entry.get('hf_posenc_version', '?')}; "
            f"this version reads up to format {FORMAT}. Update hf_posenc."
        )
    files = PositionFiles(
        scheme=_field(entry, "scheme", dict, source),
        base_model_type=_field(entry, "base_model_type", str, source),
        fingerprint=_checked_fingerprint(_field(entry, "fingerprint", dict, source), source),
        parameters=_read_parameters(entry.get("parameters"), source, hub),
        adapter=None if entry.get("adapter") is None else _field(entry, "adapter", str, source),
        length=None if entry.get("length") is None else _field(entry, "length", int, source),
    )
    if files.length is not None and not is_length(files.length):
        raise CheckpointError(
            f"{JSON_FILE} in {source} has the length {files.length!r}; expected a number of tokens. {_SAVE_AGAIN}"
        )
    try:
        _ = files.config
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"The scheme in {JSON_FILE} of {source} cannot be built: {error} If another package registers it, import "
            "that package before loading; if a newer hf_posenc wrote it, update hf_posenc."
        ) from error
    return files


_SAVE_AGAIN = "The file was edited or damaged; save it again from the model."


def _field(entry: dict[str, Any], name: str, kind: type, source: Any) -> Any:
    value = entry.get(name)
    if not isinstance(value, kind):
        raise CheckpointError(
            f"{JSON_FILE} in {source} has {value!r} under {name!r}, where a {kind.__name__} is expected. {_SAVE_AGAIN}"
        )
    return value


def _checked_fingerprint(found: dict[str, Any], source: Any) -> Fingerprint:
    for name, entry in found.items():
        try:
            check_entry(entry)
        except ValueError as error:
            raise CheckpointError(
                f"The fingerprint of {name!r} in {JSON_FILE} of {source} is damaged: {error}. {_SAVE_AGAIN}"
            ) from error
    return found


def _read_parameters(entry: Any, source: Any, hub: Mapping[str, Any]) -> dict[str, Tensor]:
    if entry is None:
        return {}
    expected = entry.get("sha256") if isinstance(entry, dict) else None
    path = find_file(source, TENSORS_FILE, hub)
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
