"""Detects local files of patched models, without building a model and without network requests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.entry import MODEL_TYPE, is_on_disk_form
from hf_posenc.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Maximum number of bytes of a `config.json` that are read to detect a patched model.
_LARGEST_CONFIG = 2**24


def finish_saving_of(source: Any, kwargs: dict[str, Any]) -> None:
    """Completes an interrupted save before anything is read."""
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        finish_saving(os.path.join(source, kwargs.get("subfolder") or ""))


def refuse_stock_config(source: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Raises if a stock config is passed for the files of a patched model.

    Raises:
        UnsupportedError: with the reason.
    """
    if source is not None and not kwargs.get("gguf_file") and is_patched(source, kwargs):
        raise UnsupportedError(
            f"The model in {source} has a position encoding of hf_posenc, but the {type(config).__name__} passed as "
            "`config` does not contain it, so the weights would run with other positions than they were trained with. "
            "Pass no config, or modify the config from AutoConfig.from_pretrained. To get stock positions, load the "
            "model without `config` and call unpatch_model. (A text-only class cannot read a part of a composite "
            "checkpoint: load the whole model.)"
        )


def is_scheme_name(source: Any) -> bool:
    """Whether `source` is the name of a model that was patched in memory. Plain strings need no import for this."""
    if type(source) is str or "hf_posenc.patching.place.scheme_name" not in sys.modules:
        return False
    from hf_posenc.patching.place.scheme_name import SchemeName

    return isinstance(source, SchemeName)


def is_patched(source: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `source` has a local `config.json` of a patched model."""
    return stored_config(source, kwargs) is not None


def stored_config(source: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the content of the local `config.json` of a patched model; `None` for any other `source`.

    Only local folders and the hub's cache are searched, without network requests.
    """
    text = read_config(source, kwargs)
    if text is None or f'"{MODEL_TYPE}' not in text:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None  # the stock code reports the broken file
    return config if is_on_disk_form(config) else None


def read_config(source: Any, kwargs: dict[str, Any]) -> str | None:
    """Returns the text of a local `config.json`; `None` if it is missing or too large."""
    if isinstance(source, str | os.PathLike) and os.path.isfile(source):
        path = Path(source) if str(source).endswith(".json") else None
    else:
        path = local_file(source, "config.json", kwargs)
    if path is None or path.stat().st_size > _LARGEST_CONFIG:
        return None
    return path.read_text(encoding="utf-8", errors="replace")


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
