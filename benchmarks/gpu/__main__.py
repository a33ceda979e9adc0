"""`python -m benchmarks.gpu`: see `benchmarks.gpu`."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.gpu.arguments import parse_options
from benchmarks.gpu.part import CRASHED, WRONG
from benchmarks.gpu.requirements import missing_required
from benchmarks.gpu.store import Store
from benchmarks.gpu.supervisor import Supervisor
from benchmarks.store import write_text


def main(arguments: list[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit status: 0; 1 if a result is wrong or a cell crashed; 2 for what cannot be run; 130 if interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = parse_options(words)
    missing = missing_required()
    if missing:
        print(f"gpu: not installed: {', '.join(missing)}. Run: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        command = shlex.join(["python", "-m", "benchmarks.gpu", *words])
        store = Store(options.output_dir, options.parts if options.overwrite else (), command)
        Supervisor(options, store, _tell).run()
    except BenchmarkError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        store.save()
        _write_table(store)
        print("\nInterrupted. Run the same command again to go on with the next cell.", file=sys.stderr)
        return 130
    _write_table(store)
    rows = [row for part in store.content["parts"].values() for row in part["rows"].values()]
    return int(any(row["status"] in (WRONG, CRASHED) for row in rows))


def _write_table(store: Store) -> None:
    from benchmarks.gpu.table import format_kit

    text = format_kit(store.content)
    write_text(store.path.with_name("table.md"), text)
    print(text)
    _tell(f"Written to {store.path.parent}: results.json, table.md.")


def _tell(line: str, **_: Any) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
