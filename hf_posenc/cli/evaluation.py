"""`hf-posenc eval NAME`, whose options are the parameters of the evaluation's function, and `hf-posenc report`."""

from __future__ import annotations

import argparse
import collections.abc
import inspect
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_posenc.cli.catalogue import REQUIRED, defaults_of, meanings_of
from hf_posenc.errors import PositionEncodingError, UnsupportedError, UsageError
from hf_posenc.evaluations import EVALUATIONS, Evaluation
from hf_posenc.installation import require
from hf_posenc.loading import load_model, load_tokenizer
from hf_posenc.report import Result
from hf_posenc.report.combination import combine_results, shortest_names
from hf_posenc.report.page import web_page


def add_evaluations(
    tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str, chosen: str | None
) -> None:
    """Adds a verb for each evaluation. Only the `chosen` one gets its options, because reading them imports torch."""
    for name, evaluation in EVALUATIONS.items():
        parser = tests.add_parser(name, help=evaluation.summary)
        parser.set_defaults(run=evaluate, parser=parser, evaluation=name)
        if name == chosen:
            _add_options(parser, evaluation, scheme_help)


def evaluate(options: argparse.Namespace) -> int:
    """Runs one evaluation and prints its result."""
    evaluation = EVALUATIONS[options.evaluation]
    function = evaluation.measure()
    given = vars(options)
    # An option that was not given is not in the namespace, so the function uses its default.
    arguments = {name: given[name] for name in inspect.signature(function).parameters if name in given}
    if evaluation.texts is not None and evaluation.data in arguments:
        arguments[evaluation.data] = evaluation.texts(_read_texts(arguments[evaluation.data]))
    if "schemes" in arguments:
        arguments["schemes"] = _schemes(arguments["schemes"])
    _check_plot(options)
    if "model" not in arguments:
        return _show(function(**arguments), evaluation, options)
    models, results = arguments.pop("model"), {}
    names = shortest_names(models)
    for model, name in zip(models, names, strict=True):
        try:
            results[name] = function(**(arguments | _load(model, options)))
        except (PositionEncodingError, UsageError) as error:
            if len(models) == 1:
                raise
            raise UsageError(f"{model}: {error}") from error
        result = _combined(results)  # Fails at once if a model cannot be compared.
    return _show(result, evaluation, options)


def report(options: argparse.Namespace) -> int:
    """Prints the tables of results that `--json` wrote, and draws their figure.

    Raises:
        UsageError: if a file contains no result, or if the evaluation has no figure.
        MeasurementError: if the results cannot share a table.
    """
    _check_plot(options)
    results, paths = [], []
    for file in options.files:
        try:
            results.append(Result.load(file))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{file} does not contain a result of hf-posenc eval --json: {error}") from error
        model_path = results[-1].settings.get("of_model", {}).get("path")
        paths.append(model_path or str(Path(file).with_suffix("")))
    if len(set(paths)) < len(paths):  # the same model with different schemes
        paths = [str(Path(file).with_suffix("")) for file in options.files]
    result = _combined(dict(zip(shortest_names(paths), results, strict=True)))
    evaluation = EVALUATIONS.get(result.task.replace("_", "-"))
    if options.plot is not None and (evaluation is None or evaluation.plot is None):
        drawn = ", ".join(name for name, known in EVALUATIONS.items() if known.plot is not None)
        raise UsageError(f"--plot: the evaluation {result.task!r} has no figure; these have one: {drawn}.")
    try:
        return _show(result, evaluation, options)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if options.plot is None:
            raise
        raise UsageError(
            f"--plot: {', '.join(options.files)} lacks values that the figure of {result.task!r} shows, or has "
            f"unexpected ones ({type(error).__name__}: {error}). Write it again with hf-posenc eval --json."
        ) from error


def _combined(results: dict[str, Any]) -> Any:
    """Combines the results of several models, by name. The result of a single model stays as it is."""
    return combine_results(results) if len(results) > 1 else next(iter(results.values()))


