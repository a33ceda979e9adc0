"""`hf-posenc eval`: a verb for each evaluation, whose options are the parameters of its function."""

from __future__ import annotations

import argparse
import collections.abc
import inspect
import itertools
import json
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.cli.catalogue import REQUIRED, entries, meanings_of
from hf_posenc.errors import UsageError
from hf_posenc.evaluations import EVALUATIONS, Evaluation

_GIVEN = ("model", "tokenizer", "schemes")
_DTYPES = ("float32", "bfloat16", "float16")


def add_evaluations(
    tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str, chosen: str | None
) -> None:
    """Adds a verb for each evaluation.

    Args:
        tests: the sub-commands of `eval`.
        scheme_help: how a scheme is written.
        chosen: the verb that was typed. It alone gets its options: reading them imports torch.
    """
    for name, evaluation in EVALUATIONS.items():
        parser = tests.add_parser(name, help=evaluation.summary)
        parser.set_defaults(run="evaluation.evaluate", parser=parser, evaluation=name)
        if name == chosen:
            _add_options(parser, evaluation, scheme_help)


def evaluate(options: argparse.Namespace) -> int:
    """Runs one evaluation and prints its result."""
    evaluation = EVALUATIONS[options.evaluation]
    function = evaluation.measure()
    # An option that was not typed keeps the default of the function.
    typed = [option.name for option in _options(function) if option.name in options]
    arguments: dict[str, Any] = {name: getattr(options, name) for name in typed}
    if evaluation.files in arguments:
        texts = _read_texts(arguments[evaluation.files])
        arguments[evaluation.files] = "\n".join(texts) if evaluation.joined else texts
    if options.schemes is not None:
        arguments["schemes"] = _schemes(options.schemes)
    if evaluation.plot is not None:
        _check_plot(options.plot)
    if "model" in inspect.signature(function).parameters:
        arguments["model"], arguments["tokenizer"] = _load(options)
    result = function(**arguments)
    return _show(result, evaluation, options)


