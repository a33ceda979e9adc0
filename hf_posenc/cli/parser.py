"""What can be typed. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import sys
from collections.abc import Sequence

from hf_posenc.cli.evaluation import add_evaluations, add_report
from hf_posenc.cli.running import PROGRAMS, add_run
from hf_posenc.errors import PositionEncodingError, UsageError
from hf_posenc.extensions import import_named_modules, name_modules
from hf_posenc.report.tables import fitted_to, terminal_width

_SCHEME_HELP = "a scheme, with options after a colon: rope  rope:theta=500000,layout=interleaved"

#: Verbs whose further words are for another program.
_PASSED_ON = [[verb] for verb in ("compare", "run", *PROGRAMS)]
_STARTS_ANOTHER = ("compare", "running.run", "running.run_program")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the shell command.

    Args:
        arguments: the words after `hf-posenc`; by default those of the process.

    Returns:
        The exit status: 0, or 2 for what the library refuses (one line on stderr says why). An exception that is
        not one of the library's keeps its traceback.
    """
    words = _arranged(list(sys.argv[1:] if arguments is None else arguments))
    options, unknown = _parser(words).parse_known_args(words)
    if unknown:
        # argparse itself would show the usage of the whole command instead of the verb's.
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        _import_modules(options.imports, options.run)
        # A verb outside of verbs.py is named with its module.
        module, _, verb = options.run.rpartition(".")
        run = getattr(importlib.import_module(f"hf_posenc.cli.{module or 'verbs'}"), verb)
        with fitted_to(terminal_width()):
            status = int(run(options))
        sys.stdout.flush()
        return status
    except (PositionEncodingError, UsageError) as error:
        print(f"hf-posenc: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 1


def _arranged(words: list[str]) -> list[str]:
    """With every `--import` in front, and `--` before what belongs to another program.

    argparse cannot pass options through where they come first.
    """
    imports: list[str] = []
    own: list[str] = []
    while words and words[0] != "--" and not _belongs_to_another(own):
        word = words.pop(0)
        if word.startswith("--import="):
            imports.append(word)
        elif word == "--import" and words:
            imports += [word, words.pop(0)]
        else:
            own.append(word)
    if own[:1] == ["run"] and own[1:2] not in (["-h"], ["--help"]):
        own, words = own[:1], [*own[1:], *words]
    if own[:1] in _PASSED_ON and len(own) == 1 and words[:1] != ["--"]:
        own.append("--")
    return [*imports, *own, *words]


def _belongs_to_another(own: list[str]) -> bool:
    """Whether what follows these words is for the program that they start."""
    return own[:1] in _PASSED_ON and (own[0] != "run" or len(own) > 1)


def _import_modules(names: list[str], run: str) -> None:
    """Names what registers the schemes of others, for this process and those that it starts."""
    name_modules(names)
    if names and run not in _STARTS_ANOTHER:
        import_named_modules()


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more; what is left to write then goes nowhere."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except io.UnsupportedOperation:
        # An object that somebody put in place of stdout.
        return False
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    # The interpreter flushes once more when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _parser(words: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-posenc",
        description="Replace the position encoding of Hugging Face models, and see what it does.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first, here and in all processes that are started, for the schemes or architectures "
        "it registers; may be given several times",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    schemes = verbs.add_parser("schemes", help="list the schemes and their options")
    schemes.add_argument("names", nargs="*", metavar="NAME", help="only these, in detail")
    schemes.add_argument("--json", action="store_true", help="print JSON")
    schemes.set_defaults(run="schemes", parser=schemes)

    inspect = verbs.add_parser("inspect", help="show where a model takes in position")
    _add_model(inspect)
    inspect.add_argument("--config-only", action="store_true", help="build from the config, with random weights")
    inspect.set_defaults(run="inspect", parser=inspect)

    patch = verbs.add_parser("patch", help="replace the position encoding of a checkpoint")
    _add_model(patch)
    patch.add_argument("scheme", metavar="SCHEME", help=_SCHEME_HELP)
    patch.add_argument("--output", required=True, metavar="DIR", help="folder to save the patched model in")
    patch.add_argument(
        "--option", action="append", nargs="+", default=[], metavar="K=V", help="option of the scheme; V may be JSON"
    )
    patch.add_argument("--layers", metavar="0,1,2", help="only these layers")
    patch.add_argument("--elsewhere", metavar="SCHEME", help="scheme of the other layers (with --layers)")
    patch.add_argument("--stock", action="store_true", help="save a plain checkpoint that needs no hf_posenc")
    patch.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    patch.add_argument("--replace", action="store_true", help="give up the scheme that MODEL was already patched with")
    patch.set_defaults(run="patch", parser=patch)

    export = verbs.add_parser("export", help="save a patched checkpoint in a form that needs no hf_posenc")
    _add_model(export)
    export.add_argument("--output", required=True, metavar="DIR", help="folder to save in")
    export.add_argument(
        "--to",
        default="stock",
        choices=["stock"],
        help="stock: a plain transformers checkpoint, of a scheme that its config can say (default: stock)",
    )
    export.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    export.set_defaults(run="export", parser=export)

    evaluate = verbs.add_parser("eval", help="measure what a position encoding does")
    tests = evaluate.add_subparsers(title="tests", metavar="TEST", required=True)
    add_evaluations(tests, _SCHEME_HELP, chosen=words[1] if words[:1] == ["eval"] and len(words) > 1 else None)

    add_report(verbs)
    plot = verbs.add_parser("plot", help="draw what a scheme does, as PNG and SVG")
    plot.add_argument("scheme", metavar="SCHEME", help=_SCHEME_HELP)
    plot.add_argument(
        "--option", action="append", nargs="+", default=[], metavar="K=V", help="option of the scheme; V may be JSON"
    )
    plot.add_argument("--kind", nargs="+", metavar="KIND", help="kinds of figures (default: all that apply)")
    plot.add_argument("--output", default="plots", metavar="DIR", help="folder for the files (default: plots)")
    plot.add_argument("--list", action="store_true", help="only list the kinds that apply to the scheme")
    plot.set_defaults(run="plot", parser=plot)

    add_run(verbs)
    compare = verbs.add_parser(
        "compare", help="train one model per scheme and compare (training/compare.py; --help shows its options)"
    )
    compare.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    compare.set_defaults(run="compare", parser=compare)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id or local folder")
