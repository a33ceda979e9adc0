"""The verb `hf-posenc schemes`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from typing import Any

from hf_posenc.schemes.config import SchemeConfig

REQUIRED = "required"


def schemes(options: argparse.Namespace) -> int:
    """`hf-posenc schemes`: all schemes and arrangements, or what the named ones are and take."""
    import hf_posenc
    from hf_posenc.metrics.tables import format_table

    known = [hf_posenc.get_scheme(name) for name in hf_posenc.list_schemes()]
    known += [found for found in hf_posenc.schemes.registered_configs() if found.combinator]
    shown = [hf_posenc.get_scheme(name) for name in options.names] or known
    if options.json:
        print(json.dumps([_entry(found) for found in shown], indent=2))
    elif options.names:
        print("\n\n".join(_description(found) for found in shown))
    else:
        for headline in ("scheme", "arrangement"):
            rows = [
                [
                    found.name,
                    _summary(found),
                    "  ".join(f"{name}={text}" for name, text in _default_texts(found).items()),
                ]
                for found in shown
                if found.combinator == (headline == "arrangement")
            ]
            print(format_table([headline, "what it is", "options"], rows), end="\n\n")
        print("hf-posenc schemes NAME shows one with the types of its options.")
    return 0


def is_complete(name: str) -> bool:
    """Whether a scheme needs no options."""
    import hf_posenc

    return REQUIRED not in _defaults(hf_posenc.get_scheme(name)).values()


def _entry(found: type[SchemeConfig]) -> dict[str, Any]:
    defaults = {name: _plain(value) for name, value in _defaults(found).items()}
    return {"name": found.name, "summary": _summary(found), "arrangement": found.combinator, "options": defaults}


def _description(found: type[SchemeConfig]) -> str:
    from hf_posenc.metrics.tables import format_table

    types = {field.name: field.type for field in dataclasses.fields(found)}
    rows = [
        [name, kind if isinstance((kind := types[name]), str) else getattr(kind, "__name__", str(kind)), text]
        for name, text in _default_texts(found).items()
    ]
    options = format_table(["option", "type", "default"], rows) if rows else "It has no options."
    more = f"More: help({found.__module__}.{found.__name__})"
    return "\n".join([found.name, _summary(found), "", options, "", more])


def _summary(found: type[SchemeConfig]) -> str:
    """The first paragraph of the docstring in one line."""
    return " ".join((inspect.getdoc(found) or "").strip().split("\n\n")[0].split())


def _defaults(found: type[SchemeConfig]) -> dict[str, Any]:
    return {field.name: _default(field) for field in dataclasses.fields(found)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def _default_texts(found: type[SchemeConfig]) -> dict[str, str]:
    """As they are typed: a nested scheme is its name."""
    return {
        name: value.name if isinstance(value, SchemeConfig) else str(value) for name, value in _defaults(found).items()
    }


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value
