"""A scheme without the model below: saving it, and placing it on the base it was trained on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.checkpoint.placing import place
from hf_posenc.checkpoint.position_files import JSON_FILE, PositionFiles, read_position_files
from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.find.fingerprint import changed, fingerprint
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.in_force import current_encoding, refuse_missing_sites
from hf_posenc.patching.place.refusals import unwrapped


def save_position_adapter(
    model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | os.PathLike[str] | None = None
) -> None:
    """Saves the scheme of a model and the scheme's parameters, without the model: a few kilobytes.

    For a scheme that was trained on weights that stay as they are, on this machine or on the hub. The files do not hold
    these weights. They are bound to them, as they are now, by a fingerprint, and `load_position_adapter` refuses a base
    with others. A warning says so here if the weights are no longer those that the scheme was placed on, or that
    `from_pretrained` loaded. This is known of the model object and its copies only: of weights that were trained in
    another process and loaded again, the error comes when the files are loaded on the original base. Save a model whose
    weights were trained with `model.save_pretrained`.

    Args:
        model: a patched model, or a PEFT model around one.
        folder: gets `position_encoding.json` and, if the scheme has parameters, `position_encoding.safetensors`.
        adapter: hub id or folder of the PEFT adapter that lies on top; `load_position_adapter` loads it too. A relative
            path that exists below `folder` is read from there. `PeftModel.save_pretrained` of a patched model writes
            the same two files beside the adapter, which needs no reference.

    Raises:
        PositionEncodingError: for a model that is not patched.
        ValueError: for a PEFT model without `adapter`.
    """
    target = unwrapped(model)
    encoding = current_encoding(target)
    if encoding is None:
        raise PositionEncodingError(
            f"This {type(target).__name__} has its stock positions, so there is no scheme to save. Call patch_model."
        )
    if adapter is None and adapters_of(model):
        raise ValueError(
            f"This model has PEFT adapters ({', '.join(adapters_of(model))}), which a position adapter does not hold. "
            "Save both with model.save_pretrained(folder), which writes the scheme beside the adapter, or say with "
            "adapter= where the adapter is."
        )
    if not adapters_of(model):
        _warn_if_trained(target, encoding)
    collect(target, encoding, adapters_of(model), adapter=None if adapter is None else os.fspath(adapter)).write(folder)


def _warn_if_trained(model: PreTrainedModel, encoding: PositionEncoding) -> None:
    found = changed(encoding.base_weights, model)
    if found is not None:
        warnings.warn(
            f"The weights of this {type(model).__name__} are not those that the scheme {encoding.config.name!r} was "
            f"placed on: {found}. A position adapter holds the scheme alone, so the changed weights are not saved, and "
            "load_position_adapter refuses the original ones. Save the whole model with save_pretrained. To train a "
            "scheme alone, freeze the rest before training: for name, parameter in model.named_parameters(): "
            'parameter.requires_grad_("position_encoding" in name). If the changed weights are saved elsewhere as the '
            "new base, ignore this.",
            UserWarning,
            stacklevel=3,
        )


def load_position_adapter(model: Any, folder: str | os.PathLike[str], **hub: Any) -> Any:
    """Places a saved scheme, with its trained parameters, on the base model it was trained on.

    Args:
        model: the base model: stock, or patched with the same scheme already. In any dtype, or quantised.
        folder: what `save_position_adapter` wrote, or a PEFT adapter of a patched model; also a hub id.
        hub: `revision`, `subfolder`, `token`, `cache_dir`: arguments of `hf_hub_download`.

    Returns:
        The model, patched in place; where a PEFT adapter belongs on top, the `PeftModel` around it.

    Raises:
        CheckpointError: if there is nothing of the kind in the folder, if its files are damaged, or if the weights of
            `model` are not those the scheme was trained on.
        UnsupportedError: for a model with another scheme.

    In every one of these cases the model is left as it was.
    """
    from hf_posenc.checkpoint.adapter_config import CONFIG_FILE, holds_adapter, names_a_scheme

    if names_a_scheme(folder, hub):
        return _with_adapter(model, folder, hub)
    files = read_position_files(folder, hub)
    if files is not None and files.adapter is None and holds_adapter(Path(folder, hub.get("subfolder") or "")):
        raise CheckpointError(
            f"{folder} has {JSON_FILE} and a PEFT adapter whose {CONFIG_FILE} is missing, or does not say that the "
            "adapter was trained with a scheme: the files come from different saves, or saving was interrupted. Save "
            "the adapter again from its model, or give a folder that holds the scheme alone."
        )
    if files is None:
        raise CheckpointError(f"{folder} has no {JSON_FILE}. Give a folder that save_position_adapter wrote.")
    undo = place(unwrapped(model), files, str(folder))
    if files.adapter is None:
        return model
    below = Path(folder, files.adapter)
    try:
        return _with_adapter(model, below if below.is_dir() else files.adapter, {})
    except BaseException:
        undo()
        raise


def _with_adapter(model: nn.Module, source: Any, hub: Mapping[str, Any]) -> Any:
    from peft import PeftModel

    if isinstance(model, PeftModel):
        raise TypeError(f"{source} is a PEFT adapter: give the base model, or call model.load_adapter.")
    return PeftModel.from_pretrained(model, source, **hub)


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Configs of the PEFT adapters in a model, by name."""
    if isinstance(model, PreTrainedModel) and not model._hf_peft_config_loaded:
        return {}  # what PEFT leaves behind when it unloads its adapters
    configs = getattr(model, "peft_config", None)
    return dict(configs) if isinstance(configs, Mapping) else {}


def collect(
    model: PreTrainedModel,
    encoding: PositionEncoding,
    adapters: Mapping[str, Any],
    state: Mapping[str, Tensor] | None = None,
    adapter: str | None = None,
) -> PositionFiles:
    """What the files of a model's scheme have to say.

    Args:
        model: patched.
        encoding: in it.
        adapters: configs of the PEFT adapters inside.
        state: its full state dict, where its own parameters are sharded.
        adapter: where the adapter on top is.

    Raises:
        UnsupportedError: if the scheme's parameters are not in the memory of this process, or a module of the model
            does not carry the scheme.
    """
    refuse_missing_sites(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is encoding), "")
    parameters = {}
    for name, parameter in encoding.named_parameters():
        tensor = (state or {}).get(prefix + name, parameter)
        if tensor.device.type == "meta" or type(tensor) not in (nn.Parameter, Tensor):
            raise UnsupportedError(
                f"The parameter {name} of the scheme {encoding.config.name!r} is offloaded or sharded, so it cannot be "
                "written from this process. Save from a model that is in memory, or give save_pretrained a full "
                "state_dict."
            )
        parameters[name] = tensor.detach().cpu()
    return PositionFiles(
        scheme=encoding.config.to_dict(),
        base_model_type=model.config.model_type,
        fingerprint=fingerprint(model, adapters, state),
        parameters=parameters,
        adapter=adapter,
        length=None if encoding.lengths is None else encoding.lengths.chosen,
    )
