"""Labels of schemes for tables, figures, reports and messages."""

from __future__ import annotations

import dataclasses

from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig, SubConfig


def scheme_label(config: SchemeConfig) -> str:
    """Returns the name and the non-default options, such as `rope` or `rope(theta=500000, yarn x4)`.

    For the schemes of parts, the label names the parts: `text: alibi; vision: rope_nd`.
    """
    if isinstance(config, PartsConfig):
        return "; ".join(f"{part}: {scheme_label(scheme)}" for part, scheme in config.by_part().items())
    changed = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            text = _value_label(value)
            changed.append(text if isinstance(value, SubConfig) else f"{field.name}={text}")
    return config.name + (f"({', '.join(changed)})" if changed else "")


def _value_label(value: object) -> str:
    if isinstance(value, SchemeConfig):
        return scheme_label(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_value_label(item) for item in value) + "]"
    if isinstance(value, SubConfig):
        factor = getattr(value, "factor", None)
        return f"{value.type} x{factor:g}" if isinstance(factor, int | float) else value.type
    return f"{value:g}" if isinstance(value, float) else str(value)
