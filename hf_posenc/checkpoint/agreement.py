"""Whether weights belong to the scheme of the model they are loaded into."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.entry import find_mark, find_position_weight
from hf_posenc.patching.apply import encodings
from hf_posenc.patching.mark import NOT_STRICT, disagreement, is_sharded, marked_scheme


class SchemeMismatchError(CheckpointError, RuntimeError):
    """Weights that were trained with another position encoding than that of the model.

    A `RuntimeError` too, as torch's own error for a state dict that does not fit.
    """


def check_loaded_mark(model: Any, info: Mapping[str, Any], source: str, entry_format: int) -> None:
    """Compares the scheme that a folder's weights name with that of its config.

    Args:
        model: just loaded.
        info: transformers' loading info.
        source: path or hub id, for messages.
        entry_format: of the folder's config; weights of format 1 name no scheme.

    Raises:
        SchemeMismatchError: if they differ, or if the weights name none where they should.
    """
    (encoding,) = encodings(model)
    found, absent = encoding.loaded_scheme(), find_mark(info.get("missing_keys", ())) is not None
    if found is None and not absent:
        return  # Transformers did not show it: weights that stay on disk, or come from another process.
    if absent and entry_format < 2:
        warnings.warn(
            f"{source} was saved by an older hf_posenc, whose weights do not name their scheme, so nothing shows "
            "whether they belong to this config. Save the model again to tie them together.",
            UserWarning,
            stacklevel=4,
        )
        return
    problem = disagreement(None if absent else found, encoding.config)
    if problem is not None:
        raise SchemeMismatchError(
            f"The config and the weights of {source} are from different models: {problem}. Restore the missing file, "
            "or load the weights with the config they were saved with."
        )


def refuse_marked_weights(info: Mapping[str, Any], model: Any, source: str) -> None:
    """Refuses a stock model that was loaded from the weights of a patched one.

    Raises:
        SchemeMismatchError: always, with what to do.
    """
    raise SchemeMismatchError(
        f"The weights of {source} were trained with a position encoding of hf_posenc, which "
        f"{find_position_weight(info['unexpected_keys'])} among them shows, but the config they were loaded with does "
        f"not carry it: this {type(model).__name__} would run them with its stock positions. Restore the config.json "
        "that was saved with them, or pass no `config`. To give up the scheme, load the model as it was saved and call "
        "unpatch_model."
    )


def check_state_dict(model: Any, state_dict: Mapping[str, Any]) -> None:
    """Compares the scheme of a state dict with that of a model, before anything is copied.

    Raises:
        SchemeMismatchError: naming both schemes, if they differ.
    """
    problem = state_dict_problem(model, state_dict)
    if problem is not None:
        raise SchemeMismatchError(
            f"This state dict does not belong to this {type(model).__name__}: {problem}. {NOT_STRICT}."
        )


def state_dict_problem(model: Any, state_dict: Mapping[str, Any]) -> str | None:
    """How a state dict and a model differ in their schemes, as a sentence without its end; `None` where they agree."""
    key = find_mark(state_dict)
    if key is None and is_sharded(model):
        return None
    found = encodings(model)
    if len(found) > 1:
        return None  # Parts that were patched on their own: each reports what does not fit itself.
    config = found[0].config if found else None
    return disagreement(None if key is None else marked_scheme(state_dict[key]), config)
