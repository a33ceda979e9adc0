"""Reference pages that are made when the site is built: the command line, and the settings of studies."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from repository_files import write_if_changed
from sphinx.application import Sphinx

from hf_posenc.cli.parser import _parser
from hf_posenc.evaluations import EVALUATIONS
from hf_posenc.report.tables import markdown_table
from training.study.settings import SchemeOptions, StudySettings, SwapArguments, TaskOptions, TrainingSettings

COMMAND_LINE = "reference/command_line.md"
STUDIES = "reference/study_settings.md"


def command_line() -> str:
    """The help of every subcommand."""
    # argparse wraps help texts to the width of the terminal.
    os.environ["COLUMNS"] = "100"
    sections = [
        "# Command line",
        "Every subcommand, as `--help` prints it. On the command line, a scheme is a name, with options behind a "
        "colon: `rope:theta=500000,layout=interleaved`. Options may be JSON.",
    ]
    for name, parser in _subcommands(_parser(chosen=None)).items():
        sections += [f"## hf-posenc {name}", _help(parser)]
        if name == "eval":
            for evaluation in EVALUATIONS:
                tests = _subcommands(_subcommands(_parser(chosen=evaluation))[name])
                sections += [f"### hf-posenc eval {evaluation}", _help(tests[evaluation])]
    return "\n\n".join(sections) + "\n"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the subcommands. Each describes itself by the line that the list of subcommands has for it."""
    (listed,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for entry in listed._choices_actions:
        listed.choices[entry.dest].description = listed.choices[entry.dest].description or entry.help
    return listed.choices


def _help(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().strip()}\n```"


def study_settings() -> str:
    """The settings of a study's YAML file, from the models that read it."""
    training, study = TrainingSettings.model_fields, StudySettings.model_fields
    swap = {one.name: (one.default, one.metadata.get("help", "")) for one in dataclasses.fields(SwapArguments)}
    return "\n\n".join(
        [
            "# Settings of studies",
            "What a YAML file for `training/compare.py` can contain. Each setting is also an option on its command "
            "line, such as `--max_steps 300`. [Studies](../how_to/studies.md) shows how to use them.",
            "## The study",
            _table({name: field for name, field in study.items() if name not in training}),
            "## Training",
            "In the study, in `task_options` for a task, or under `training` in `scheme_options` for a scheme.",
            _table(training),
            "## scheme_options",
            "All other keys are options of the scheme.",
            _table(SchemeOptions.model_fields),
            "## swap, in scheme_options",
            markdown_table(("setting", "default", "meaning"), [_row(name, *entry) for name, entry in swap.items()]),
            "## task_options",
            "All other keys are settings of the training.",
            _table(TaskOptions.model_fields),
        ]
    ) + "\n"  # fmt: skip


def _table(fields: Mapping[str, Any]) -> str:
    rows = [_row(field.alias or name, field.get_default(call_default_factory=True), field.description or "")
            for name, field in fields.items()]  # fmt: skip
    return markdown_table(("setting", "default", "meaning"), rows)


def _row(name: str, default: Any, meaning: str) -> tuple[str, str, str]:
    nothing = default is PydanticUndefined or isinstance(default, BaseModel) or dataclasses.is_dataclass(default)
    return f"`{name}`", "" if nothing else f"`{default!r}`", " ".join(meaning.split()).replace("|", "\\|")


def write(app: Sphinx) -> None:
    """Writes both pages."""
    for path, text in ((COMMAND_LINE, command_line()), (STUDIES, study_settings())):
        write_if_changed(Path(app.srcdir) / path, text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
