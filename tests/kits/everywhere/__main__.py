"""`python -m tests.kits.everywhere`: see `tests.kits.everywhere`."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import transformers

import hf_posenc
from benchmarks.errors import BenchmarkError
from benchmarks.machine import describe_machine
from hf_posenc.report import Result
from tests.kits.everywhere.measure import measure
from tests.kits.everywhere.models import minilm, smollm2
from tests.kits.everywhere.page import page
from tests.kits.everywhere.plan import Plan

RECORDS = "results.json"


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m tests.kits.everywhere",
        description="Runs patched models in programs that do not know this package, and writes the numbers and a page.",
        epilog="Checkpoints and exports that exist are used again.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/everywhere"),
        help=f"folder of {RECORDS}; the page is beside it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=Path("outputs/everywhere_work"),
        help="models and exports, about 15 GB (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--page", action="store_true", help="write the page again from the records")
    options = parser.parse_args(words)
    records = options.output / RECORDS
    try:
        if not options.page:
            _measure(options, shlex.join(["python", "-m", "tests.kits.everywhere", *words])).save(records)
        write_page(records)
    except (BenchmarkError, hf_posenc.PositionEncodingError, OSError, subprocess.CalledProcessError) as error:
        print(f"everywhere: {error}", file=sys.stderr)
        return 2
    return 0


def write_page(records: Path) -> None:
    """Writes the page of a record file beside its folder."""
    text = page(Result.load(records))
    records.parent.with_suffix(".md").write_text(text, encoding="utf-8")


def _measure(options: argparse.Namespace, command: str) -> Result:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    work = options.work.resolve()
    bases = {"smollm2": smollm2(work), "minilm": minilm()}
    result = measure(Plan(), work, describe_machine("cpu"), bases, command)
    options.output.mkdir(parents=True, exist_ok=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
