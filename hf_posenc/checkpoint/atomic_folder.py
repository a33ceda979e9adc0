"""Saving a model into a folder so that whoever is killed on the way leaves the old model or the new one.

Files are written into a draft, a folder of its own. Where the target does not exist, the draft becomes it in one
`rename`. Where it does, it may hold what others write at the same time (a tokenizer, optimizer states of other ranks,
logs), so it stays in place: the draft lies inside it, a file with the names of what has been written makes the draft
final, and then its files are moved up, one by one. If the process dies before that file exists, the old model is
whole. If it dies afterwards, `finish_saving`, which every load and every later save begins with, moves the rest.

A draft found in a folder is only trusted as far as it can be checked: it moves files out of itself into the folder
around it, never anywhere else, and it gives way to a model that was saved after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

#: How a draft is called. The target's name is no part of it, because both together can be too long for a file system.
_DRAFT = re.compile(r"\.hf_posenc-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")
#: What makes a draft final: a JSON list of the files it held when it was complete.
_FINAL = "written.json"
#: Weights of transformers: whole or in shards, with the index of shards, of any variant ("model.fp16.safetensors").
_WEIGHTS = re.compile(
    r"model(?:\.(?P<of_weights>[\w-]+?))?(?:-\d{5}-of-\d{5})?\.safetensors"
    r"(?:\.index(?:\.(?P<of_index>[\w-]+))?\.json)?"
)
#: Without it, nothing reads a folder as a model.
_CONFIG = "config.json"
#: After how many seconds a draft of another machine counts as abandoned.
_ABANDONED = 24 * 3600


@contextlib.contextmanager
def replaced_as_a_whole(target: Path) -> Iterator[Path]:
    """Gives an empty folder to write into; at the end of the block its files are in `target`, all of them or none.

    Files of the same names are replaced, and earlier weights of the same variant go. Everything else in `target` stays.
    A block that raises, or writes nothing, changes nothing.

    Args:
        target: folder of the model; it and its parents are made where they are missing.
    """
    target = Path(os.path.realpath(target))
    clear_drafts(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = f".hf_posenc-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    draft = (target if target.is_dir() else target.parent) / name
    draft.mkdir()
    try:
        yield draft
        if any(draft.iterdir()):
            _commit(draft, target)
    finally:
        if not (draft / _FINAL).exists():
            shutil.rmtree(draft, ignore_errors=True)


def clear_drafts(target: str | os.PathLike[str]) -> None:
    """Leaves no draft of an earlier save in or beside a folder that is about to be written to.

    Drafts that are final are moved up first. Those of running processes and of other users stay.

    Raises:
        OSError: if the files of a final draft cannot be moved.
    """
    target = Path(os.path.realpath(target))
    _finish(target, remove=True)
    for folder in (target.parent, target):
        for draft, match in _drafts(folder):
            if not (draft / _FINAL).exists() and _is_abandoned(draft, match):
                shutil.rmtree(draft, ignore_errors=True)


def finish_saving(target: str | os.PathLike[str]) -> None:
    """Moves the files of a draft that is final to where they belong. Cheap where there is none.

    A draft that is damaged is left alone, with a warning, and so is one that is older than the model in the folder.

    Raises:
        OSError: if they cannot be moved, for example because the folder is read-only.
    """
    _finish(Path(target), remove=False)


def _finish(target: Path, remove: bool) -> None:
    for draft, match in _drafts(target):
        if not (draft / _FINAL).exists():
            continue
        try:
            names = _names_in(draft, target)
        except FileNotFoundError:
            continue  # Another process has moved them up.
        except ValueError as problem:
            if not remove:
                warnings.warn(
                    f"{draft} looks like the rest of a save that was ended early, but {problem}. It is ignored: the "
                    "model is read from the other files of the folder. Saving a model there removes it.",
                    UserWarning,
                    stacklevel=3,
                )
            elif match["host"] != socket.gethostname() or _is_abandoned(draft, match):
                shutil.rmtree(draft, ignore_errors=True)
            continue
        try:
            if not _is_outdated(draft, target, names):
                _move_up(draft, target, names)
            elif remove and _is_abandoned(draft, match):
                shutil.rmtree(draft, ignore_errors=True)
        except OSError as error:
            raise OSError(
                f"The process that saved a model to {target} was ended while it put the new files in place, and the "
                f"rest of them cannot be moved there now: {error}. Load it once where the folder can be written to."
            ) from error


def _drafts(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """The drafts that lie in a folder: real folders, of this user or of the one who owns the folder around them."""
    if not os.path.isdir(folder):
        return
    for name in sorted(os.listdir(folder)):
        match = _DRAFT.fullmatch(name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(folder / name)
            owners = {folder.stat().st_uid, os.geteuid() if hasattr(os, "geteuid") else status.st_uid}
            if stat.S_ISDIR(status.st_mode) and status.st_uid in owners:
                yield folder / name, match


def _names_in(draft: Path, target: Path) -> list[str]:
    """The files that a final draft consists of, each in the draft or moved to the target already.

    Raises:
        ValueError: saying what is wrong with the list.
        FileNotFoundError: if the draft is gone.
    """
    if _is_plain_file(draft / _FINAL) is False:
        raise ValueError(f"its {_FINAL} is not a regular file")
    try:
        names = json.loads((draft / _FINAL).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {_FINAL} cannot be read: {error}") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"its {_FINAL} is not a list of file names")
    for name in names:
        if not _is_file_name(name):
            raise ValueError(f"its {_FINAL} names {name!r}, which is not a file directly inside it")
        plain = _is_plain_file(draft / name)
        if not (_is_plain_file(target / name) if plain is None else plain):
            raise ValueError(f"the file {name!r} that its {_FINAL} names is missing or not a regular file")
    return names


def _is_file_name(name: str) -> bool:
    """Whether a name stays in the folder it is joined to, on every operating system."""
    return name not in ("", ".", "..", _FINAL) and not any(character in name for character in "/\\:\0")


def _is_plain_file(path: Path) -> bool | None:
    """Whether something is a regular file, and no link to one; `None` if there is nothing."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return None


