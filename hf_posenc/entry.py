"""Detection of configs of patched models. It imports nothing, because every `from_pretrained` uses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Start of the `model_type` of a patched model in `config.json`.
MODEL_TYPE = "hf_posenc"
#: The whole `model_type`. Programs without this package quote it in their error, so it says what to do.
STORED_MODEL_TYPE = f"{MODEL_TYPE} (install this package, then import it before loading)"
#: How to install this package. It is not on PyPI, where others could take its name, so no message names it there.
INSTALL = "`pip install .` in a clone of its repository"
#: The attribute of a config, and of a base model, that holds the position encoding.
ATTRIBUTE = "position_encoding"
#: Version of the entry. Since version 2, the weights name their scheme too (`patching/place/record.py`).
FORMAT = 2
#: The name of a module's extra state in torch state dicts.
MARK = "_extra_state"


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
