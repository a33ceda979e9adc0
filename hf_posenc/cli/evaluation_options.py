"""What the verbs of `hf-posenc eval` that run a model have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_posenc.cli.errors import UsageError


def add_model_options(parser: argparse.ArgumentParser, scheme_help: str) -> None:
    """Adds the model, its tokenizer, where and how it runs, and the schemes.

    Args:
        parser: of the verb.
        scheme_help: how a scheme is written.
    """
    parser.add_argument("model", metavar="MODEL", help="hub id or local folder")
    parser.add_argument(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        help=f"{scheme_help}; 'native' is the stock model (default: the model as it is)",
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="hub id or folder of the tokenizer (default: MODEL)")
    parser.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: float32)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of every draw and of new weights (default: 0)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown tables")


def chosen_schemes(options: argparse.Namespace) -> list[Any] | None:
    """The schemes as configs, `"native"` as it is; `None` if none were named.

    Raises:
        UnknownNameError: for an unknown scheme or option.
        UsageError: for a value out of range.
    """
    from hf_posenc.cli.options import parse_scheme

    if options.schemes is None:
        return None
    # A comma behind a colon stands between options.
    names = [name for item in options.schemes for name in ([item] if ":" in item else item.split(",")) if name]
    return [name if name == "native" else parse_scheme(name) for name in names]


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, on its device, and the tokenizer.

    Raises:
        UsageError: if one of them cannot be found, or there is no such device.
    """
    import torch

    from hf_posenc.cli.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer or options.model)
    model = load_model(options.model)
    check_tokenizer(options, model, tokenizer)
    try:
        return model.to(device=options.device, dtype=getattr(torch, options.dtype)), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {options.device}: {error}") from error


def read_texts(paths: list[str]) -> list[str]:
    """The content of text files, and of all `.txt` files in folders, in the order of their names.

    Raises:
        UsageError: for a path without text.
    """
    texts = []
    for name in paths:
        path = Path(name)
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"--text {name}: the folder holds no .txt file.")
        for file in files:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"--text {file}: {error}") from error
    return texts


def check_plot(options: argparse.Namespace) -> None:
    """Refuses a figure that could not be written, before anything is measured.

    Raises:
        UsageError: if its folder does not exist, or its name ends in no kind of figure.
    """
    if options.plot is None:
        return
    path = Path(options.plot).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--plot {options.plot}: the folder {path.parent} does not exist.")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in endings:
        raise UsageError(f"--plot {options.plot}: figures end in {', '.join(sorted(endings))}.")


def check_tokenizer(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Refuses the tokenizer of another model, as far as its size shows it.

    Raises:
        UsageError: if it can give ids that the model has no vector for.
    """
    if options.tokenizer is None:
        return
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"--tokenizer {options.tokenizer} has {len(tokenizer)} tokens, and {options.model} knows {rows}: "
            "it is that of another model."
        )


def show(result: Any, options: argparse.Namespace) -> int:
    """Prints a result in the form that was asked for."""
    if options.json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print(result.table(markdown=options.markdown))
    return 0
