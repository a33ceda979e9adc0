"""From a YAML file and a command line to the settings of a study."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training.argument_files import parse_structured, read_mapping
from training.errors import SettingsError
from training.study.settings import StudySettings
from training.study.training_settings import settings_error, unknown

#: Read as they stand: a folder may be called 2024.
_TEXT = (str, str | None)
_KNOWN = StudySettings.model_fields


def parse_study(arguments: list[str], description: str) -> StudySettings:
    """The settings of a study: those of a YAML file, if the first word names one, changed by the flags behind it.

    Raises:
        SettingsError: for a file that cannot be read, or a setting that cannot work.
    """
    values: dict[str, Any] = {}
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        path = Path(arguments[0])
        values = _checked(read_mapping(path), str(path)).model_dump(exclude_unset=True)
        arguments = arguments[1:]
    found, others = _parser(description).parse_known_args(arguments)
    if others:
        raise SettingsError(f"The command line: {unknown(others[0].partition('=')[0].lstrip('-'), _KNOWN)}")
    given = vars(found)
    for name, words in given.items():
        if _KNOWN[name].annotation in _TEXT or not isinstance(words, str):
            values[name] = words
        else:
            values[name] = parse_structured(words, name)
    return _checked(values, "The command line")


def _checked(values: dict[str, Any], where: str) -> StudySettings:
    try:
        return StudySettings(**values)
    except ValidationError as error:
        raise settings_error(error, _KNOWN, where) from error
    except TypeError as error:
        raise SettingsError(f"{where}: settings have names that are words ({error}).") from error


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        prog="compare.py [STUDY.yaml]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, setting in _KNOWN.items():
        flags = [f"--{name}", "--import"] if name == "imports" else [f"--{name}"]
        text = f"{setting.description} (default: {setting.default})".replace("%", "%%")
        boolean: dict[str, Any] = {"nargs": "?", "const": True} if setting.annotation is bool else {}
        parser.add_argument(*flags, dest=name, help=text, **boolean)
    return parser
