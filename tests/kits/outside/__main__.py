"""Runs a test suite of transformers or PEFT on patched models, and compares the failures with those of stock models.

    python -m tests.kits.outside CHECKOUT tests/models/llama tests/models/gpt2
    python -m tests.kits.outside PEFT_CHECKOUT tests/test_decoder_models.py --every 4

Nothing of the suites is copied: CHECKOUT is a folder with the sources of the project. The installed version of it is
what is tested. The per-model tests of transformers are in its repository only, its common tests in its source archive
too. Ends with status 1 if a difference is not in `accepted.py`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kits.outside.accepted import reason

HERE = Path(__file__).resolve().parent


def run_arm(arm: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Outcomes by test; tests after a crash of the process are missing."""
    target = (arguments.out / f"{arm}.json").resolve()
    target.unlink(missing_ok=True)
    options = {
        "arm": arm,
        "file": str(target),
        "every": arguments.every,
        "models": str(arguments.out.resolve() / "models"),
    }
    path = os.pathsep.join([str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"HF_POSENC_OUTSIDE": json.dumps(options), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "patched_models", "-p", "no:cacheprovider", "-p", "no:cov"]
    command += ["-o", "addopts=", "-W", "ignore", "--tb=no", *arguments.tests]
    command += ["-k", arguments.k] if arguments.k else []
    with open(target.with_suffix(".log"), "w", encoding="utf-8") as log:
        subprocess.run(command, cwd=arguments.checkout, env=environment, stdout=log, stderr=log, check=False)
    if not target.exists():
        raise SystemExit(f"No test ran; see {target.with_suffix('.log')}.")
    return json.loads(target.read_text(encoding="utf-8"))


def differences(arm: str, stock: dict[str, str], outcomes: dict[str, str]) -> tuple[list[str], dict[str, int]]:
    """Unexplained differences from the stock arm, and how many have each accepted reason."""
    unexplained: list[str] = []
    accepted: dict[str, int] = collections.Counter()
    for test, outcome in stock.items():
        now = outcomes.get(test, "failed: the process ended")
        if outcome != "passed" or now in ("passed", "skipped"):
            continue
        why = reason(arm, test, now)
        if why is None:
            unexplained.append(f"{test}\n    {now}")
        else:
            accepted[why] += 1
    return unexplained, accepted


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="+", help="files or folders below the checkout")
    parser.add_argument("--arms", nargs="+", default=["native", "alibi", "t5"], help="`native`, or schemes")
    parser.add_argument("--every", type=int, default=1, help="run one test in so many")
    parser.add_argument("-k", default="", help="as for pytest")
    parser.add_argument("--out", type=Path, default=Path("outputs/outside"), help="folder for outcomes and logs")
    parser.add_argument("--compare", action="store_true", help="do not run, but compare the outcomes in --out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, str]] = {}
    for arm in ("stock", *arguments.arms):
        stored = arguments.out / f"{arm}.json"
        outcomes[arm] = json.loads(stored.read_text()) if arguments.compare else run_arm(arm, arguments)
    print("| arm | passed | failed | refused | skipped | only here | accepted |\n|---|---:|---:|---:|---:|---:|---:|")
    status = 0
    reports = []
    for arm, by_test in outcomes.items():
        kinds = collections.Counter(outcome.partition(":")[0] for outcome in by_test.values())
        unexplained, accepted = differences(arm, outcomes["stock"], by_test)
        counts = [kinds["passed"], kinds["failed"], kinds["refused"], kinds["skipped"], len(unexplained)]
        print(f"| {arm} |", " | ".join(map(str, [*counts, sum(accepted.values())])), "|")
        reports += [f"\n{arm}: {count} accepted: {why}" for why, count in accepted.items()]
        reports += [f"\n{arm}: {test}" for test in unexplained]
        status |= bool(unexplained)
    print(*reports, sep="")
    return status


if __name__ == "__main__":
    sys.exit(main())
