"""The verbs: from what was typed to one call into the library, and its result as text."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from hf_posenc.cli.catalogue import REQUIRED, Entry, entries
from hf_posenc.errors import PositionEncodingError, UsageError
from hf_posenc.other_names import unknown_scheme
from hf_posenc.report.tables import format_table, terminal_width


def schemes(options: argparse.Namespace) -> int:
    """`hf-posenc schemes`: all schemes and arrangements, or what the named ones are and take."""
    known = entries()
    by_name = {entry.name: entry for entry in known}
    for name in options.names:
        if name not in by_name:
            raise unknown_scheme(name, by_name)
    shown = [by_name[name] for name in options.names] or known
    if options.json:
        print(json.dumps([entry.to_dict() for entry in shown], indent=2))
    elif options.names:
        print("\n\n".join(_description(entry) for entry in shown))
    else:
        for headline in ("scheme", "arrangement"):
            rows = [
                [
                    entry.name,
                    entry.summary,
                    "  ".join(f"{option.name}={option.text}" for option in entry.options),
                ]
                for entry in shown
                if entry.arrangement == (headline == "arrangement")
            ]
            print(format_table([headline, "what it is", "options"], rows), end="\n\n")
        print("hf-posenc schemes NAME shows one with the types and meanings of its options.")
    return 0


def _description(entry: Entry) -> str:
    meanings = entry.meanings()
    lines = [entry.name, entry.summary, "" if entry.options else "\nIt has no options."]
    for option in entry.options:
        default = "required" if option.default == REQUIRED else f"default {option.text}"
        lines.append(f"  {option.name}: {option.type}, {default}")
        if option.name in meanings:
            lines.append(_indented(meanings[option.name]))
    return "\n".join([*lines, "", f"More: help({entry.path})"])


def _indented(text: str) -> str:
    width = terminal_width() or 120
    return textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False)


def inspect(options: argparse.Namespace) -> int:
    """`hf-posenc inspect`."""
    import hf_posenc
    from hf_posenc.loading import load_model

    print(hf_posenc.inspect_model(load_model(options.model, config_only=options.config_only)))
    return 0


def patch(options: argparse.Namespace) -> int:
    """`hf-posenc patch`."""
    from hf_posenc.cli.options import parse_layers, parse_scheme

    output = _free_folder(options)
    if options.elsewhere is not None and options.layers is None:
        raise UsageError("--elsewhere says what the layers outside --layers get; give --layers too.")
    config = parse_scheme(options.scheme, itertools.chain.from_iterable(options.option))
    schedule: dict[str, Any] = {}
    if options.layers is not None:
        schedule["layers"] = parse_layers(options.layers)
        if options.elsewhere is not None:
            schedule["elsewhere"] = parse_scheme(options.elsewhere)

    import hf_posenc
    from hf_posenc.loading import load_model
    from hf_posenc.schemes.labels import scheme_label

    model = load_model(options.model)
    found = getattr(model, "position_encoding", None)
    if found is not None and not options.replace:
        raise UsageError(
            f"{options.model} already has the position encoding {scheme_label(found.config)}, which its weights were "
            f"trained with, and {config.name} would take its place. To keep it in a form that needs no hf_posenc: "
            f"hf-posenc export {options.model} --output DIR. To give it up all the same, say --replace."
        )
    try:
        hf_posenc.patch_model(model, config, **schedule)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(model.position_encoding.report)
    if options.stock:
        hf_posenc.save_stock_checkpoint(model, output)
    else:
        model.save_pretrained(output)
    _save_tokenizer(options.model, output)
    return 0


def export(options: argparse.Namespace) -> int:
    """`hf-posenc export`."""
    output = _free_folder(options)

    import hf_posenc
    from hf_posenc.loading import load_model
    from hf_posenc.schemes.labels import scheme_label

    model = load_model(options.model)
    found = getattr(model, "position_encoding", None)
    if found is None:
        raise UsageError(f"{options.model} is not patched: it already is a plain transformers checkpoint.")
    label = scheme_label(found.config)
    hf_posenc.save_stock_checkpoint(model, output)
    print(f"The scheme {label}, as {type(model).__name__} has it by itself.")
    _save_tokenizer(options.model, output)
    return 0


def _free_folder(options: argparse.Namespace) -> Path:
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output takes a folder.")
    if output.is_dir() and any(output.iterdir()) and not options.overwrite:
        raise UsageError(f"{output} is not empty. Name another folder, or say --overwrite.")
    return output


def _save_tokenizer(model: str, output: Path) -> None:
    from hf_posenc.loading import load_tokenizer

    try:
        load_tokenizer(model).save_pretrained(output)
    except UsageError as error:
        print(f"The model is saved in {output} without a tokenizer: {error}", file=sys.stderr)
    else:
        print(f"Saved the model and its tokenizer in {output}")


def plot(options: argparse.Namespace) -> int:
    """`hf-posenc plot`: writes the figures of a scheme and prints their paths; `--list` prints what would apply."""
    from hf_posenc.cli.options import parse_scheme

    config = parse_scheme(options.scheme, itertools.chain.from_iterable(options.option))
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output takes a folder.")
    try:
        from hf_posenc.plots.schemes import applicable_kinds, plot_scheme, subject_of

        if options.list:
            rows = [[kind.name, kind.summary] for kind in applicable_kinds(subject_of(config))]
            print(format_table(["kind", "what it shows"], rows))
            return 0
        kinds = None if options.kind is None else [name for word in options.kind for name in word.split(",") if name]
        for path in plot_scheme(config, output, kinds):
            print(path)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "PIL"):
            raise
        raise UsageError("Figures need matplotlib: pip install matplotlib.") from error
    except PositionEncodingError:
        raise
    except ValueError as error:
        raise UsageError(f"Scheme {config.name!r}: {error}") from error
    return 0


def compare(options: argparse.Namespace) -> int:
    """`hf-posenc compare`: runs the repository's training/compare.py as `python training/compare.py` would."""
    import hf_posenc.cli

    folders = [Path.cwd(), Path(hf_posenc.cli.__file__).resolve().parents[2]]
    for folder in folders:
        script = folder / "training" / "compare.py"
        if script.is_file():
            # A process of its own: the script then owns its arguments, its workers and its signals.
            imports = [word for name in options.imports for word in ("--import", name)]
            command = [sys.executable, str(script), *options.arguments, *imports]
            return subprocess.run(command, check=False).returncode
    raise UsageError(
        f"There is no training/compare.py in {' or '.join(map(str, folders))}. The training scripts are not part of "
        f"the installed package: clone the repository and run this command in its root folder."
    )
