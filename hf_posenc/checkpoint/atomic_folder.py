"""Atomic saves of models: an interrupted save leaves either the old or the new model in a folder.

Files are written into a separate folder, the draft. If the target does not exist, a single `rename` turns the draft
into the target. If it exists, it may contain files that others write at the same time (a tokenizer, optimizer states of
other ranks, logs), so it is not replaced. In that case the draft is a folder inside the target. A file that lists the
written files marks the draft as final, and then its files are moved up, one by one. If the process dies before that
file exists, the old model is intact. If it dies afterwards, `finish_saving` moves the remaining files. Every load and
every save calls it first.

A process without this package does not call it. Therefore the old `config.json` is first replaced by one that cannot be
loaded, and the new one is moved last. Each move takes its file out of the draft, so it happens once, even if several
processes finish the same draft.

A draft found in a folder is not trusted: its files are only moved into the folder around it, and it is ignored if a
model was saved after it. The process that writes a draft holds a lock on it, which ends with the process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hf_posenc.entry import STORED_MODEL_TYPE
from hf_posenc.errors import warn_user

try:
    import fcntl
except ImportError:  # Windows. Drafts then count as abandoned by their age alone.
    fcntl = None  # type: ignore[assignment]

#: Prefix of draft names. They do not include the target's name, because the result could be too long for a file system.
_DRAFT = re.compile(r"\.hf_posenc-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")
#: Name of the file that marks a draft as final: a JSON list of the files of the complete draft.
_FINAL = "written.json"
#: Weight files of transformers: single files, shards and indices, of any variant ("model.fp16.safetensors").
_WEIGHTS = re.compile(
    r"model(?:\.(?P<of_weights>[\w-]+?))?(?:-\d{5}-of-\d{5})?\.safetensors"
    r"(?:\.index(?:\.(?P<of_index>[\w-]+))?\.json)?"
)
#: Without this file, a folder is not read as a model.
_CONFIG = "config.json"
#: The file of a draft that takes the place of the old config while the other files are moved.
_BARRIER = "barrier.json"
#: A config that no class of transformers loads. Its second field is the name of the weights for concrete classes.
_UNREADABLE = {
    "model_type": STORED_MODEL_TYPE,
    "transformers_weights": "this folder has the files of two models, because a process of hf_posenc was interrupted "
    "while it saved one. `import hf_posenc` before loading it, which completes the save",
}
#: Number of seconds after which a draft whose lock cannot be tested counts as abandoned.
_ABANDONED = 24 * 3600


@contextlib.contextmanager
def atomic_replacement(target: Path, outdated: Collection[str] = ()) -> Iterator[Path]:
    """Yields an empty folder to write into. At the end of the block, either all of its files are in `target` or none.

    Files with the same names are replaced, and earlier weights of the same variant are removed. Everything else in
    `target` is kept. If the block raises or writes nothing, `target` does not change. An interrupt that arrives while
    files are moved is raised after the last one.

    Args:
        target: folder of the model. Missing folders are created.
        outdated: names of files in `target` that are removed before new ones are moved there. The block may add some.
    """
    target = Path(os.path.realpath(target))
    clear_drafts(target)
    created = list(itertools.takewhile(lambda folder: not folder.exists(), target.parents))
    draft = target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft, lock = _new_draft(target if target.is_dir() else target.parent)
        try:
            yield draft
            if any(draft.iterdir()):
                _commit(draft, target, outdated)
        finally:
            if not (draft / _FINAL).exists():
                shutil.rmtree(draft, ignore_errors=True)
            if lock is not None:
                os.close(lock)
    except OSError as error:
        if _DRAFT.search(str(error.filename)):  # The user knows the folder, not the draft.
            error.filename = str(target)
        raise
    finally:
        with contextlib.suppress(OSError):  # They are not empty.
            for folder in created:
                folder.rmdir()


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file atomically."""
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _new_draft(folder: Path) -> tuple[Path, int | None]:
    """Creates and locks a draft in a folder; returns it, and the open file that holds the lock."""
    while True:
        draft = folder / f".hf_posenc-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        draft.mkdir()
        # Until it is locked, another process may take it for an abandoned one and remove it.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            lock = _lock(draft, shared=True)
            if draft.exists():
                return draft, lock


def _lock(draft: Path, shared: bool) -> int | None:
    """Opens and locks a draft; `None` where files cannot be locked, `BlockingIOError` if another process has a lock."""
    if fcntl is None:
        return None
    opened = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(opened)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return opened


def is_place_for_folder(path: Any) -> bool:
    """Whether something is the path of a folder, or of nothing yet."""
    named = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str) and os.fspath(path) != ""
    return named and (os.path.isdir(path) or not os.path.lexists(path))


def refuse_used_folder(folder: Path, overwrite: bool, draft: str | None = None) -> None:
    """Refuses a folder that cannot be made, and one with files. Drafts of processes that were killed are cleared.

    Args:
        folder: where a model is to be saved.
        overwrite: whether it may have files.
        draft: name of the caller's own draft in it, if it has begun.

    Raises:
        FileExistsError: with the reason.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise FileExistsError(f"{there} is a file. Give the path of a folder.")
    if folder.is_dir() and draft is None:
        clear_drafts(folder)
    if folder.is_dir() and not overwrite and any(path.name != draft for path in folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty. Give a new folder, or overwrite=True (--overwrite).")


def clear_drafts(target: str | os.PathLike[str]) -> None:
    """Removes drafts of earlier saves in and next to a folder before it is written to.

    Final drafts are moved up first. Drafts of running processes and of other users are kept.

    Raises:
        OSError: if the files of a final draft cannot be moved.
    """
    target = Path(os.path.realpath(target))
    _finish(target, remove=True)
    for folder in (target.parent, target):
        for draft, match in _drafts(folder):
            if not (draft / _FINAL).exists():
                _remove_if_abandoned(draft, match)


def finish_saving(target: str | os.PathLike[str]) -> None:
    """Moves the files of a final draft to the target. This is cheap if there is none.

    A damaged draft, or a draft that is older than the model in the folder, is ignored with a warning.

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
                warn_user(
                    f"{draft} looks like the remains of an interrupted save, but {problem}. It is ignored: the model "
                    "is read from the other files of the folder. Saving a model there removes it."
                )
            elif match["host"] != socket.gethostname():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                _remove_if_abandoned(draft, match)
            continue
        try:
            if not _is_outdated(draft, target, names):
                _move_up(draft, target, names)
            elif remove:
                _remove_if_abandoned(draft, match)
        except OSError as error:
            raise OSError(
                f"The process that saved a model to {target} was interrupted while it moved the new files into place, "
                f"and the remaining files cannot be moved now: {error}. Load the model once with write access to the "
                "folder."
            ) from error


