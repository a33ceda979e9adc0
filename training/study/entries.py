"""The schemes of a study: a label, a config, and how its training begins."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hf_posenc import PositionEncodingError, get_scheme
from hf_posenc.schemes.config import SchemeConfig
from training.arguments import LoraArguments
from training.errors import SettingsError
from training.study.training_settings import settings_error
from training.swapping import HealingArguments

#: The scheme of the unpatched model, the control.
NATIVE = "native"

#: Used where `--scheme_options` says nothing else. The paper's sinusoids have the size of its token vectors, because it
#: multiplies those by sqrt(hidden) (arXiv:1706.03762, section 3.4). None of the models here does, so the sinusoids are
#: scaled down to the tokens instead: at scale 1 they would drown them.
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {"sinusoidal": {"scale": 0.07}}

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass
class SwapArguments(HealingArguments, LoraArguments):
    """How a trained model takes the scheme, and what helps it to recover."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    def __post_init__(self) -> None:
        HealingArguments.__post_init__(self)
        LoraArguments.__post_init__(self)


@dataclass(frozen=True)
class SchemeEntry:
    """One line of a study's results.

    Args:
        label: its name in tables and folders.
        config: the scheme, or `None` for the unpatched model.
        options: those of the scheme that were given.
        start: label of the entry whose trained model this one starts from; `None` for none of this study.
        swap: how a trained model takes the scheme; for new weights it has no meaning.
        training: settings of its trainings that differ from those of the task.
        given: swap options as they were given, for results.
    """

    label: str
    config: SchemeConfig | None
    options: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    swap: SwapArguments = field(default_factory=SwapArguments)
    training: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    def config_dict(self) -> dict[str, Any] | None:
        """The scheme as JSON, every option written out."""
        return None if self.config is None else self.config.to_dict()


def parse_entries(labels: list[str], options: dict[str, dict[str, Any]]) -> list[SchemeEntry]:
    """The schemes of a study.

    Args:
        labels: in the order of the tables.
        options: per label the options of the scheme; and, where needed, `scheme` (its name, where the label is
            another one), `from` (the label whose trained model it starts from), `swap` (how a trained model takes it)
            and `training` (settings of its own).

    Raises:
        UnknownNameError: for an unknown scheme or option, with the nearest names.
        SettingsError: for options without a scheme, a value out of range, or a start that does not exist.
    """
    entries = [_entry(label, dict(options.get(label, {}))) for label in labels]
    by_label = {entry.label: entry for entry in entries}
    for entry in entries:
        _check_start(entry, by_label)
    return entries


def _entry(label: str, options: dict[str, Any]) -> SchemeEntry:
    where = f"--scheme_options for {label!r}"
    if not _LABEL.fullmatch(label):
        raise SettingsError(
            f"--schemes has the label {label!r}, which is to be part of a folder's name: letters, digits and . _ + - "
            "only, beginning with a letter or a digit."
        )
    start, training, given = options.pop("from", None), options.pop("training", {}), options.pop("swap", {})
    for name, value in (("training", training), ("swap", given)):
        if not isinstance(value, dict):
            raise SettingsError(f"{where}: {name} is {value!r}; it takes settings by name.")
    if not isinstance(start, str | None):
        raise SettingsError(f"{where}: from is {start!r}; it takes the label of another scheme.")
    try:
        # As JSON, in which pydantic makes a dataclass of a mapping and still takes no text for a number.
        swap = TypeAdapter(SwapArguments).validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        raise settings_error(error, SwapArguments.__dataclass_fields__, f"{where}: swap") from error
    scheme = options.pop("scheme", label)
    if scheme == NATIVE:
        if options:
            raise SettingsError(f"{NATIVE!r} is the unpatched model; it has no options ({', '.join(options)}).")
        if swap.swaps:
            raise SettingsError(f"{where}: swap takes over from the old scheme, and {NATIVE!r} keeps it.")
        return SchemeEntry(label, None, {}, start, swap, training, given)
    if label == scheme:
        options = DEFAULT_OPTIONS.get(scheme, {}) | options
    try:
        config = get_scheme(scheme).from_options(options)
    except PositionEncodingError:
        raise
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from error
    return SchemeEntry(label, config, options, start, swap, training, given)


def _check_start(entry: SchemeEntry, entries: dict[str, SchemeEntry]) -> None:
    seen = [entry.label]
    while entry.start is not None:
        if entry.start not in entries:
            raise SettingsError(
                f"{entry.label!r} starts from {entry.start!r}, which --schemes does not name. Name it too: its model "
                "has to be trained first."
            )
        if entry.start in seen:
            raise SettingsError(f"{' starts from '.join([*seen, entry.start])}: no training could begin.")
        seen.append(entry.start)
        entry = entries[entry.start]
