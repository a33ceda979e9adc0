"""Which files of this machine are those of a patched model. Nothing here builds one, and no request is ever sent."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.checkpoint.local_files import local_file
from hf_posenc.entry import MODEL_TYPE, is_on_disk_form
from hf_posenc.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Bytes of a `config.json` that are read to learn whether it is that of a patched model.
_LARGEST_CONFIG = 2**24


def finish_saving_of(source: Any, kwargs: dict[str, Any]) -> None:
    """Ends what a process that was killed had begun, before anything is read."""
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        finish_saving(os.path.join(source, kwargs.get("subfolder") or ""))


def refuse_stock_config(source: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Refuses a stock config for the files of a patched model.

    Raises:
        UnsupportedError: with the reason.
    """
    if source is not None and not kwargs.get("gguf_file") and is_patched(source, kwargs):
        raise UnsupportedError(
            f"The model in {source} has a position encoding of hf_posenc, but the {type(config).__name__} passed as "
            "`config` does not carry it, so the weights would run with other positions than they were trained "
            "with. Pass no config, or change the one from AutoConfig.from_pretrained; for the stock positions, "
            "load the model as it is and call unpatch_model. (A text-only class cannot read a part of a composite "
            "checkpoint: load the whole.)"
        )


def is_scheme_name(source: Any) -> bool:
    """Whether `source` is the name of a model that was patched in memory; plain strings are told without imports."""
    if type(source) is str or "hf_posenc.patching.place.scheme_name" not in sys.modules:
        return False
    from hf_posenc.patching.place.scheme_name import SchemeName

    return isinstance(source, SchemeName)


def is_patched(source: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the `config.json` that `source` names on this machine, if any, is that of a patched model.

    Looks at local folders and at the hub's cache only: no request is ever sent.
    """
    text = read_config(source, kwargs)
    if text is None or f'"{MODEL_TYPE}"' not in text:
        return False
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return False  # the stock code reports the broken file
    return is_on_disk_form(config)


def read_config(source: Any, kwargs: dict[str, Any]) -> str | None:
    """The text of the `config.json` on this machine; `None` without one, and for one that no model ever has."""
    path = local_config(source, kwargs)
    if path is None or path.stat().st_size > _LARGEST_CONFIG:
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def local_config(source: Any, kwargs: dict[str, Any]) -> Path | None:
    """The `config.json` that `source` names, if it is on this machine. No request is ever sent."""
    if isinstance(source, str | os.PathLike) and os.path.isfile(source):
        return Path(source) if str(source).endswith(".json") else None
    return local_file(source, "config.json", kwargs)
