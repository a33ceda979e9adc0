"""`python -m tests.kits.gpu`: see `tests.kits.gpu`. It has to start on a machine that lacks torch."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkError
from tests.kits.gpu.rows import CRASHED, WRONG, PartFile

PARTS = ("correctness", "launches")
#: Without these nothing runs.
_REQUIRED = ("torch", "transformers", "accelerate", "safetensors", "pydantic")


def main(arguments: list[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit status: 0; 1 if a result is wrong or a cell crashed; 2 for what cannot be run; 130 if interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_options(words)
    missing = [package for package in _REQUIRED if not importlib.util.find_spec(package)]
    if missing:
        print(f"gpu: not installed: {', '.join(missing)}. Run: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    from tests.kits.gpu.cells import run_part
    from tests.kits.gpu.table import format_kit

    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "-m", "tests.kits.gpu", *words])
        for part in PARTS:
            if part in options.parts:
                run_part(part, options, command)
    except (BenchmarkError, OSError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again to go on with the next cell.", file=sys.stderr)
        return 130
    files = {part: PartFile(options.output_dir / f"{part}.jsonl") for part in PARTS}
    text = format_kit({part: file for part, file in files.items() if file.headers})
    (options.output_dir / "table.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"Written to {options.output_dir}: a file of rows for each part, table.md.", file=sys.stderr)
    return int(any(row["status"] in (WRONG, CRASHED) for file in files.values() for row in file.rows.values()))


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; exits with status 2 and a sentence for what cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kits.gpu",
        description="Is the library right on this GPU, and what does it launch.",
        epilog="Run the same command again to go on where a part was stopped.",
    )
    add = parser.add_argument
    add("--output_dir", type=Path, help="default: docs/results/gpu, and outputs/gpu_smoke in a smoke run")
    add("--parts", choices=PARTS, nargs="+", default=PARTS, help="default: all")
    add("--smoke", action="store_true", help="every part at a tiny size, on a CPU where there is no GPU")
    add("--device", choices=("cuda", "cpu"), help="default: cuda; a smoke run takes what is there")
    add("--budget_minutes", type=float, default=8.0, help="of each part, after which no cell is begun (8)")
    add("--cell_minutes", type=float, default=4.0, help="a single cell that takes longer is ended (4)")
    add("--workers", type=int, default=1, help="processes at a time (1)")
    add("--overwrite", action="store_true", help="forget earlier results of these parts")
    options = parser.parse_args(words)
    if not (options.budget_minutes > 0 and options.cell_minutes > 0):
        parser.error("--budget_minutes and --cell_minutes have to be above 0")
    if options.workers < 1:
        parser.error("--workers has to be at least 1")
    options.output_dir = options.output_dir or Path("outputs/gpu_smoke" if options.smoke else "docs/results/gpu")
    return options


if __name__ == "__main__":
    sys.exit(main())