def _is_outdated(draft: Path, target: Path, names: list[str]) -> bool:
    """Whether a model was saved into the target after the draft was final, by a process that did not look for it.

    Files that were moved up keep their times, which lie before that of the list of names.
    """
    with contextlib.suppress(FileNotFoundError):
        final = os.stat(draft / _FINAL).st_mtime_ns
        read = [path for path in target.iterdir() if path.name == _CONFIG or _replaces(names, path)]
        return any(path.lstat().st_mtime_ns > final for path in read)
    return False


def _commit(draft: Path, target: Path) -> None:
    if draft.parent != target:
        try:
            os.rename(draft, target)
            return
        except OSError:
            if not target.is_dir():
                raise
        # Another process has made the target in the meantime.
        moved = target / draft.name
        os.rename(draft, moved)
        draft = moved
    for path in list(draft.rglob("*")):
        if path.parent != draft and path.is_file():
            # No part of a model lies in a folder below it, so these need not change together with the rest.
            place = target / path.relative_to(draft)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
    names = [path.name for path in draft.iterdir() if path.is_file()]
    names.sort(key=lambda name: (name == _CONFIG, name))
    unfinished = draft / f"{_FINAL}.part"
    unfinished.write_text(json.dumps(names), encoding="utf-8")
    os.replace(unfinished, draft / _FINAL)
    _move_up(draft, target, names)


def _move_up(draft: Path, target: Path, names: list[str]) -> None:
    """Can be done again from any point on, by several processes at once."""
    for path in target.iterdir():
        if path.name not in names and _replaces(names, path):
            path.unlink(missing_ok=True)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.replace(draft / name, target / name)
    shutil.rmtree(draft, ignore_errors=True)


def _replaces(names: list[str], path: Path) -> bool:
    """Whether a file holds weights of a variant that is among the names."""
    variant = _variant(path.name)
    return variant is not None and variant in map(_variant, names)


def _variant(name: str) -> str | None:
    """The variant of a file with weights, "" for the ordinary one; `None` for any other file."""
    match = _WEIGHTS.fullmatch(name)
    return None if match is None else match["of_weights"] or match["of_index"] or ""


def _is_abandoned(draft: Path, match: re.Match[str]) -> bool:
    if match["host"] != socket.gethostname():
        with contextlib.suppress(OSError):
            return time.time() - draft.stat().st_mtime > _ABANDONED
        return False
    try:
        os.kill(int(match["process"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
