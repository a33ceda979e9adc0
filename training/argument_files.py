"""Command lines whose options may stand in a YAML or JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser

from hf_posenc.errors import close_names
from training.errors import SettingsError
from training.launched import launched_on_cpu

#: Of the option `--import`.
IMPORTS = {
    "help": "Modules that register schemes or architectures of your own, on the import path or in the working folder.",
    "aliases": ["--import"],
    "action": "extend",
}


#: Bytes that a file of settings may have. YAML takes seconds for a megabyte.
LARGEST_SETTINGS = 2**20


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `5e-4` is a number, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_structured(text: str, option: str) -> Any:
    """JSON or YAML from the command line.

    Raises:
        SettingsError: for text that is neither.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise SettingsError(
            f"--{option} is neither JSON nor YAML: {text!r}. In a shell, put it in single quotes: "
            f"--{option} '{{\"theta\": 5e5}}'."
        ) from error


def parse_arguments(
    dataclass_types: Sequence[type], arguments: Sequence[str], description: str | None = None
) -> tuple[Any, ...]:
    """One object per dataclass, from flags, or from a file followed by flags that take its place.

    Args:
        dataclass_types: whose fields are the options.
        arguments: `["settings.yaml", "--seed", "1"]` or flags alone.
        description: for `--help`.

    Raises:
        SettingsError: for a file that cannot be read, or an option that does not exist.
        SystemExit: with status 2, for a value that an option cannot take.
    """
    parser = HfArgumentParser(dataclass_types, description=description, allow_abbrev=False)
    if launched_on_cpu():
        parser.set_defaults(use_cpu=True)
    if any(action.dest == "dataloader_pin_memory" for action in parser._actions):
        # Memory is pinned for copies to an accelerator; without one torch warns at every epoch that it is not.
        parser.set_defaults(dataloader_pin_memory=torch.accelerator.is_available())
    words = list(arguments)
    if words and words[0].endswith((".yaml", ".yml", ".json")):
        words = [*_words(parser, Path(words[0])), *words[1:]]
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
    except SettingsError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # TrainingArguments checks itself
        raise SettingsError(str(error)) from error
    if unknown:
        raise SettingsError(_unknown(parser, unknown[0], "the command line"))
    return tuple(parsed)


def read_mapping(path: Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file, by name.

    Raises:
        SettingsError: for a file that cannot be read, is no text, is larger than settings ever are, or holds something
            other than one mapping.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_SETTINGS:
            raise SettingsError(f"{path} holds {size} bytes; settings have at most {LARGEST_SETTINGS}.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"Cannot read the settings {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not text in UTF-8: {error}.") from error
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} is not {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds {type(content).__name__}; one mapping of options to values is expected.")
    return content


def _words(parser: HfArgumentParser, path: Path) -> list[str]:
    content = read_mapping(path)
    actions = {action.dest: action for action in parser._actions}
    words: list[str] = []
    for name, value in content.items():
        if name not in actions:
            raise SettingsError(_unknown(parser, f"--{name}", str(path)))
        if value is None:
            continue
        if isinstance(value, list) and actions[name].nargs in ("+", "*"):
            words += [f"--{name}", *map(str, value)]
        elif name == "report_to" and isinstance(value, list):  # which takes one word
            words.append(f"--{name}={_only(value)}")
        else:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, list | dict) else value}")
    return words


def _only(trackers: list[Any]) -> Any:
    if len(trackers) != 1:
        raise SettingsError(f"report_to takes one tracker, or 'all' for all that are installed; it holds {trackers}.")
    return trackers[0]


def _unknown(parser: HfArgumentParser, word: str, where: str) -> str:
    if not word.startswith("--"):
        return f"{word!r} on {where} is no option; a file of settings (.yaml, .json) comes first."
    known = [action.dest for action in parser._actions if action.dest != "help"]
    close = close_names(word[2:].partition("=")[0], known)
    hint = f" Did you mean {' or '.join(f'--{name}' for name in close)}?" if close else " See --help."
    return f"Unknown option {word.partition('=')[0]} in {where}.{hint}"
