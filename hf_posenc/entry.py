"""How a config is recognised as that of a patched model. Imports nothing, because every `from_pretrained` asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: `model_type` of a patched model in `config.json`.
MODEL_TYPE = "hf_posenc"
#: The attribute of a config, and of a base model, that holds the position encoding.
ATTRIBUTE = "position_encoding"
#: Version of the entry. From 2 on the weights name their scheme too (`patching/place/mark.py`).
FORMAT = 2
#: The name that torch gives the extra state of a module in a state dict.
MARK = "_extra_state"


def read_entry(config: Any) -> dict[str, Any] | None:
    """The scheme dictionary a config carries, or `None` for the config of a stock model."""
    entry = read_fields(config)
    return None if entry is None else entry["scheme"]


def read_fields(config: Any) -> dict[str, Any] | None:
    """The whole entry of a config, `{"format": ..., "scheme": {"scheme": name, **options}, ...}`, or `None`.

    The stock config of another project may have an attribute of the same name: only the format makes it ours.
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
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def find_marks(names: Iterable[str]) -> list[str]:
    """The keys under which a state dict names the schemes of its weights, among all of its keys."""
    whole = f"{ATTRIBUTE}.{MARK}"
    return [name for name in names if name.endswith(whole) and name[: -len(whole)][-1:] in ("", ".")]


def find_mark(names: Iterable[str]) -> str | None:
    """The first of these keys, if there is one."""
    return next(iter(find_marks(names)), None)


def find_position_weight(names: Iterable[str]) -> str | None:
    """The first key of a position weight, or of a mark, among those of a state dict."""
    inside = f"{ATTRIBUTE}.stacks."
    found = (name for name in names if name.startswith(inside) or f".{inside}" in name)
    return find_mark(names) or next(found, None)