def _drafts(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Returns the drafts in a folder: real folders that belong to this user or to the owner of the folder."""
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
    """Returns the files of a final draft. Each is either in the draft or already in the target.

    Raises:
        ValueError: if the list is invalid; the message gives the problem.
        FileNotFoundError: if the draft no longer exists.
    """
    for name in (_FINAL, _BARRIER):
        if _is_plain_file(draft / name) is False:
            raise ValueError(f"its {name} is not a regular file")
    try:
        names = json.loads((draft / _FINAL).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {_FINAL} cannot be read: {error}") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"its {_FINAL} is not a list of file names")
    for name in names:
        # Joining it to a folder has to stay inside that folder, on every operating system.
        if name in ("", ".", "..", _FINAL, _BARRIER) or not {*"/\\:\0"}.isdisjoint(name):
            raise ValueError(f"its {_FINAL} names {name!r}, which is not a file directly inside it")
        plain = _is_plain_file(draft / name)
        if not (_is_plain_file(target / name) if plain is None else plain):
            raise ValueError(f"the file {name!r} that its {_FINAL} names is missing or not a regular file")
    return names


def _is_plain_file(path: Path) -> bool | None:
    """Whether a path is a regular file and not a link; `None` if it does not exist."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return None


def _is_outdated(draft: Path, target: Path, names: list[str]) -> bool:
    """Whether a model was saved into the target after the draft was final, by a process that did not check for drafts.

    Moved files keep their modification times, which are before that of the list of names.
    """
    with contextlib.suppress(FileNotFoundError):
        final = os.stat(draft / _FINAL).st_mtime_ns
        read = [path for path in target.iterdir() if path.name == _CONFIG or _replaces(names, path)]
        return any(path.lstat().st_mtime_ns > final for path in read)
    return False


def _commit(draft: Path, target: Path, outdated: Collection[str]) -> None:
    if draft.parent != target:
        try:
            os.rename(draft, target)
            return
        except OSError:
            if not target.is_dir():
                raise
        # Another process has created the target in the meantime.
        moved = target / draft.name
        os.rename(draft, moved)
        draft = moved
    for path in list(draft.rglob("*")):
        if path.parent != draft and path.is_file():
            # Subfolders are not part of a model, so they do not need to change atomically.
            place = target / path.relative_to(draft)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
            outdated = {*outdated} - {path.relative_to(draft).as_posix()}
    names = [path.name for path in draft.iterdir() if path.is_file()]
    names.sort(key=lambda name: (name == _CONFIG, name))
    if _CONFIG in names:
        (draft / _BARRIER).write_text(json.dumps(_UNREADABLE), encoding="utf-8")
    unfinished = draft / f"{_FINAL}.part"
    unfinished.write_text(json.dumps(names), encoding="utf-8")
    try:
        os.replace(unfinished, draft / _FINAL)
        _move_up(draft, target, names, outdated)
    except BaseException:
        if (draft / _FINAL).exists():
            _move_up(draft, target, names, outdated)
        raise


def _move_up(draft: Path, target: Path, names: list[str], outdated: Collection[str] = ()) -> None:
    """Moves the files up. This can be repeated from any point, also by several processes at once."""
    # The config first: without it, no program takes the folder for a model.
    for name in sorted(outdated, key=lambda name: (name != _CONFIG, name)):
        if name not in names or (draft / name).exists():
            (target / name).unlink(missing_ok=True)
    if _CONFIG in names:
        with contextlib.suppress(FileNotFoundError):
            os.replace(draft / _BARRIER, target / _CONFIG)
    for path in target.iterdir():
        if path.name not in names and _replaces(names, path):
            path.unlink(missing_ok=True)
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # Another process has moved it.
            os.replace(draft / name, target / name)
    shutil.rmtree(draft, ignore_errors=True)


def _replaces(names: list[str], path: Path) -> bool:
    """Whether a file holds weights of a variant that the new files also have."""
    variant = variant_of(path.name)
    return variant is not None and variant in map(variant_of, names)


def variant_of(name: str) -> str | None:
    """Returns the variant of a weight file, "" for the default; `None` for any other file."""
    match = _WEIGHTS.fullmatch(name)
    return None if match is None else match["of_weights"] or match["of_index"] or ""


def _remove_if_abandoned(draft: Path, match: re.Match[str]) -> None:
    """Removes a draft whose process has ended. For another machine, or without locks, its age decides."""
    lock = None
    try:
        if match["host"] == socket.gethostname():
            lock = _lock(draft, shared=False)
        if lock is not None or time.time() - draft.stat().st_mtime > _ABANDONED:
            shutil.rmtree(draft, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        return  # It is in use, or another process has removed it.
    finally:
        if lock is not None:
            os.close(lock)