def add_forms(parser: argparse.ArgumentParser, *, figure: bool) -> None:
    """Adds the options for the output format of a result."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown tables")
    form.add_argument("--html", action="store_true", help="print a web page (needs pandas)")
    if figure:
        parser.add_argument("--plot", metavar="FILE", help="write a figure to this file")
        parser.add_argument("--dark", action="store_true", help="draw it for a dark page")


def _show(result: Any, evaluation: Evaluation | None, options: argparse.Namespace) -> int:
    if evaluation is not None and evaluation.plot is not None and options.plot is not None:
        evaluation.draw()(result, options.plot, dark=options.dark)
    if options.json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        shown = web_page(result.title or result.task, result.html()) if options.html else None
        print(shown or result.table(markdown=options.markdown))
    return 0


def _add_options(parser: argparse.ArgumentParser, evaluation: Evaluation, scheme_help: str) -> None:
    function = evaluation.measure()
    parameters = inspect.signature(function).parameters
    native, every = "", "every scheme"
    if "model" in parameters:
        native, every = "; 'native' is the stock model, 'all' is native and every scheme", "the model as it is"
        parser.add_argument("model", nargs="+", metavar="MODEL", help="hub id or local folder; one or several")
        if "tokenizer" in parameters:
            parser.add_argument(
                "--tokenizer", metavar="MODEL", help="hub id or folder of the tokenizer (default: MODEL)"
            )
        parser.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
        dtypes = ("float32", "bfloat16", "float16")
        parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the weights (default: float32)")
    schemes_help = f"{scheme_help}{native} (default: {every})"
    parser.add_argument("--schemes", nargs="+", metavar="SCHEME", default=argparse.SUPPRESS, help=schemes_help)
    hints, meanings = typing.get_type_hints(function), meanings_of(inspect.getdoc(function) or "")
    for name, parameter in parameters.items():
        settings = _settings(hints[name])
        if name in ("model", "tokenizer", "schemes") or settings is None:
            continue
        meaning, default = meanings.get(name, ""), parameter.default
        if default not in (None, inspect.Parameter.empty):
            meaning += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple | list) else default})"
        flag = f"--{name.replace('_', '-')}"
        if name == evaluation.data and evaluation.texts is not None:
            flag, settings, meaning = "--text", {"nargs": "+", "metavar": "FILE"}, f"text files: {meaning}"
        parser.add_argument(
            flag,
            dest=name,
            default=argparse.SUPPRESS,
            required=default is inspect.Parameter.empty,
            help=meaning.replace("`", "").replace("%", "%%"),  # argparse formats help with `%`
            **settings,
        )
    add_forms(parser, figure=evaluation.plot is not None)


def _settings(hint: Any) -> dict[str, Any] | None:
    """Returns the arguments of `add_argument` for a type; `None` if its values cannot be given as words."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = typing.get_args(hint)
        settings = next((typed for member in members if (typed := _settings(member)) is not None), None)
        if settings is not None and settings.keys() == {"type", "metavar"} and type(None) in members:
            settings["type"] = _or_none(settings["type"])
        return settings
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if origin in (collections.abc.Sequence, collections.abc.Iterable, list, tuple):
        item = _settings(typing.get_args(hint)[0])
        return None if item is None else item | {"nargs": "+"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    metavars = {int: "N", float: "X", str: "TEXT"}
    return {"type": hint, "metavar": metavars[hint]} if hint in metavars else None


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a converter to the same type that also accepts `none`."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse names the type in its errors
    return read


def _schemes(words: list[str]) -> list[Any]:
    """Returns the schemes as configs. `"native"` stays a string."""
    from hf_posenc.schemes import get_scheme, list_schemes
    from hf_posenc.schemes.registry import parse_scheme

    # A comma after a colon separates options.
    names = [name for word in words for name in ([word] if ":" in word else word.split(",")) if name]
    if "all" in names:
        place = names.index("all")
        complete = [name for name in list_schemes() if REQUIRED not in defaults_of(get_scheme(name)).values()]
        names[place : place + 1] = ["native", *complete]
    return [name if name == "native" else parse_scheme(name) for name in names]


def _load(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Loads a model to its device, and its tokenizer if the evaluation needs one."""
    import torch

    loaded = {"model": load_model(model)}
    if "tokenizer" in options:
        loaded["tokenizer"] = _tokenizer(model, loaded["model"], options)
    try:
        loaded["model"].to(device=options.device, dtype=getattr(torch, options.dtype))
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {options.device}: {error}") from error
    return loaded


def _tokenizer(name: str, model: Any, options: argparse.Namespace) -> Any:
    """Loads the tokenizer given by `--tokenizer`; by default that of the model."""
    from hf_posenc.metrics.forward import refuse_other_inputs

    try:
        refuse_other_inputs(model)  # first, because such a model has no tokenizer to load
    except UnsupportedError as error:
        raise UsageError(f"{name}: {error}") from error
    if options.tokenizer is None:
        try:
            return load_tokenizer(name)
        except UsageError as error:
            raise UsageError(f"No tokenizer could be loaded from {name}. Give one with --tokenizer. {error}") from error
    tokenizer, rows = load_tokenizer(options.tokenizer), model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"--tokenizer {options.tokenizer} has {len(tokenizer)} tokens, but {name} only knows {rows}. It is "
            "the tokenizer of another model."
        )
    return tokenizer


def _read_texts(paths: list[str]) -> list[str]:
    """Reads text files, and all `.txt` files in folders, in the order of their names."""
    texts = []
    for path in map(Path, paths):
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"--text {path}: the folder contains no .txt file.")
        for file in files:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except OSError as error:
                raise UsageError(f"--text {file}: {error}") from error
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"--text {file} is not UTF-8 text: {error.reason} at byte {error.start}. Convert it with `iconv -t "
                    "UTF-8`. If it was cut in the middle of a character, `iconv -c -f UTF-8 -t UTF-8` removes the rest."
                ) from error
    return texts


def _check_plot(options: argparse.Namespace) -> None:
    """Checks that the figure can be written, before anything is measured."""
    plot = getattr(options, "plot", None)
    if plot is None:
        if getattr(options, "dark", False):
            raise UsageError("--dark only applies to a figure. Give its file with --plot.")
        return
    path = Path(plot).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--plot {plot}: the folder {path.parent} does not exist.")
    require(f"--plot {plot}", "matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in endings:
        raise UsageError(f"--plot {plot}: the extension must be one of {', '.join(sorted(endings))}.")
