"""The registry of schemes by name, and their options as text.

Third-party schemes use the same decorator as this package.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar, cast, dataclass_transform

from hf_posenc.errors import UnknownNameError, UsageError
from hf_posenc.extensions import MODULES, import_named_modules
from hf_posenc.other_names import hint_for, hint_for_option
from hf_posenc.schemes.config import SchemeConfig, nesting
from hf_posenc.schemes.validation import DEEPEST_NESTING, check_shape_of_json, declared_checks, kind_of, shown

_SCHEMES: dict[str, type[SchemeConfig]] = {}

ConfigType = TypeVar("ConfigType", bound=type[SchemeConfig])
#: All forms in which a scheme can be passed; a sequence is a combination of several schemes.
SchemeLike = str | SchemeConfig | type[SchemeConfig] | dict[str, Any] | Sequence[Any]


@dataclass_transform(frozen_default=True)
def register_scheme(config_class: ConfigType) -> ConfigType:
    """Class decorator that registers a `SchemeConfig` subclass under its `name`, as a frozen dataclass.

    Raises:
        ValueError: if the class has no lower-case name, if another class has the name, if an option is called
            "scheme" or "type" (keys of the JSON form), has the name of an attribute of every config, or has
            limits that options of its type do not have.
    """
    if "__dataclass_fields__" not in vars(config_class):
        dataclasses.dataclass(frozen=True)(config_class)
    name = config_class.name
    if not name or name != name.lower() or not name.isidentifier():
        raise ValueError(
            f"{config_class.__name__}.name is {name!r}: a scheme needs a lower-case identifier as its name."
        )
    # Where annotations are text and the module cannot be found, dataclasses take class variables for fields.
    options = {field.name for field in dataclasses.fields(config_class) if "ClassVar" not in str(field.type)}
    reserved = options.intersection({"scheme", "type"}.union(dir(SchemeConfig)))
    if reserved:
        raise ValueError(
            f"{config_class.__name__} has an option called {min(reserved)!r}, a key of the JSON form or an attribute "
            "of every config. Call it something else, for example 'inner' or 'kind'."
        )
    declared_checks(cast(Any, config_class))
    _check_name(config_class)
    _SCHEMES[name] = config_class
    return config_class


def _check_name(config_class: type[SchemeConfig]) -> None:
    """Refuses a class whose name belongs to another one, as which a saved model would be read."""
    taken = _SCHEMES.get(config_class.name, config_class)
    places = [(kind.__module__, kind.__qualname__) for kind in (taken, config_class)]
    if places[0] != places[1]:
        raise ValueError(
            f"The scheme name {config_class.name!r} already belongs to {'.'.join(places[0])}. Give "
            f"{config_class.__name__} another name, and register it under that name."
        )


def _registered() -> dict[str, type[SchemeConfig]]:
    """The config classes by name, including those of modules that the environment names."""
    if MODULES in os.environ:
        import_named_modules()
    return _SCHEMES


def list_schemes() -> list[str]:
    """Returns the sorted names of all registered schemes, without combinators."""
    return sorted(name for name, config_class in _registered().items() if not config_class.combinator)


def get_scheme(name: str) -> type[SchemeConfig]:
    """Returns the config class of a scheme.

    Raises:
        UnknownNameError: if no scheme has this name; the message suggests similar names.
    """
    known = _registered()
    try:
        return known[name]
    except KeyError:
        remedy = "For your own scheme, first import the module that registers it; on the command line: --import MODULE."
        raise UnknownNameError(
            "scheme", str(name), known, hint=hint_for(str(name), known), listing="`hf-posenc schemes`", remedy=remedy
        ) from None


def registered_configs() -> list[type[SchemeConfig]]:
    """Returns the config classes of all registered schemes by name, including combinators."""
    return [config_class for _, config_class in sorted(_registered().items())]


def scheme_from_dict(entry: dict[str, Any]) -> SchemeConfig:
    """Builds the config from the output of `SchemeConfig.to_dict`.

    Raises:
        UnknownNameError: for an unknown scheme or option.
        ValueError: if the dictionary names no scheme, or exceeds the limits on nesting and size in
            `hf_posenc.schemes.validation`.
    """
    options = dict(entry)
    name = options.pop("scheme", None)
    if not isinstance(name, str):
        raise ValueError(f"Not a scheme: a dictionary with a name under 'scheme' is expected, got {shown(entry)}.")
    check_shape_of_json(options, f"Scheme {name!r}")
    return get_scheme(name).from_options({option: _with_configs(value) for option, value in options.items()})


def _with_configs(value: Any) -> Any:
    """Returns a value from JSON in which dictionaries that describe schemes are replaced by configs."""
    if isinstance(value, dict) and "scheme" in value:
        return scheme_from_dict(value)
    return tuple(map(_with_configs, value)) if isinstance(value, list | tuple) else value


def as_scheme(value: SchemeLike, option: str = "", /, **options: Any) -> SchemeConfig:
    """Converts any supported form of a scheme to a config. Everything that takes a scheme uses this function.

    Args:
        value: a config, a config class, a name, which may have options ("rope:theta=5e5"), the dictionary of a config,
            or a sequence of these, which are composed.
        option: the option that holds the value, if it is nested in another config; for error messages.
        options: fields of the config, if `value` is a name, a class or a dictionary.

    Raises:
        UnknownNameError: for an unknown scheme or option.
        TypeError: if options are passed with a config or a sequence.
        ValueError: for anything that is not a scheme, an option out of range, a subclass of a scheme without its own
            name, or a nested scheme that is too deep to be wrapped again.
    """
    config = _as_scheme(value, option, options)
    _check_name(type(config))
    depth = nesting(config)
    if option and depth >= DEEPEST_NESTING:
        raise ValueError(
            f"{config.name!r} has {depth} levels of nested schemes; the limit is {DEEPEST_NESTING}, including the "
            "scheme around it."
        )
    return config


def _as_scheme(value: Any, option: str, options: dict[str, Any]) -> SchemeConfig:
    hints = "".join(f" {hint}" for hint in map(hint_for_option, options) if hint)
    if isinstance(value, str) and (":" in value or value.startswith("[")):
        return parse_scheme(value, **options)
    if isinstance(value, str):
        return get_scheme(value).from_options(options)
    if isinstance(value, type) and issubclass(value, SchemeConfig):
        return value.from_options(options)
    if isinstance(value, dict):
        return scheme_from_dict(value | options)
    if isinstance(value, SchemeConfig):
        if options:
            raise TypeError(
                f"{type(value).__name__} is already a config, so the options {sorted(options)} cannot be applied. "
                f"Pass them to its constructor, or use dataclasses.replace.{hints}"
            )
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        if options:
            raise TypeError(f"For a list of schemes, pass options to each scheme instead of {sorted(options)}.{hints}")
        return get_scheme("composed").from_options({"parts": tuple(value)})
    kind = type(value)
    taken = kind.__name__ in {config.__name__ for config in registered_configs()}
    description = f"the {kind.__name__} of {kind.__module__.partition('.')[0]}" if taken else shown(value)
    raise ValueError(
        f"{option + ' is n' if option else 'N'}ot a scheme: {description}; expected a config such as "
        f"hf_posenc.{kind.__name__ if taken else 'AlibiConfig'}(), a name, a dictionary, or a list of these."
    )


def parse_scheme(text: str, pairs: Iterable[str] = (), **options: Any) -> SchemeConfig:
    """Parses `"rope:theta=5e5,layout=half"`, and further options, to a config. A JSON list is composed.

    Raises:
        UnknownNameError: for an unknown scheme or option.
        UsageError: for a value out of range.
    """
    name, _, inline = (f"composed:parts={text}" if text.startswith("[") else text).partition(":")
    config_class = get_scheme(name)
    # The name of a scheme is a text, too: "none".
    texts = [field.name for field in dataclasses.fields(config_class) if kind_of(field) in ("str", "SchemeConfig")]
    # A comma before `name=` separates options; other commas are part of a value, which may be JSON.
    words = re.split(r",\s*(?=\w+=)", inline.strip()) if inline else []
    try:
        return config_class.from_options(parse_options([*words, *pairs], texts) | options)
    except UnknownNameError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"Scheme {name!r}: {error}") from error


def parse_value(text: str) -> Any:
    """Parses a number, a truth value, `None` or JSON; anything else is the text itself.

    >>> [parse_value(text) for text in ("5e5", "500_000", "True", "none", "[1, 2]", "half")]
    [500000.0, 500000, True, None, [1, 2], 'half']
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for parse in (int, float, json.loads):
        try:
            return parse(text)
        except (ValueError, RecursionError):
            continue
    if text[:1] in ("{", "["):
        raise UsageError(f"{text!r} looks like JSON but is not. In a shell, put it in single quotes.")
    return text


def parse_options(pairs: Iterable[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """Parses `["theta=5e5", "layout=interleaved"]` to a dictionary; the values of options in `texts` are text or JSON.

    Raises:
        UsageError: for a word without `=`, or an option given twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"An option is written name=value, got {pair!r}.")
        if name in options:
            raise UsageError(f"The option {name!r} is given twice.")
        options[name] = value if name in texts and value[:1] not in ("{", "[") else parse_value(value)
    return options
