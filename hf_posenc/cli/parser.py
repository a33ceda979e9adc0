"""The command line. Large packages are not imported before a verb runs."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hf_posenc.cli import catalogue, evaluation, running, verbs
from hf_posenc.errors import PositionEncodingError, UnknownNameError, UsageError, close_names, did_you_mean
from hf_posenc.evaluations import EVALUATIONS
from hf_posenc.extensions import import_named_modules, name_modules
from hf_posenc.report.tables import fitted_to, terminal_width
from hf_posenc.version import installed

_SCHEME_HELP = "a scheme, with options after a colon: rope  rope:theta=500000,layout=interleaved"

#: Verbs that pass the words after them to another program.
_PROGRAMS = {"run", "compare", *running.PROGRAMS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the shell command.

    Args:
        arguments: the words after `hf-posenc`; by default those from `sys.argv`.

    Returns:
        The exit status: 0, or 2 for an error of the library, whose message is printed to stderr. Other exceptions
        propagate with their traceback.
    """
    imports, command, words = _split(list(sys.argv[1:] if arguments is None else arguments))
    chosen = command[1] if command[:1] == ["eval"] and len(command) > 1 else None
    parser = _parser(chosen)
    if not command and not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    try:
        if chosen is not None and chosen not in EVALUATIONS and not chosen.startswith("-"):
            raise UnknownNameError("evaluation", chosen, EVALUATIONS)
        if command and command[0] in _PROGRAMS and command[1:] not in (["-h"], ["--help"]):
            words = [*command[1:], *words[words[:1] == ["--"] :]]
            if command[0] == "run" and not words:
                parser.error("no command is given; usage: hf-posenc run -- COMMAND ...")
            name_modules(imports)
            return running.start(command[0], words, imports)
        options, unknown = parser.parse_known_args([*command, *words])
        if unknown:
            # argparse itself would show the usage of the whole command instead of the verb's.
            known = [flag for action in options.parser._actions for flag in action.option_strings]
            close = close_names(unknown[0].partition("=")[0], known) if unknown[0].startswith("-") else []
            problem = f"unrecognized arguments: {' '.join(unknown)}. {did_you_mean(close)}".rstrip()
            options.parser.error(f"{problem} {options.parser.prog} --help lists the options.")
        name_modules(imports)
        import_named_modules()
        with fitted_to(terminal_width()):
            status = int(options.run(options))
        sys.stdout.flush()
        return status
    except (PositionEncodingError, UsageError) as error:
        text = str(error) if getattr(error, "is_list", False) else " ".join(str(error).split())
        print(f"hf-posenc: error: {text}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 1


def _split(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Splits words into modules given with `--import`, the words of this command, and those of the program to start."""
    imports: list[str] = []
    command: list[str] = []
    while words and words[0] != "--":
        if (command[:1] == ["run"] and len(command) > 1) or (command and command[0] in _PROGRAMS - {"run"}):
            break
        word = words.pop(0)
        if word.startswith("--import="):
            imports.append(word.removeprefix("--import="))
        elif word == "--import" and words:
            imports.append(words.pop(0))
        else:
            command.append(word)
    return imports, command, words


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe without a reader. If so, stdout is redirected, because Python flushes it at exit."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return gone


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Returns the parser; `chosen` is the evaluation given on the command line."""
    parser = argparse.ArgumentParser(
        prog="hf-posenc",
        description="Replace the position encoding of Hugging Face models, and see what it does.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=", ".join(installed()))
    parser.add_argument(
        "--import",
        action="append",
        metavar="MODULE",
        help="import this module first, here and in all started processes, for the schemes or architectures that it "
        "registers; may be given several times",
    )
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int] | None, **settings: Any) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = subparsers.add_parser(name, **settings)
        added.set_defaults(run=run, parser=added)
        return added

    schemes = verb("schemes", catalogue.schemes, help="list the schemes and their options")
    schemes.add_argument("names", nargs="*", metavar="NAME", help="only these, in detail")
    schemes.add_argument("--json", action="store_true", help="print JSON")

    inspect = verb("inspect", verbs.inspect, help="show where a model uses positions")
    inspect.add_argument("--config-only", action="store_true", help="build from the config, with random weights")

    patch = verb("patch", verbs.patch, help="replace the position encoding of a checkpoint")
    patch.add_argument("--part", metavar="NAME", help="part of a composite model: text, vision, ... (see inspect)")
    patch.add_argument("--layers", metavar="0,1,2", help="patch only these layers")
    patch.add_argument("--elsewhere", metavar="SCHEME", help="scheme of the other layers (with --layers)")
    patch.add_argument("--cross-attention", metavar="SCHEME", help="scheme of a decoder's attention to an encoder")
    extension_help = "fill a longer learned table from the model's own rows: linear, long_clip, spline, repeat or last"
    patch.add_argument("--table-extension", metavar="HOW", help=extension_help)
    patch.add_argument("--stock", action="store_true", help="save a plain checkpoint that needs no hf_posenc")
    patch.add_argument("--replace", action="store_true", help="discard the scheme that MODEL already has")

    export = verb("export", verbs.export, help="save a patched checkpoint in a form that needs no hf_posenc")
    export.add_argument("--to", default="stock", metavar="TARGET", help=verbs.TARGET_HELP)
    export.add_argument("--push-to-hub", metavar="REPOSITORY", help="also upload it to this repository on the hub")
    export.add_argument(
        "--merge-adapters", action="store_true", help="merge the PEFT adapters in MODEL into their base model"
    )
    export.add_argument("--approximate", action="store_true", help="write the closest form if no form is exact")

    evaluate = verb("eval", None, help="measure what a position encoding does")
    tests = evaluate.add_subparsers(title="tests", metavar="TEST", required=True)
    evaluation.add_evaluations(tests, _SCHEME_HELP, chosen)

    report = verb("report", evaluation.report, help="show tables and figures of results that eval --json wrote")
    files = "a JSON file; several share a table and a figure (needs pydantic)"
    report.add_argument("files", nargs="+", metavar="FILE", help=files)
    evaluation.add_forms(report, figure=True)

    plot = verb("plot", verbs.plot, help="draw what a scheme does, as PNG and SVG")
    plot.add_argument("--kind", nargs="+", metavar="KIND", help="kinds of figures (default: all that apply)")
    plot.add_argument("--output", default="plots", metavar="DIR", help="folder for the files (default: plots)")
    plot.add_argument("--dark", action="store_true", help="draw for a dark page (files end in _dark)")
    plot.add_argument("--list", action="store_true", help="only list the kinds that apply to the scheme")

    for added in (inspect, patch, export):
        added.add_argument("model", metavar="MODEL", help="hub id or local folder")
    for added in (patch, plot):
        added.add_argument("scheme", metavar="SCHEME", help=_SCHEME_HELP)
    of_scheme = "option of the scheme; V may be JSON"
    for added, meaning in ((patch, of_scheme), (plot, of_scheme), (export, "option of the target, such as dtype=q8_0")):
        added.add_argument("--option", action="extend", nargs="+", default=[], metavar="K=V", help=meaning)
    for added in (patch, export):
        added.add_argument("--output", required=True, metavar="DIR", help="folder to save the model in")
        added.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")

    verb(
        "run",
        None,
        help="run a program with the plugin: run -- lm-eval ..., run -- accelerate launch script.py",
        usage="hf-posenc [--import MODULE] run -- COMMAND ...",
        description="COMMAND is a program, a .py file, a script of this package (training/run_clm.py) or -m MODULE. "
        "The plugin is imported in it and in every Python process that it starts, except those started with python -I, "
        "-E or -S.",
    )
    for name, (command, _) in running.PROGRAMS.items():
        verb(name, None, help=f"the same as run -- {' '.join(command)}")
    verb("compare", None, help="train one model per scheme and compare (training/compare.py; --help shows its options)")
    return parser
