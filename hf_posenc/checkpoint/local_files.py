"""Local files of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def local_file(source: Any, name: str, kwargs: dict[str, Any]) -> Path | None:
    """Finds a file of a checkpoint in a folder or in the hub's cache, without downloading anything.

    Args:
        source: the first argument of `from_pretrained`.
        name: name of the file.
        kwargs: the other arguments.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    subfolder = kwargs.get("subfolder") or ""
    if os.path.isdir(source):
        path = Path(source, subfolder, name)
        return path if path.is_file() else None
    if os.path.isfile(source):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    filename = f"{subfolder}/{name}" if subfolder else name
    try:
        cached = try_to_load_from_cache(
            str(source), filename, cache_dir=kwargs.get("cache_dir"), revision=kwargs.get("revision")
        )
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
