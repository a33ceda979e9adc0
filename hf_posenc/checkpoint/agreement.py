"""Checks that weights belong to the scheme of the model they are loaded into."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.checkpoint.weight_files import named_schemes, schemes_of_older_version
from hf_posenc.entry import MARK, find_mark, find_marks, find_position_weight
from hf_posenc.patching.place.encoding import PositionEncoding, encodings
from hf_posenc.patching.place.record import NOT_STRICT, disagreement, marked_scheme


class SchemeMismatchError(CheckpointError, RuntimeError):
    """The weights were trained with a position encoding that differs from that of the model.

    It is also a `RuntimeError`, like torch's error for a state dict that does not match.
    """


def check_loaded_mark(model: Any, info: Mapping[str, Any], source: str, entry_format: int) -> None:
    """Compares the scheme named by a folder's weights with the scheme in its config.

    Args:
        model: the model that was just loaded.
        info: transformers' loading info.
        source: path or hub id, for messages.
        entry_format: format of the folder's config; weights of format 1 do not name a scheme.

    Raises:
        SchemeMismatchError: if they differ, or if the weights should name a scheme but do not.
    """
    (encoding,) = encodings(model)
    found, absent = encoding.loaded_scheme(), find_mark(info.get("missing_keys", ())) is not None
    if found is None and not absent:
        return  # Transformers did not report it, because the weights stay on disk or come from another process.
    if absent and entry_format < 2:
        warnings.warn(
            f"{source} was saved by an older hf_posenc, whose weights do not name their scheme, so it cannot be "
            "checked whether they belong to this config. Save the model again to store the scheme with the weights.",
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
    """Raises the error for a stock model that was loaded from the weights of a patched model.

    Raises:
        SchemeMismatchError: always; the message says what to do.
    """
    raise SchemeMismatchError(
        f"The weights of {source} were trained with a position encoding of hf_posenc (they include "
        f"{find_position_weight(info['unexpected_keys'])}), but the config they were loaded with has no position "
        f"encoding: this {type(model).__name__} would run them with its stock positions. Restore the config.json that "
        "was saved with them, or pass no `config`. To give up the scheme, load the model as it was saved and call "
        "unpatch_model."
    )


def check_state_dict(model: Any, state_dict: Mapping[str, Any], remedy: str = f" {NOT_STRICT}.") -> None:
    """Compares the scheme of a state dict with that of a model, before anything is copied.

    Args:
        model: any module; unpatched models have stock positions.
        state_dict: the state dict to load.
        remedy: a sentence appended to the message.

    Raises:
        SchemeMismatchError: naming both schemes, if they differ.
    """
    problem = state_dict_problem(model, state_dict)
    if problem is not None:
        raise SchemeMismatchError(f"This state dict does not belong to this {type(model).__name__}: {problem}.{remedy}")


def state_dict_problem(model: Any, state_dict: Mapping[str, Any]) -> str | None:
    """Describes the difference between the schemes of a state dict and a model; `None` if they agree."""
    return _problem(model, {key: marked_scheme(state_dict[key]) for key in find_marks(state_dict)})


def check_file(model: Any, file: str | os.PathLike[str], remedy: str = "") -> None:
    """Compares the schemes named by a weight file with the scheme of a model, before anything is copied.

    Args:
        model: any module; unpatched models have stock positions.
        file: a weight file, or the index of several.
        remedy: a sentence appended to the message.

    Raises:
        SchemeMismatchError: naming both schemes, if they differ.
    """
    named = named_schemes(Path(file))
    if not named and encodings(model):
        named = schemes_of_older_version(Path(file))
    problem = _problem(model, named)
    if problem is not None:
        raise SchemeMismatchError(
            f"The weights in {file} do not belong to this {type(model).__name__}: {problem}.{remedy}"
        )


def _problem(model: Any, named: Mapping[str, dict[str, Any]]) -> str | None:
    found = encodings(model)
    placed = {
        f"{path}.{MARK}": module.config
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PositionEncoding) and module in found
    }
    if len(placed) <= 1 and len(named) <= 1:  # A model inside another module has prefixed keys.
        return disagreement(next(iter(named.values()), None), next(iter(placed.values()), None))
    problems = (disagreement(named.get(key), placed.get(key)) for key in {**placed, **named})
    return next((problem for problem in problems if problem is not None), None)
