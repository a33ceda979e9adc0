"""Writes docs/reference/architectures.md by running every check of tests/architectures on every architecture.

python docs/generate/architectures.py                     # everything, about an hour on two cores
python docs/generate/architectures.py --only llama vision # model types or kinds; the others are kept
python docs/generate/architectures.py --no-run            # the page again from the record
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate.architectures_page import document, failures  # noqa: E402
from tests.architectures.examination import examine  # noqa: E402
from tests.architectures.population import Pair, all_pairs  # noqa: E402
from tests.processes import each  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "architectures.md"
DATA = ROOT / "docs" / "results" / "architectures.json"


def main() -> int:
    """Runs the checks; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="model types or kinds to run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per architecture")
    parser.add_argument("--no-run", action="store_true", help=f"write the page from {DATA.relative_to(ROOT)}")
    parser.add_argument("--no-write", action="store_true", help="print failures only")
    arguments = parser.parse_args()
    record = json.loads(DATA.read_text()) if DATA.is_file() else {}
    pairs, only = all_pairs(), arguments.only
    chosen = [pair for pair in pairs if only is None or pair.model_type in only or pair.kind in only]
    ran: dict[str, list[dict[str, Any]]] = {}
    for pair, found in [] if arguments.no_run else _records(chosen, arguments.processes, arguments.timeout):
        ran[pair.name] = record[pair.name] = found
        if not arguments.no_write:
            # After each architecture, so that a sweep that is stopped is not lost.
            _write(record)
    failed = failures([one for found in (ran or record).values() for one in found])
    print("\n".join(failed))
    if not arguments.no_write:
        record = {pair.name: record[pair.name] for pair in pairs if pair.name in record}
        _write(record)
        PAGE.write_text(document([one for found in record.values() for one in found]))
    return int(bool(failed))


def _records(pairs: list[Pair], processes: int, timeout: float) -> Iterator[tuple[Pair, list[dict[str, Any]]]]:
    """What is recorded of each architecture: of each of its parts, or why its process died."""
    for pair, answer, died in each(
        examine, pairs, processes=processes, timeout=timeout, preload="tests.architectures.examination"
    ):
        # The paths in a traceback are those of one machine.
        found = (
            [{"pair": pair.name, "died": died.strip().splitlines()[-1]}]
            if died
            else [record.to_dict() for record in answer]
        )
        yield pair, [one | {"kind": pair.kind, "model_type": pair.model_type} for one in found]


def _write(record: dict[str, Any]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