def report(options: argparse.Namespace) -> int:
    """`hf-posenc report`: tables and figures of a result that `--json` wrote.

    Raises:
        UsageError: for a file that holds no result, or a figure of an evaluation that has none.
    """
    from hf_posenc.report import Result

    _check_plot(options.plot)
    try:
        result = Result.load(options.file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{options.file} holds no result that hf-posenc eval --json wrote: {error}") from error
    evaluation = EVALUATIONS.get(result.task.replace("_", "-"))
    if options.plot is not None and (evaluation is None or evaluation.plot is None):
        drawn = ", ".join(name for name, one in EVALUATIONS.items() if one.plot is not None)
        raise UsageError(f"--plot: there is no figure of the evaluation {result.task!r}; there is one of {drawn}.")
    return _show(result, evaluation, options)


def _show(result: Any, evaluation: Evaluation | None, options: argparse.Namespace) -> int:
    """Draws and prints what was asked for."""
    if evaluation is not None and evaluation.plot is not None and options.plot is not None:
        evaluation.draw()(result, options.plot)
    if options.json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print(result.html() if options.html else result.table(markdown=options.markdown))
    return 0


def add_report(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `report` to the verbs of `hf-posenc`."""
    parser = verbs.add_parser("report", help="tables and figures of a result that eval --json wrote")
    parser.add_argument("file", metavar="FILE", help="a JSON file")
    _add_forms(parser, figure=True)
    parser.set_defaults(run="evaluation.report", parser=parser)


def _add_forms(parser: argparse.ArgumentParser, *, figure: bool) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown tables")
    form.add_argument("--html", action="store_true", help="print HTML (needs pandas)")
    if figure:
        parser.add_argument("--plot", metavar="FILE", help="write a figure")


@dataclass(frozen=True)
class _Option:
    """One parameter of a function, as it is typed.

    Args:
        name: of the parameter.
        kind: type of one value.
        several: whether it takes several values.
        choices: the values there are, if they are known.
        required: whether the function has no default.
        default: of the function.
        meaning: from its docstring.
    """

    name: str
    kind: Callable[[str], Any]
    several: bool
    choices: tuple[Any, ...] | None
    required: bool
    default: Any
    meaning: str


def _options(function: Callable[..., Any]) -> Iterator[_Option]:
    """The parameters whose values can be typed."""
    hints = typing.get_type_hints(function)
    meanings = meanings_of(inspect.getdoc(function) or "")
    for name, parameter in inspect.signature(function).parameters.items():
        if name in _GIVEN:
            continue
        read = _read_type(hints[name])
        if read is not None:
            required = parameter.default is inspect.Parameter.empty
            kind, several, choices = read
            if not several and choices is None and type(None) in typing.get_args(hints[name]):
                kind = _or_none(kind)
            yield _Option(name, kind, several, choices, required, parameter.default, meanings.get(name, ""))


def _read_type(hint: Any) -> tuple[Callable[[str], Any], bool, tuple[Any, ...] | None] | None:
    """The type of one value, whether there are several, and the choices; `None` for what cannot be typed."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next((read for member in typing.get_args(hint) if (read := _read_type(member)) is not None), None)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return str, False, typing.get_args(hint)
    if origin in (collections.abc.Sequence, collections.abc.Iterable, list, tuple):
        item = _read_type(typing.get_args(hint)[0])
        return None if item is None else (item[0], True, item[2])
    return (hint, False, None) if hint in (bool, int, float, str) else None


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same type, for values that may be `none`."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    # argparse names the type in its errors.
    read.__name__ = getattr(kind, "__name__", "value")
    return read


def _add_options(parser: argparse.ArgumentParser, evaluation: Evaluation, scheme_help: str) -> None:
    function = evaluation.measure()
    has_model = "model" in inspect.signature(function).parameters
    if has_model:
        parser.add_argument("model", metavar="MODEL", help="hub id or local folder")
        parser.add_argument("--tokenizer", metavar="MODEL", help="hub id or folder of the tokenizer (default: MODEL)")
        parser.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
        parser.add_argument("--dtype", default="float32", choices=_DTYPES, help="of the weights (default: float32)")
    default = "the model as it is" if has_model else "every scheme"
    native = "; 'native' is the stock model, 'all' is native and every scheme" if has_model else ""
    parser.add_argument("--schemes", nargs="+", metavar="SCHEME", help=f"{scheme_help}{native} (default: {default})")
    for option in _options(function):
        _add_option(parser, option, is_files=option.name == evaluation.files)
    _add_forms(parser, figure=evaluation.plot is not None)


def _add_option(parser: argparse.ArgumentParser, option: _Option, *, is_files: bool) -> None:
    shown = "" if option.required or option.default is None else f" (default: {_shown(option.default)})"
    # argparse formats help with `%`.
    meaning = (option.meaning + shown).replace("`", "").replace("%", "%%")
    settings: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": meaning,
        "required": option.required,
    }
    if is_files:
        parser.add_argument("--text", nargs="+", metavar="FILE", **settings | {"help": f"text files: {meaning}"})
    elif option.kind is bool:
        parser.add_argument(_flag(option.name), action=argparse.BooleanOptionalAction, **settings)
    else:
        settings |= {"nargs": "+"} if option.several else {}
        settings |= {"choices": option.choices} if option.choices else {"metavar": _metavar(option.kind)}
        parser.add_argument(_flag(option.name), type=option.kind, **settings)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(kind: Callable[[str], Any]) -> str:
    return {"int": "N", "float": "X"}.get(getattr(kind, "__name__", ""), "TEXT")


def _shown(default: Any) -> str:
    return " ".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


def _schemes(words: list[str]) -> list[Any]:
    """The schemes as configs, `"native"` as it is.

    Raises:
        UnknownNameError: for an unknown scheme or option.
        UsageError: for a value out of range.
    """
    from hf_posenc.cli.options import parse_scheme

    # A comma behind a colon stands between options.
    names = [name for word in words for name in ([word] if ":" in word else word.split(",")) if name]
    complete = [
        entry.name
        for entry in entries()
        if not entry.arrangement and all(option.default != REQUIRED for option in entry.options)
    ]
    names = list(itertools.chain.from_iterable(["native", *complete] if name == "all" else [name] for name in names))
    return [name if name == "native" else parse_scheme(name) for name in names]


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, on its device, and the tokenizer.

    Raises:
        UsageError: if one of them cannot be found, there is no such device, or they do not belong together.
    """
    import torch

    from hf_posenc.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer or options.model)
    model = load_model(options.model)
    if options.tokenizer is not None:
        rows = model.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > rows:
            raise UsageError(
                f"--tokenizer {options.tokenizer} has {len(tokenizer)} tokens, and {options.model} knows {rows}: "
                "it is that of another model."
            )
    try:
        return model.to(device=options.device, dtype=getattr(torch, options.dtype)), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {options.device}: {error}") from error


def _read_texts(paths: list[str]) -> list[str]:
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


def _check_plot(plot: str | None) -> None:
    """Refuses a figure that could not be written, before anything is measured.

    Raises:
        UsageError: if its folder does not exist, or its name ends in no kind of figure.
    """
    if plot is None:
        return
    path = Path(plot).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--plot {plot}: the folder {path.parent} does not exist.")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in endings:
        raise UsageError(f"--plot {plot}: figures end in {', '.join(sorted(endings))}.")
