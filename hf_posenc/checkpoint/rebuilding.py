"""Loads models by the name of a model that was patched in memory: the named weights with the scheme of that model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_posenc.entry import ATTRIBUTE, read_entry, stored_config
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.patch import patch_model, unpatch_model
from hf_posenc.patching.place.config_entry import SchemeName, detach_entry
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding
from hf_posenc.patching.place.lengths import choose_length
from hf_posenc.schemes import scheme_from_dict
from hf_posenc.wrapping import Call

logger = logging.getLogger(__name__)


def rebuilt(load: Callable[[Call], Any], call: Call) -> Any:
    """Loads the files of a name and applies the scheme that the named model has in memory.

    The length and the scheme's parameters are the current ones of the named model. All other weights come from the
    files, as for any model that is loaded by name.

    Args:
        load: `from_pretrained` for a plain name.
        call: of `from_pretrained`, with `config._name_or_path` or `name_or_path` of a patched model.

    Raises:
        UnsupportedError: if the scheme has parameters and the model with these parameters no longer exists or has a
            different architecture, or if `config` has neither the scheme of the name nor that of the files.
    """
    name, config = call["pretrained_model_name_or_path"], call["config"]
    live = name.encoding()
    entry = (stored_config(str(name), call.arguments) or {}).get(ATTRIBUTE)
    on_disk = entry.get("scheme") if isinstance(entry, dict) else None
    call = call.changed(pretrained_model_name_or_path=str(name))
    if isinstance(config, PreTrainedConfig) and (given := read_entry(config)) is not None:
        if given not in (name.entry, on_disk):
            raise UnsupportedError(
                f"The `config` for {str(name)!r} has the scheme {given['scheme']!r}, but the name is that of a model "
                f"with {_scheme(name)!r}. Pass str(name) to load the files of that name with this config."
            )
        if on_disk is None:
            config = copy.deepcopy(config)
            detach_entry(config)
            call = call.changed(config=config)
    result = load(call)
    model = result[0] if isinstance(result, tuple) else result
    if name.entry is None:
        unpatch_model(model)
        return result
    encoding = current_encoding(model)
    from_files = encoding is not None and encoding.config.to_dict() == name.entry
    if not from_files:
        patch_model(model, scheme_from_dict(name.entry))
        encoding = current_encoding(model)
        logger.warning(
            "%s was loaded with the position encoding %r, because a model of this name was patched with it in "
            "memory. To load the files without it, pass str(name).",
            name, _scheme(name),
        )  # fmt: skip
    assert encoding is not None
    if live is not None:
        _copy_parameters(live, encoding, name)
    elif not from_files and encoding.weights():
        raise UnsupportedError(
            f"{str(name)!r} is the name of a model that was patched in memory with {_scheme(name)!r}. Its files do "
            "not contain the parameters of this scheme, and the model object no longer exists or belongs to another "
            f"process. {_SAVE}"
        )
    if name.length is not None:
        choose_length(encoding, model, name.length)
    return result


_SAVE = (
    "Save the patched model with save_pretrained and load that folder instead (or give the model, not its name, to the "
    "program that loads it). str(name) loads the stock model."
)


def _scheme(name: SchemeName) -> str:
    return "native" if name.entry is None else str(name.entry["scheme"])


@torch.no_grad()
def _copy_parameters(source: PositionEncoding, target: PositionEncoding, name: SchemeName) -> None:
    given, wanted = source.weights(), target.weights()
    shapes = {key: tuple(parameter.shape) for key, parameter in given.items()}
    if shapes != {key: tuple(parameter.shape) for key, parameter in wanted.items()}:
        raise UnsupportedError(
            f"{str(name)!r} is the name of a model that was patched in memory with {_scheme(name)!r}, and this class "
            f"needs different parameters for it: {sorted(wanted)} instead of {sorted(given)}. {_SAVE}"
        )
    if any(parameter.device.type == "meta" for parameter in given.values()):
        raise UnsupportedError(
            f"The parameters of the scheme {_scheme(name)!r} in the model named {str(name)!r} are offloaded, so they "
            f"cannot be copied. {_SAVE}"
        )
    for key, parameter in wanted.items():
        parameter.copy_(given[key])
