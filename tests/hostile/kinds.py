"""Kinds of files: how they are written, damaged, and read. Every kind is a row of `child.KINDS`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

#: Inputs are drawn for every kind; this many times as many where the variable is set to a number.
MULTIPLE = int(os.environ.get("HF_POSENC_FUZZ", "1"))


@dataclass(frozen=True)
class Input:
    """A file as it is after the damage.

    Args:
        place: the replacement of the file: bytes, or a function that puts something else there.
        neutral: whether it still means the same.
        words: of which an error has to name one, beside the file.
    """

    what: str
    place: bytes | Callable[[Path], None]
    neutral: bool = False
    words: tuple[str, ...] = ()


class FileKind:
    """A kind of file. `same` says whether what is read has to be what was written, or be refused."""

    #: Shown in docs/explanation/reliability.md.
    title: str
    inputs: int
    same: bool = True
    #: The file that the inputs of every run take the place of.
    path: Path

    def prepare(self, folder: Path) -> None:
        """Writes sound files into an empty folder."""
        raise NotImplementedError

    def fixed(self) -> list[tuple[Path, Input]]:
        """Inputs of every run."""
        return [(self.path, given) for given in special_files(self.path.read_bytes())]

    def draw(self, rng: Random) -> tuple[Path, Input]:
        """A random input, and the file it takes the place of."""
        raise NotImplementedError

    def ours(self, path: Path) -> bool:
        """Whether the damaged file still names this package. Otherwise, other code decides what it means."""
        return True

    def read(self, path: Path, number: int) -> str:
        """Reads the file: "same" if the content is unchanged, otherwise what was read. Raises if it is refused."""
        raise NotImplementedError


@contextlib.contextmanager
def damaged(path: Path, given: Input) -> Iterator[None]:
    """Damages the file inside a `with` block, and restores it afterwards."""
    aside = path.with_name(path.name + ".sound")
    path.rename(aside)
    try:
        if isinstance(given.place, bytes):
            path.write_bytes(given.place)
        else:
            given.place(path)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


def json_bytes(document: Any) -> bytes:
    """As `json.dumps` writes it, lone surrogates too."""
    return json.dumps(document).encode("utf-8", "surrogatepass")


def special_files(text: bytes) -> list[Input]:
    """Content that may replace any JSON file."""

    def loop(path: Path) -> None:
        path.symlink_to(path.name)

    half = len(text) // 2
    return [
        Input("empty", b""),
        Input("a directory", lambda path: path.mkdir()),
        Input("a symbolic link to itself", loop),
        Input("spaces, 32 MB", b" " * 2**25),
        Input("not UTF-8", text[:half] + b"\xff\xfe" + text[half:]),
        Input("UTF-16", text.decode().encode("utf-16")),
        Input("zeros", bytes(len(text))),
        Input("cut in half", text[:half]),
        Input("twice", text + text),
        Input("null", b"null"),
        Input("a list", b"[" + text + b"]"),
        Input("30,000 brackets", b"[" * 30_000),
        Input("brackets in a key", b'{"hf_posenc": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
        Input("a number of 5,000 digits", text.replace(b": 1,", b": " + b"1" * 5000 + b",", 1)),
        Input("more spaces", text.replace(b"\n", b"\n\n  "), neutral=True),
    ]
