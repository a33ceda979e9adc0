"""Saving a model into a folder so that whoever is killed on the way leaves the old model or the new one.

Files are written into a draft, a folder of its own. Where the target does not exist, the draft becomes it in one
`rename`. Where it does, it may hold what others write at the same time (a tokenizer, optimizer states of other ranks,
logs), so it stays in place: the draft lies inside it, a file with the names of what has been written makes the draft
final, and then its files are moved up, one by one. If the process dies before that file exists, the old model is
whole. If it dies afterwards, `finish_saving`, which every load and every later save begins with, moves the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

#: How a draft inside a target is called; beside a target, its name stands in front.
_DRAFT = re.compile(r"\.hf_posenc-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")
#: What makes a draft final: a JSON list of the files it held when it was complete.
_FINAL = "written.json"
#: Weights of transformers: whole or in shards, with the index of shards, of any variant ("model.fp16.safetensors").
_WEIGHTS = re.compile(
    r"model(?:\.(?P<of_weights>[\w-]+?))?(?:-\d{5}-of-\d{5})?\.safetensors"
    r"(?:\.index(?:\.(?P<of_index>[\w-]+))?\.json)?"
)
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
    finish_saving(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    inside = target.is_dir()
    name = f".hf_posenc-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    draft = target / name if inside else target.parent / f".{target.name}{name}"
    draft.mkdir()
    try:
        yield draft
        if any(draft.iterdir()):
            _commit(draft, target)
    finally:
        if not (draft / _FINAL).exists():
            shutil.rmtree(draft, ignore_errors=True)


def finish_saving(target: str | os.PathLike[str]) -> None:
    """Moves the files of a draft that is final to where they belong. Cheap where there is none.

    Raises:
        OSError: if they cannot be moved, for example because the folder is read-only.
    """
    if not os.path.isdir(target):
        return
    for name in sorted(os.listdir(target)):
        if _DRAFT.fullmatch(name) and os.path.isfile(os.path.join(target, name, _FINAL)):
            try:
                _move_up(Path(target, name), Path(target))
            except OSError as error:
                raise OSError(
                    f"The process that saved a model to {os.fspath(target)} was ended while it put the new files in "
                    f"place, and the rest of them cannot be moved there now: {error}. Load it once where the folder "
                    "can be written to."
                ) from error


def remove_abandoned(target: Path) -> None:
    """Removes drafts of processes that are gone, beside a target and inside it."""
    beside, inside = f".{target.name}", ""
    for folder, prefix in ((target.parent, beside), (target, inside)):
        for name in os.listdir(folder) if folder.is_dir() else ():
            match = _DRAFT.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
            draft = folder / name
            if match is not None and not (draft / _FINAL).exists() and _is_abandoned(draft, match):
                shutil.rmtree(draft, ignore_errors=True)


def _commit(draft: Path, target: Path) -> None:
    if draft.parent != target:
        try:
            os.rename(draft, target)
            return
        except OSError:
            if not target.is_dir():
                raise
        # Another process has made the target in the meantime.
        moved = target / draft.name.removeprefix(f".{target.name}")
        os.rename(draft, moved)
        draft = moved
    files = [str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file()]
    # Last the one without which nothing reads a folder as a model.
    names = sorted(files, key=lambda name: (name == "config.json", name))
    unfinished = draft / f"{_FINAL}.part"
    unfinished.write_text(json.dumps(names), encoding="utf-8")
    os.replace(unfinished, draft / _FINAL)
    _move_up(draft, target)


def _move_up(draft: Path, target: Path) -> None:
    """Can be done again from any point on, by several processes at once."""
    try:
        names = json.loads((draft / _FINAL).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # Another process has done it.
    replaced = {variant for variant in map(_variant, names) if variant is not None}
    for path in target.iterdir():
        if path.name not in names and _variant(path.name) in replaced:
            path.unlink(missing_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(draft / name, target / name)
    shutil.rmtree(draft, ignore_errors=True)


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
