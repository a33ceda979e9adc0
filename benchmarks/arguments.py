"""The options of `python -m benchmarks.price`, and checks of options for several commands."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.levels import DEFAULT_LEVELS, LEVELS, image_side
from benchmarks.lineup import BACKENDS, REFERENCES
from benchmarks.machine import DTYPES, check_device
from benchmarks.peers import PEER_GROUPS
from benchmarks.subjects import COMPILED, DECODE_BATCH, PHASES, Setting
from benchmarks.timing import MIN_ROUNDS, Pace
from hf_posenc import UnknownNameError, get_scheme, list_schemes
from hf_posenc.errors import UsageError
from hf_posenc.schemes.registry import parse_scheme

_QUICK: dict[str, Any] = {
    "lengths": [512, 1024], "levels": ["attention", "model"], "peers": ["kernel", "mask"], "memory_lengths": [],
    "schemes": ["none", "sinusoidal", "rope", "alibi", "t5"], "rounds": 5, "cell_seconds": 10.0, "budget_minutes": 2.0,
}  # fmt: skip


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line and adds the `setting` and the `pace`. Exits with status 2 and a message for invalid
    options.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.price",
        description="Measures the cost of each position encoding, next to the same model without one.",
        epilog="Run the same command again to continue an interrupted run.",
    )
    phases = (*PHASES, DECODE_BATCH, *COMPILED)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("outputs/price"), help="default: %(default)s")
    add("--quick", action="store_true", help="measure a few schemes at two lengths, within three minutes")
    add_device(parser)
    add(
        "--lengths", type=length_of, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384],
        help="tokens, or patches of a ViT; without a length nothing is timed",
    )  # fmt: skip
    add(
        "--levels", choices=tuple(LEVELS), nargs="+", default=DEFAULT_LEVELS,
        help="by default one attention call, a small Llama and a small BERT; also a Llama with the shape of "
        "SmolLM2-135M, a narrow and deep Llama, a small ViT, and a ViT with the shape of ViT-B",
    )  # fmt: skip
    add("--phases", choices=phases, nargs="+", default=PHASES)
    add(
        "--schemes", type=scheme_name, nargs="+",
        help="by default all, or the usual ones for an encoder; alibi@flex_attention sets a backend, alibi:axes=2 sets "
        "options, alibi+forget_gate combines schemes",
    )  # fmt: skip
    add("--peers", choices=tuple(PEER_GROUPS), nargs="*", default=tuple(PEER_GROUPS), help="without a name, none")
    add(
        "--memory_lengths", type=length_of, nargs="*", default=[4096, 16384],
        help="lengths for peak memory; above 8192 only for a training step of bare, rope, alibi and t5",
    )  # fmt: skip
    add("--rounds", type=whole_number(MIN_ROUNDS), default=10, help="maximum number of rounds; at least three are run")
    add("--budget_minutes", type=positive, default=math.inf, help="starts no measurements after this time")
    add(
        "--cell_seconds", type=positive, default=240.0,
        help="adds no rounds to a level, phase and length after this time",
    )  # fmt: skip
    add("--subject_seconds", type=positive, default=90.0, help="skips subjects that take longer for three rounds")
    add("--seed", type=int, default=0, help="seed of weights, tokens and order")
    add("--overwrite", action="store_true", help="discard earlier results in the folder")
    if "--quick" in words:
        parser.set_defaults(**_QUICK)
    options = parse_with_device(parser, words)
    if any(LEVELS[level].kind == "vit" for level in options.levels):
        for length in (*options.lengths, *options.memory_lengths):
            try:
                image_side(length)
            except ValueError as error:
                parser.error(f"--lengths: {error}")
    options.setting = Setting(device=options.device, dtype=options.dtype, seed=options.seed)
    options.pace = Pace(options.rounds, options.cell_seconds, options.subject_seconds, options.seed)
    return options


def subjects_of(options: argparse.Namespace, level: str) -> list[str]:
    """Returns the references and schemes that are measured at a level."""
    usual = LEVELS[level].usual or list_schemes()
    return [*REFERENCES, *dict.fromkeys(usual if options.schemes is None else options.schemes)]


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device` and `--dtype`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")


def parse_with_device(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the words; exits with status 2 if the device does not exist."""
    options = parser.parse_args(words)
    try:
        check_device(options.device)
    except BenchmarkError as error:
        parser.error(str(error))
    return options


def scheme_name(text: str) -> str:
    """Checks a name from the command line, with options after a colon, or names of schemes to combine."""
    name, separator, backend = text.partition("@")
    if separator and backend not in BACKENDS:
        raise argparse.ArgumentTypeError(f"the backend {backend!r} is not one of {', '.join(BACKENDS)}")
    try:
        if ":" in name:
            parse_scheme(name)
        arranges = any(get_scheme(part.partition(":")[0]).combinator for part in name.split("+"))
    except (UnknownNameError, UsageError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if arranges:
        raise argparse.ArgumentTypeError(
            f"{text!r} arranges other schemes and has no cost itself. Give the schemes in it. Known: "
            f"{', '.join(list_schemes())}."
        )
    return text


def whole_number(least: int) -> Callable[[str], int]:
    """Returns a type for `argparse`: a whole number of at least `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


#: A number of tokens.
length_of = whole_number(16)


def positive(text: str) -> float:
    """Checks that a number from the command line is above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
