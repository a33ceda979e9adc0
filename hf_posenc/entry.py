"""How a config is recognised as that of a patched model. Imports nothing, because every `from_pretrained` asks."""

from __future__ import annotations

from typing import Any

#: `model_type` of a patched model in `config.json`.
MODEL_TYPE = "hf_posenc"
#: The attribute of a config, and of a base model, that holds the position encoding.
ATTRIBUTE = "position_encoding"


def read_entry(config: Any) -> dict[str, Any] | None:
    """The scheme dictionary a config carries, or `None` for the config of a stock model."""
    entry = getattr(config, "__dict__", {}).get(ATTRIBUTE)
    return entry if isinstance(entry, dict) and isinstance(entry.get("scheme"), str) else None


def is_on_disk_form(config: Any) -> bool:
    """Whether a dictionary read from `config.json` describes a patched model."""
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE
