"""Breaks a copy of a file in one place at a time, runs the tests that should notice, and prints a table.

    python -m tests.mutations hf_posenc/attention/windows.py tests/attention/test_windows.py
    python -m tests.mutations hf_posenc/patching/call/cache.py tests/patching -k cache --most 40

A condition never holds, a comparison is another one, a number is larger by one, or a statement is left out. A mutation
is killed if a test fails. A surviving mutation shows code that no test covers, or code without effect.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Seconds after which a run counts as killed: the mutation has made an endless loop.
_LIMIT = 900
_OTHER: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change of a file."""

    line: int
    before: str
    after: str
    text: str


def mutations(text: str) -> list[Mutation]:
    """All changes of a file, in the order of its lines."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def replaced(node: ast.expr | ast.stmt, after: str) -> Mutation:
        # Columns of `ast` count bytes.
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        code = text.encode()
        whole = (code[:first] + after.encode() + code[last:]).decode()
        return Mutation(node.lineno, code[first:last].decode(), after, whole)

    found = [replaced(node, after) for node, after in _changes(ast.parse(text))]
    return sorted(found, key=lambda mutation: mutation.line)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Places in the code, and their replacements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, "False"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield node, f"({ast.unparse(ast.Compare(node.left, [_OTHER[type(node.ops[0])]], node.comparators))})"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, repr(node.value + 1)
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield node, "pass"


def main() -> int:
    """Prints a row for each mutation, and returns 1 if one of them survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="relative to the repository")
    parser.add_argument("tests", nargs="+", help="files or folders that take less than a minute")
    parser.add_argument("-k", default="", help="as for pytest")
    parser.add_argument("--most", type=int, default=20, help="how many mutations are tried (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (0)")
    options = parser.parse_args()
    words = [*options.tests, *(("-k", options.k) if options.k else ())]
    every = mutations((ROOT / options.file).read_text(encoding="utf-8"))
    chosen = sorted(random.Random(options.seed).sample(range(len(every)), min(options.most, len(every))))
    with tempfile.TemporaryDirectory() as folder:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        if _run(folder, words):
            sys.exit("The tests fail without a mutation.")
        print("| line | before | after | outcome |\n| ---: | --- | --- | --- |")
        survivors = 0
        for mutation in (every[number] for number in chosen):
            (Path(folder) / options.file).write_text(mutation.text, encoding="utf-8")
            survived = _run(folder, words) == 0
            survivors += survived
            before = " ".join(mutation.before.split())[:60]
            print(
                f"| {mutation.line} | `{before}` | `{mutation.after[:60]}` | {'SURVIVED' if survived else 'killed'} |"
            )
    print(f"\n{len(chosen) - survivors} of {len(chosen)} killed, of {len(every)} that there are.")
    return int(survivors > 0)


def _run(folder: str, words: list[str]) -> int:
    """The exit status of pytest; 1 if it takes too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=_LIMIT).returncode
    except subprocess.TimeoutExpired:
        return 1


if __name__ == "__main__":
    sys.exit(main())
