"""The verbs: from what was typed to one call into the library, and its result as text."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

from hf_posenc.errors import UsageError


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
