"""Writes docs/reference/architectures.md by running every check of tests/architectures on every architecture.

python docs/generate/architectures.py            # everything, about 20 minutes on two cores
python docs/generate/architectures.py --only llama vit vision --no-write
python docs/generate/architectures.py --from findings.json      # the page again, without running anything
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate.architectures_page import document, listed  # noqa: E402
from tests.architectures.examination import examine  # noqa: E402
from tests.architectures.population import Pair, all_pairs  # noqa: E402
from tests.architectures.processes import each  # noqa: E402


def main() -> int:
    """Runs the sweep; returns 1 if a process died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="model types or kinds to run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per architecture")
    parser.add_argument("--json", type=Path, default=None, help="write the raw findings here as well")
    parser.add_argument("--from", dest="read", type=Path, default=None, help="raw findings to write the page from")
    parser.add_argument("--no-write", action="store_true", help="print failures only")
    arguments = parser.parse_args()
    if arguments.read is not None:
        records = json.loads(arguments.read.read_text())
    else:
        only = arguments.only
        pairs = [pair for pair in all_pairs() if only is None or pair.model_type in only or pair.kind in only]
        records = list(_records(pairs, arguments.processes, arguments.timeout, arguments.json))
    print("\n".join(listed(records, "fail")))
    if not arguments.no_write:
        (ROOT / "docs" / "reference" / "architectures.md").write_text(document(records))
    return int(any("died" in record for record in records))


def _records(pairs: list[Pair], processes: int, timeout: float, path: Path | None) -> list[dict[str, Any]]:
    """The findings as dictionaries; written after each architecture, so that a sweep that is stopped is not lost."""
    records: list[dict[str, Any]] = []
    found = each(examine, pairs, processes=processes, timeout=timeout, preload="tests.architectures.examination")
    for pair, answer, died in found:
        own = [{"pair": pair.name, "died": died}] if died else [record.to_dict() for record in answer]
        records += [one | {"kind": pair.kind, "model_type": pair.model_type} for one in own]
        if path is not None:
            path.write_text(json.dumps(records, indent=1))
    return records


if __name__ == "__main__":
    sys.exit(main())
