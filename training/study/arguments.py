"""From a YAML file and a command line to the settings of a study."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from training.errors import SettingsError
from training.settings_text import settings_text
from training.study.settings import StudySettings


def parse_study(arguments: list[str], description: str) -> StudySettings:
    """The settings of a study: those of a YAML file, if the first word names one, changed by the flags behind it.

    Raises:
        SettingsError: for a file that cannot be read, or a setting that cannot work.
    """
    parser = HfArgumentParser(StudySettings, description=description, prog="compare.py [STUDY.yaml]")
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        parser.set_defaults(**_read(Path(arguments[0])))
        arguments = arguments[1:]
    settings: StudySettings
    (settings,) = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(settings_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must hold settings by name, such as 'schemes: [none, rope]'.")
    known = {setting.name: setting for setting in dataclasses.fields(StudySettings)}
    values = {}
    for name, value in content.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            raise SettingsError(
                f"{path} has the unknown setting {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
            )
        if name == "imports":
            values[name] = [value] if isinstance(value, str) else value
            continue
        values[name] = _as_flag(path, name, value, known[name].default)
    return values


def _as_flag(path: Path, name: str, value: Any, default: Any) -> Any:
    """A value as the command line would have given it."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    elif isinstance(value, dict):
        value = json.dumps(value)
    elif isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(default, float) and isinstance(value, str):
        # YAML 1.1 reads 1e-3 as text.
        try:
            value = float(value)
        except ValueError as error:
            raise SettingsError(f"{path}: {name} is {value!r}; it takes a number.") from error
    elif isinstance(default, str) and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    wanted = str if default is None else type(default)
    if type(value) is not wanted and not (value is None and default is None):
        raise SettingsError(f"{path}: {name} is {value!r}; it takes {wanted.__name__}.")
    return value
