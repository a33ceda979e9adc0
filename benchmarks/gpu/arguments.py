"""The options of `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PARTS = ("correctness", "price", "study")


@dataclass(frozen=True)
class Options:
    """What is run, and for how long.

    Args:
        output_dir: of `results.json` and `table.md`.
        parts: of `PARTS`, in their order.
        smoke: whether everything is so small that a CPU runs it in seconds.
        device: "cuda" or "cpu"; `None` for a GPU if there is one, and in a smoke run for the CPU otherwise.
        budget_seconds: of each part; it is stopped then, and goes on with the next call.
        cell_seconds: a cell that takes longer is ended and told as one that hangs.
        overwrite: whether earlier results of these parts are forgotten.
    """

    output_dir: Path
    parts: tuple[str, ...]
    smoke: bool
    device: str | None
    budget_seconds: float
    cell_seconds: float
    overwrite: bool


def parse_options(words: Sequence[str]) -> Options:
    """Reads the command line; exits with status 2 and a sentence for what cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Is the library right on this GPU, what does position cost there, and a small study.",
        epilog="Run the same command again to go on where a part was stopped.",
    )
    parser.add_argument(
        "--output_dir", type=Path, help="default: docs/results/gpu, and outputs/gpu_smoke in a smoke run"
    )
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS, help="default: all")
    parser.add_argument("--smoke", action="store_true", help="every part in seconds, on a CPU where there is no GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; a smoke run takes what is there")
    parser.add_argument(
        "--budget_minutes", type=_positive, default=8.0, help="of each part, which goes on with the next call (8)"
    )
    parser.add_argument(
        "--cell_minutes", type=_positive, default=4.0, help="a single cell that takes longer is ended (4)"
    )
    parser.add_argument("--overwrite", action="store_true", help="forget earlier results of these parts")
    found = parser.parse_args(words)
    folder = Path("outputs/gpu_smoke") if found.smoke else Path("docs/results/gpu")
    return Options(
        output_dir=found.output_dir or folder,
        parts=tuple(part for part in PARTS if part in found.parts),
        smoke=found.smoke,
        device=found.device,
        budget_seconds=found.budget_minutes * 60,
        cell_seconds=found.cell_minutes * 60,
        overwrite=found.overwrite,
    )


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
