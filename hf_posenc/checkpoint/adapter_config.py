"""`adapter_config.json` of a PEFT adapter that was trained on a patched model.

A process without this package must not load such an adapter into a model with stock positions, but PEFT ignores unknown
files and keys. Therefore the adapter type is a sentence: PEFT does not know this type and shows it in its error. Fields
that other programs read without checking the type (rank, target modules) are moved into a nested entry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.configuration import CheckpointError, check_format
from hf_posenc.checkpoint.position_files import ADAPTER_WEIGHTS, JSON_FILE, check_hash, find_file, hash_of, replace_file
from hf_posenc.entry import ATTRIBUTE, INSTALL

CONFIG_FILE = "adapter_config.json"
FORMAT = 1
SENTENCE = (
    "hf_posenc: this adapter was trained on a model with a position encoding of the package hf_posenc, which this "
    f"process did not import. Install it ({INSTALL}), and `import hf_posenc` before loading the adapter"
)
#: The fields that programs read to find the base model.
_TOP_LEVEL_FIELDS = ("base_model_name_or_path", "revision")


def is_marked(config: Any) -> bool:
    """Whether the contents of `adapter_config.json` belong to an adapter of a patched model."""
    return isinstance(config, dict) and str(config.get("peft_type", "")).startswith("hf_posenc:")


def marked(config: dict[str, Any], scheme: dict[str, Any]) -> dict[str, Any]:
    """Converts the config of an adapter that was trained with a scheme to its form on disk."""
    visible = {name: config[name] for name in _TOP_LEVEL_FIELDS if name in config}
    entry = {"format": FORMAT, "file": JSON_FILE, "scheme": scheme, "sha256": hash_of(scheme), "adapter": config}
    return {"peft_type": SENTENCE, **visible, ATTRIBUTE: entry}


def unmarked(disk: dict[str, Any], source: str) -> dict[str, Any]:
    """Restores the config that PEFT wrote. Top-level fields take precedence, so that edits of the base model's name
    work.

    Raises:
        CheckpointError: for a file that is damaged or in a newer format.
    """
    entry = disk.get(ATTRIBUTE)
    config = entry.get("adapter") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise CheckpointError(
            f"{source} is marked as the config of an adapter of a patched model, but its {ATTRIBUTE!r} entry does not "
            "contain the config of the adapter. The file was edited or damaged; save the adapter again."
        )
    check_format(entry, FORMAT, Path(source).parent, CONFIG_FILE)
    return config | {name: disk[name] for name in _TOP_LEVEL_FIELDS if name in disk}


def scheme_of(disk: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the scheme in a marked config; empty if an older version wrote it.

    Raises:
        CheckpointError: if it was edited.
    """
    scheme, expected = disk[ATTRIBUTE].get("scheme"), disk[ATTRIBUTE].get("sha256")
    scheme = scheme if isinstance(scheme, dict) else {}
    if expected is not None:
        check_hash(scheme, expected, source)
    return scheme


def write_marked(path: Path, scheme: dict[str, Any]) -> None:
    """Marks a file that PEFT has written. The file is replaced atomically."""
    config = json.loads(path.read_text(encoding="utf-8"))
    replace_file(path, json.dumps(marked(config, scheme), indent=2, sort_keys=True).encode())


def names_a_scheme(source: str | os.PathLike[str], hub: Mapping[str, Any]) -> bool:
    """Whether a folder or hub id holds an adapter of a patched model."""
    path = find_file(source, CONFIG_FILE, hub)
    if path is None:
        return False
    try:
        return is_marked(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:
        return False  # PEFT reports the broken file


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a local folder has the weights or the config of a PEFT adapter."""
    return any(Path(folder, name).is_file() for name in (CONFIG_FILE, *ADAPTER_WEIGHTS))
