"""Command lines whose options can be in a YAML or JSON file."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser

from training.errors import SettingsError
from training.help import GroupedHelp
from training.machine import launched_on_cpu

#: Maximum number of bytes of a settings file. YAML takes seconds for a megabyte.
LARGEST_SETTINGS = 2**20

_FURTHER = (
    "All options of transformers.TrainingArguments are accepted too, such as --output_dir, --max_steps, "
    "--num_train_epochs, --learning_rate, --per_device_train_batch_size, --gradient_accumulation_steps, --bf16, "
    "--eval_steps, --save_steps, --report_to, --use_cpu and --seed."
)


class _Parser(GroupedHelp, HfArgumentParser):
    """Options from dataclasses, in the groups named by the dataclasses."""


class _Loader(yaml.SafeLoader):
    """Reads `5e-4` as a number. In YAML 1.1 it is text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_structured(text: str, option: str) -> Any:
    """Parses JSON or YAML from the command line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise SettingsError(
            f"--{option} is neither JSON nor YAML: {text!r}. In a shell, put it in single quotes: "
            f"--{option} '{{\"theta\": 5e5}}'."
        ) from error


def parse_arguments(
    dataclass_types: Sequence[type], arguments: Sequence[str], description: str | None = None
) -> tuple[Any, ...]:
    """Returns one object per dataclass, from flags, or from a file followed by flags that override it."""
    parser = _Parser(dataclass_types, description=description, further=_FURTHER)
    actions = {action.dest: action for action in parser._actions if action.dest != argparse.SUPPRESS}
    # Pinned memory is for copies to an accelerator. Without an accelerator, torch warns in every epoch.
    defaults = {"dataloader_pin_memory": torch.accelerator.is_available()}
    if launched_on_cpu():
        defaults["use_cpu"] = True
    parser.set_defaults(**{name: value for name, value in defaults.items() if name in actions})
    words = list(arguments)
    if words and words[0].endswith((".yaml", ".yml", ".json")):
        content = read_mapping(Path(words[0]))
        for name in content:
            if name not in actions:
                raise SettingsError(parser.refusal(name, words[0]))
        given = [word for name, value in content.items() for word in _words(name, value, actions[name].nargs)]
        words = [*given, *words[1:]]
    # First, because a misspelt option would be reported as a missing one.
    if unknown := parser.parse_known_args(words)[1]:
        if unknown[0].startswith("--"):
            raise SettingsError(parser.refusal(unknown[0][2:].partition("=")[0], "the command line"))
        raise SettingsError(f"{unknown[0]!r} is not an option. A settings file (.yaml, .json) must come first.")
    try:
        return tuple(parser.parse_args_into_dataclasses(words, look_for_args_file=False))
    except (ValueError, TypeError, ImportError) as error:  # TrainingArguments checks itself
        raise SettingsError(str(error)) from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads the settings in a YAML or JSON file, by name."""
    try:
        if path.stat().st_size > LARGEST_SETTINGS:
            raise SettingsError(f"{path} has {path.stat().st_size} bytes; at most {LARGEST_SETTINGS} are allowed.")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise SettingsError(f"Cannot read the settings {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not text in UTF-8: {error}.") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: a date that does not exist
        raise SettingsError(f"{path} is not {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} contains {type(content).__name__}; expected one mapping of options to values.")
    return content


def _words(name: str, value: Any, nargs: Any) -> list[str]:
    """Returns the words on a command line that correspond to one entry of a file."""
    if value is None:
        return []
    if isinstance(value, list) and nargs in ("+", "*"):
        return [f"--{name}", *map(str, value)]
    if name == "report_to" and isinstance(value, list):  # accepts one word
        if len(value) != 1:
            raise SettingsError(f"report_to takes one tracker, or 'all' for all that are installed; got {value}.")
        value = value[0]
    return [f"--{name}={json.dumps(value) if isinstance(value, list | dict) else value}"]
