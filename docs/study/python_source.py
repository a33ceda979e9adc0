"""Writes the source of this Python's standard library as a dataset: a corpus that is not prose and needs no download.

python docs/study/python_source.py outputs/python_source.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tokenize
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training.files import write_text

#: Installed packages; tests, which repeat what they test; and encodings, whose tables repeat one another.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def source_files(folder: Path) -> dict[str, str]:
    """The text of every Python file of a folder by its path there, without packages, tests and tables."""
    texts: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder)
        if not _LEFT_OUT & set(inner.parts):
            # Opens a file with the encoding that it declares.
            try:
                with tokenize.open(path) as file:
                    texts[inner.as_posix()] = file.read()
            except (SyntaxError, UnicodeDecodeError) as error:
                print(f"python_source: {inner} is left out: {error}", file=sys.stderr)
    return texts


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, help="a file that ends in .jsonl: one line per source file, name and text")
    output = parser.parse_args(arguments).output
    texts = source_files(Path(sysconfig.get_path("stdlib")))
    if output.suffix != ".jsonl" or not texts:
        problem = f"the output is {output}" if texts else "this Python comes without the source of its standard library"
        print(f"python_source: {problem}; expected are a name that ends in .jsonl, and source files.", file=sys.stderr)
        return 2
    version = sys.version.split()[0]
    rows = ({"name": name, "python": version, "text": text} for name, text in texts.items())
    write_text(output, "".join(json.dumps(row) + "\n" for row in rows))
    size = sum(map(len, texts.values()))
    print(f"Written to {output}: {len(texts)} files of Python {version}, {size:,} characters.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
