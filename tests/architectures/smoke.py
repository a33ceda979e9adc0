"""Builds and calls every stock model once, and prints which cannot be built or called and why.

python -m tests.architectures.smoke                  # everything
python -m tests.architectures.smoke llava vision     # model types or kinds
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from .examination import smoke
from .population import all_pairs
from .processes import each


def main() -> int:
    """Prints a line for each model that is not called, and the counts; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="model types or kinds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per model")
    arguments = parser.parse_args()
    pairs = [
        pair
        for pair in all_pairs()
        if not arguments.only or pair.model_type in arguments.only or pair.kind in arguments.only
    ]
    counts: Counter[str] = Counter()
    found = each(
        smoke,
        pairs,
        processes=arguments.processes,
        timeout=arguments.timeout,
        preload="tests.architectures.examination",
    )
    for pair, answer, died in found:
        counts["failed" if died else answer.split(":")[0]] += 1
        if died or answer != "ok":
            print(f"{pair.name}: {died.strip().splitlines()[-1] if died else answer}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
