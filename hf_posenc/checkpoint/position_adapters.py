"""A scheme without the model below: saving it, and placing it on the base it was trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.checkpoint.fingerprint import difference, fingerprint
from hf_posenc.checkpoint.position_files import JSON_FILE, PositionFiles, read_position_files
from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.apply import current_encoding, refuse_missing_sites, unwrapped
from hf_posenc.patching.encoding import PositionEncoding
from hf_posenc.patching.patch import patch_model, unpatch_model


def save_position_adapter(
    model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | os.PathLike[str] | None = None
) -> None:
    """Saves the scheme of a model and the scheme's parameters, without the model: a few kilobytes.

    For a scheme that was trained on weights that stay as they are, on this machine or on the hub. The files are bound
    to these weights by a fingerprint. Weights that were trained too belong into `model.save_pretrained`.

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
    collect(target, encoding, adapters_of(model), adapter=None if adapter is None else os.fspath(adapter)).write(folder)


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
    patched = place(unwrapped(model), files, str(folder))
    if files.adapter is None:
        return model
    below = Path(folder, files.adapter)
    try:
        return _with_adapter(model, below if below.is_dir() else files.adapter, {})
    except BaseException:
        if patched:
            unpatch_model(model)
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
    )


def place(model: PreTrainedModel, files: PositionFiles, source: str, *, shared: bool = False) -> bool:
    """Patches a model with what the files say, or loads their parameters into the same scheme.

    Args:
        model: the base.
        files: read from `source`.
        source: for messages.
        shared: whether adapters in the model already use its scheme, whose parameters must then stay as they are.

    Returns:
        Whether the model was patched: if not, it had the scheme.

    Raises:
        CheckpointError: if the files belong to another base.
        UnsupportedError: if the model has another scheme, or other parameters that are in use.
    """
    name = files.scheme["scheme"]
    if model.config.model_type != files.base_model_type:
        raise CheckpointError(
            f"The scheme in {source} was trained on a {files.base_model_type!r} model, and this is a "
            f"{model.config.model_type!r}. Load it on the model it belongs to."
        )
    found = difference(files.fingerprint, model)
    if found is not None:
        raise CheckpointError(
            f"The scheme {name!r} in {source} was trained on other weights than those of this "
            f"{type(model).__name__}: {found}. Load it on the model it was trained on. (For another base, call "
            f"patch_model with the scheme, and train it anew.)"
        )
    encoding = current_encoding(model)
    if encoding is not None and encoding.config != files.config:
        raise UnsupportedError(
            f"{source} was trained with {files.config!r}, and this {type(model).__name__} has {encoding.config!r}. "
            "Load it on the stock model, or on one with the same scheme."
        )
    if encoding is None and shared:
        raise UnsupportedError(
            f"{source} was trained with the scheme {name!r}, and this {type(model).__name__} has adapters that were "
            "trained with its stock positions. Load it on a model of its own."
        )
    patched = encoding is None
    if encoding is None:
        patch_model(model, files.config)
        encoding = current_encoding(model)
        assert encoding is not None
    try:
        _load_parameters(encoding, files.parameters, source, shared)
    except BaseException:
        if patched:
            unpatch_model(model)
        raise
    return patched


@torch.no_grad()
def _load_parameters(encoding: PositionEncoding, parameters: Mapping[str, Tensor], source: str, shared: bool) -> None:
    own = dict(encoding.named_parameters())
    expected = {name: tuple(parameter.shape) for name, parameter in own.items()}
    found = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if found != expected:
        name = min(set(found.items()) ^ set(expected.items()))[0]
        raise CheckpointError(
            f"The parameters in {source} are not those of {encoding.config!r} in this model: {name} has the shape "
            f"{found.get(name)} there, and {expected.get(name)} is expected. The files do not belong together."
        )
    if any(parameter.device.type == "meta" for parameter in own.values()):
        raise UnsupportedError(
            "The parameters of the scheme are offloaded, so those of the file cannot be put there. Load the base model "
            "with a device_map that keeps `position_encoding` in memory."
        )
    if shared:
        other = [name for name, parameter in own.items() if not torch.equal(parameter, parameters[name].to(parameter))]
        if other:
            raise UnsupportedError(
                f"The adapters of this model share the scheme {encoding.config.name!r}, and {source} was trained with "
                f"other values of its parameters ({', '.join(other[:3])}). Load it on a model of its own."
            )
        return
    for name, parameter in own.items():
        parameter.copy_(parameters[name])
