"""Detection of patched models, in memory and on disk. It imports nothing large: every `from_pretrained` uses it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_posenc.version import REPOSITORY

#: How to install this package. It is not on PyPI, where others could take its name, so no message names it there.
INSTALL = f"pip install git+{REPOSITORY}"
#: Start of the `model_type` of a patched model in `config.json`.
MODEL_TYPE = "hf_posenc"
#: The whole `model_type`. Programs without this package quote it in their error, and transformers then advises to
#: update transformers. So it says what to do instead.
STORED_MODEL_TYPE = (
    f"{MODEL_TYPE} ({INSTALL}, then import hf_posenc before loading this model; updating Transformers does not help)"
)
#: Prefix of the names of classes under `architectures` in `config.json`.
CLASS_PREFIX = f"{MODEL_TYPE}."
#: The attribute of a config, and of a base model, that holds the position encoding.
ATTRIBUTE = "position_encoding"
#: The attribute of a config whose model runs the code of an export to "remote_code".
REMOTE_CODE = "position_parts"
#: Version of the entry. Since version 2, the weights name their scheme too (`patching/place/record.py`).
FORMAT = 2
#: The name of a module's extra state in torch state dicts.
MARK = "_extra_state"
#: The attribute of a PEFT config in memory that holds the scheme of its adapter. It is no field of the dataclass, so it
#: is not saved and not included in `to_dict`.
ADAPTER_SCHEME = "_hf_posenc_scheme"
#: The config of a PEFT adapter in its folder.
ADAPTER_CONFIG = "adapter_config.json"
#: Maximum number of bytes of a `config.json` that are read to detect a patched model.
_LARGEST_CONFIG = 2**24
#: Arguments that say where `find_file` looks.
_PLACES = ("cache_dir", "revision", "subfolder", "token", "force_download", "repo_type", "proxies", "local_files_only")


def read_entry(config: Any) -> dict[str, Any] | None:
    """Returns the scheme dictionary in a config, or `None` for the config of a stock model."""
    entry = read_fields(config)
    return None if entry is None else entry["scheme"]


def read_fields(config: Any) -> dict[str, Any] | None:
    """Returns the entry of a config, `{"format": ..., "scheme": {"scheme": name, **options}, ...}`, or `None`.

    Configs of other projects may have an attribute with the same name, so the format is checked.
    """
    entry = getattr(config, "__dict__", {}).get(ATTRIBUTE)
    return entry if is_entry(entry) else None


def is_entry(value: Any) -> bool:
    """Whether a value found under `ATTRIBUTE` is an entry of this package."""
    if not isinstance(value, dict) or type(value.get("format")) is not int:
        return False
    scheme = value.get("scheme")
    return isinstance(scheme, dict) and isinstance(scheme.get("scheme"), str)


def is_on_disk_form(config: Any) -> bool:
    """Whether a dictionary read from `config.json` describes a patched model."""
    return isinstance(config, dict) and is_stored_model_type(config.get("model_type"))


def is_stored_model_type(value: Any) -> bool:
    """Whether a `model_type` is that of a patched model, with any instruction after it."""
    return isinstance(value, str) and value.partition(" ")[0] == MODEL_TYPE


def find_marks(names: Iterable[str]) -> list[str]:
    """Returns the keys of a state dict that hold the schemes of its weights."""
    whole = f"{ATTRIBUTE}.{MARK}"
    return [name for name in names if name.endswith(whole) and name[: -len(whole)][-1:] in ("", ".")]


def find_mark(names: Iterable[str]) -> str | None:
    """Returns the first of these keys, if there is one."""
    return next(iter(find_marks(names)), None)


def find_position_weight(names: Iterable[str]) -> str | None:
    """Returns the first key of a state dict that holds a position weight or a mark."""
    inside = f"{ATTRIBUTE}.stacks."
    weights = (name for name in names if name.startswith(inside) or f".{inside}" in name)
    return find_mark(names) or next(weights, None)


def is_patched(source: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether `source` has a local `config.json` of a patched model."""
    return stored_config(source, arguments) is not None


def stored_config(source: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the content of the local `config.json` of a patched model; `None` for any other `source`."""
    text = read_config(source, arguments)
    if text is None or f'"{MODEL_TYPE}' not in text:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None  # the stock code reports the broken file
    return config if is_on_disk_form(config) else None


def read_config(source: Any, arguments: Mapping[str, Any]) -> str | None:
    """Returns the text of a local `config.json`; `None` if it is missing or too large."""
    if isinstance(source, str | os.PathLike) and os.path.isfile(source):
        path = Path(source) if str(source).endswith(".json") else None
    else:
        path = find_file(source, "config.json", arguments)
    if path is None or path.stat().st_size > _LARGEST_CONFIG:
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def find_file(source: Any, name: str, arguments: Mapping[str, Any], *, download: bool = False) -> Path | None:
    """Finds a file of a folder or of a hub repository; `None` if it does not exist or cannot be downloaded.

    Args:
        source: folder or hub id; there are no files for anything else.
        name: name of the file.
        arguments: those of `hf_hub_download`; others are ignored.
        download: whether to ask the hub for a file that is not in the cache.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    from transformers.utils import cached_file

    given = {key: arguments[key] for key in _PLACES if arguments.get(key) is not None}
    given |= {} if download else {"local_files_only": True, "force_download": False}
    flags = ("gated_repo", "missing_entries", "connection_errors")
    try:
        path = cached_file(source, name, **given, **{f"_raise_exceptions_for_{flag}": False for flag in flags})
    except OSError:
        return None
    return None if path is None else Path(path)
