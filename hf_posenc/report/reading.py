"""Reads data from JSON as typed classes. An error names the key, what was found and what was expected."""

from __future__ import annotations

import json
import reprlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from hf_posenc.installation import require

if TYPE_CHECKING:
    from pydantic import ValidationError


def read_as(kind: Any, content: Any) -> Any:
    """Returns JSON-ready content as a dataclass, whose `__pydantic_config__` says how strict to be. Needs pydantic.

    Raises:
        ValueError: if a value does not fit.
    """
    require("A file with results", "pydantic")
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(json.dumps(content))
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        if error.errors()[0]["type"] == "unexpected_keyword_argument":
            for key in place[:-1]:
                kind = get_type_hints(kind)[key] if isinstance(key, str) else get_args(kind)[0]
            known = ", ".join(field.name for field in fields(kind))
            raise ValueError(f"{'.'.join(map(str, place))} is not known; expected the keys {known}.") from error
        raise ValueError(f"{described(error)}.") from error


def described(error: ValidationError, prefix: str = "") -> str:
    """Returns the first problem of a validation, without a period. Keys have the prefix."""
    problem = error.errors(include_url=False)[0]
    place = prefix + ".".join(map(str, problem["loc"])) if problem["loc"] else ""
    found = f"{place or 'The whole'} is {reprlib.repr(problem['input'])}"
    said = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if problem["type"] == "missing":
        return f"{place} is missing; expected a value"
    if problem["type"] == "value_error":
        # The message of a check on several values names them.
        where = place if isinstance(problem["input"], dict) else found
        return f"{where}: {said}" if place else said
    return f"{found}; {said if 'expected' in said else f'expected: {said}'}"
