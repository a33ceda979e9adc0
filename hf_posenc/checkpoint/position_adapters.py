"""Position adapters: saving a scheme without its model, and loading it on the base model."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.checkpoint.adapter_config import holds_adapter, names_a_scheme
from hf_posenc.checkpoint.atomic_folder import is_place_for_folder
from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.checkpoint.position_files import JSON_FILE, PositionFiles, read_position_files
from hf_posenc.entry import ADAPTER_CONFIG, find_file
from hf_posenc.errors import PositionEncodingError, UnsupportedError, warn_user
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.anatomy.weights import changed, difference, fingerprint, is_partitioned
from hf_posenc.patching.patch import place_scheme, unpatch_model
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding, refuse_changed
from hf_posenc.patching.place.lengths import Lengths, choose_length, write_length
from hf_posenc.patching.place.transaction import Transaction


def save_position_adapter(
    model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | os.PathLike[str] | None = None
) -> None:
    """Saves the scheme of a model with its parameters, without the model, in a few kilobytes.

    Use it for a scheme that was trained on a base model with frozen weights, which are available locally or on the hub.
    The files do not contain these weights. A fingerprint ties the files to their current values, and
    `load_position_adapter` refuses a base with other weights. This function warns if the weights have changed since the
    scheme was applied or `from_pretrained` loaded the model. It can only detect this for the model object and its
    copies. For weights that were trained in another process and loaded again, `load_position_adapter` raises on the
    original base. If the weights were trained too, use `model.save_pretrained`.

    Args:
        model: a patched model, or a PEFT model around one.
        folder: folder for `position_encoding.json` and, if the scheme has parameters, `position_encoding.safetensors`.
        adapter: hub id or folder of a PEFT adapter on top; `load_position_adapter` loads it too. A relative path that
            exists below `folder` is read from there. `PeftModel.save_pretrained` of a patched model writes the same two
            files next to the adapter, which does not need this reference.

    Raises:
        PositionEncodingError: for a model that is not patched.
        ValueError: for a PEFT model without `adapter`.
        FileExistsError: if `folder` is a file, or not a path.
    """
    if not is_place_for_folder(folder):
        raise FileExistsError(
            f"{folder!r} is not a folder. A position adapter is a folder with two files. Give another name."
        )
    target = unwrapped(model)
    encoding = current_encoding(target)
    if encoding is None:
        raise PositionEncodingError(
            f"This {type(target).__name__} has its stock positions, so there is no scheme to save. Call patch_model "
            "first."
        )
    if adapter is None and adapters_of(model):
        raise ValueError(
            f"This model has PEFT adapters ({', '.join(adapters_of(model))}), which a position adapter does not "
            "contain. Save both with model.save_pretrained(folder), which writes the scheme next to the adapter, or "
            "pass the location of the adapter as adapter=."
        )
    if not adapters_of(model):
        _warn_if_trained(target, encoding)
    collect(target, encoding, adapter=None if adapter is None else os.fspath(adapter)).write(folder)


def _warn_if_trained(model: PreTrainedModel, encoding: PositionEncoding) -> None:
    change = changed(encoding.record.base_weights, model)
    if change is not None:
        warn_user(
            f"The weights of this {type(model).__name__} are not those that the scheme {encoding.config.name!r} was "
            f"placed on: {change}. A position adapter contains only the scheme, so the changed weights are not saved, "
            "and load_position_adapter refuses the original ones. Save the whole model with save_pretrained. To "
            "train a scheme alone, freeze the rest before training: for name, parameter in model.named_parameters(): "
            'parameter.requires_grad_("position_encoding" in name). If the changed weights are saved elsewhere as the '
            "new base, ignore this."
        )


def load_position_adapter(model: Any, folder: str | os.PathLike[str], **hub: Any) -> Any:
    """Applies a saved scheme, with its trained parameters, to the base model it was trained on.

    If an error is raised, the model is left unchanged.

    Args:
        model: the base model, stock or patched with the same scheme, in any dtype, or quantised.
        folder: folder or hub id with the output of `save_position_adapter`, or with a PEFT adapter of a patched model.
        hub: `revision`, `subfolder`, `token`, `cache_dir`: arguments of `hf_hub_download`.

    Returns:
        The model, patched in place, or the `PeftModel` around it if there is a PEFT adapter on top.

    Raises:
        CheckpointError: if the folder has no such files, if the files are damaged, or if the scheme was trained on
            other weights than those of `model`.
        UnsupportedError: for a model with another scheme.
    """
    if names_a_scheme(folder, hub):
        return _with_adapter(model, folder, hub)
    files = read_position_files(folder, hub)
    if files is not None and files.adapter is None and holds_adapter(Path(folder, hub.get("subfolder") or "")):
        raise CheckpointError(
            f"{folder} has {JSON_FILE} and a PEFT adapter whose {ADAPTER_CONFIG} is missing, or does not name a "
            "scheme: the files come from different saves, or saving was interrupted. Save the adapter again from its "
            "model, or give a folder that contains only the scheme."
        )
    if files is None:
        raise CheckpointError(f"{folder} has no {JSON_FILE}. Give a folder that save_position_adapter wrote.")
    adapter = None if files.adapter is None else _located(files.adapter, folder)
    with placed(unwrapped(model), files, str(folder)):
        return model if adapter is None else _with_adapter(model, adapter, {})


def _located(adapter: str, folder: str | os.PathLike[str]) -> str:
    """The folder or hub id of the PEFT adapter that a position adapter names."""
    below = os.path.join(folder, adapter)
    source = below if os.path.isdir(below) else adapter
    if find_file(source, ADAPTER_CONFIG, {}, download=True) is None:
        raise CheckpointError(
            f"{JSON_FILE} in {folder} names the PEFT adapter {adapter[:100]!r}, but there is no {ADAPTER_CONFIG} in a "
            "folder of this name or on the hub. Copy the adapter to the place where it was, or save the position "
            "adapter again with adapter= and its location."
        )
    return source


def _with_adapter(model: nn.Module, source: Any, hub: Mapping[str, Any]) -> Any:
    from peft import PeftModel

    if isinstance(model, PeftModel):
        raise TypeError(f"{source} is a PEFT adapter: give the base model, or call model.load_adapter.")
    return PeftModel.from_pretrained(model, source, **hub)


@contextlib.contextmanager
def placed(model: PreTrainedModel, files: PositionFiles, source: str, *, shared: bool = False) -> Iterator[None]:
    """Patches a model with the scheme in the files, or loads the files' parameters into the same scheme.

    The model gets the length in the files, unless another length was set with `extend_context`. It is restored if the
    `with` block raises.

    Args:
        model: the base model.
        files: the files read from `source`.
        source: folder or hub id, for messages.
        shared: whether adapters in the model already use its scheme. Its parameters must then not change.

    Raises:
        CheckpointError: if the files belong to another base.
        UnsupportedError: if the model has another scheme, or other parameters that adapters use.
    """
    name = files.config.name
    if model.config.model_type != files.base_model_type:
        raise CheckpointError(
            f"The scheme in {source} was trained on a {files.base_model_type!r} model, but this is a "
            f"{model.config.model_type!r} model. Load it on the base model it was trained on."
        )
    encoding = current_encoding(model)
    mismatch = difference(files.fingerprint, model, None if encoding is None else encoding.record.base_weights)
    if mismatch is not None:
        raise CheckpointError(
            f"The scheme {name!r} in {source} was trained on different weights than those of this "
            f"{type(model).__name__}: {mismatch}. Load it on the base model it was trained on. (For another base, call "
            "patch_model with the scheme and train it again.)"
        )
    if encoding is not None and encoding.config != files.config:
        raise UnsupportedError(
            f"{source} was trained with {files.config!r}, but this {type(model).__name__} has {encoding.config!r}. "
            "Load it on the stock model, or on a model with the same scheme."
        )
    if encoding is None and shared:
        raise UnsupportedError(
            f"{source} was trained with the scheme {name!r}, but this {type(model).__name__} has adapters that were "
            "trained with its stock positions. Load it on a separate model."
        )
    with contextlib.ExitStack() as undo:
        if encoding is None:
            try:
                # Not patch_model, which would warn of random rows that the files are about to fill.
                place_scheme(Transaction(model), files.config, chosen=False)
            except ValueError as error:
                raise CheckpointError(
                    f"The scheme in {source} cannot be placed in this {type(model).__name__}: {error} The file was "
                    "edited or damaged; save it again from the model."
                ) from error
            encoding = current_encoding(model)
            assert encoding is not None
            undo.callback(unpatch_model, model)
        else:
            values = {name: parameter.detach().clone() for name, parameter in encoding.weights().items()}
            undo.callback(_restore, encoding, model, copy.copy(encoding.lengths), values)
        assert encoding.lengths is not None
        _load_parameters(encoding, files.parameters, source, shared)
        if files.length is not None and encoding.lengths.chosen is None:
            choose_length(encoding, model, files.length)
        yield
        undo.pop_all()


@torch.no_grad()
def _restore(
    encoding: PositionEncoding, model: PreTrainedModel, lengths: Lengths | None, values: Mapping[str, Tensor]
) -> None:
    for name, parameter in encoding.weights().items():
        if parameter.device.type != "meta":
            parameter.copy_(values[name])
    if lengths is not None and encoding.lengths != lengths:
        write_length(encoding, model, lengths, lengths.current)


@torch.no_grad()
def _load_parameters(encoding: PositionEncoding, parameters: Mapping[str, Tensor], source: str, shared: bool) -> None:
    placed = encoding.weights()
    expected = {name: tuple(parameter.shape) for name, parameter in placed.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if shapes != expected:
        name = min(set(shapes.items()) ^ set(expected.items()))[0]
        raise CheckpointError(
            f"The parameters in {source} are not those of {encoding.config!r} in this model: {name} has the shape "
            f"{shapes.get(name)} there, but {expected.get(name)} is expected. The files do not belong together."
        )
    if any(parameter.device.type == "meta" for parameter in placed.values()):
        raise UnsupportedError(
            "The parameters of the scheme are offloaded, so the parameters in the file cannot be loaded. Load the "
            "base model with a device_map that keeps `position_encoding` in memory."
        )
    if shared:
        other = [name for name, weight in placed.items() if not torch.equal(weight, parameters[name].to(weight))]
        if other:
            raise UnsupportedError(
                f"The adapters of this model share the scheme {encoding.config.name!r}, but {source} was trained with "
                f"other values of its parameters ({', '.join(other[:3])}). Load it on a separate model."
            )
        return
    for name, parameter in placed.items():
        parameter.copy_(parameters[name])


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Returns the configs of the PEFT adapters in a model, by name."""
    if isinstance(model, PreTrainedModel) and not model._hf_peft_config_loaded:
        return {}  # PEFT does not delete `peft_config` when it unloads its adapters.
    configs = getattr(model, "peft_config", None)
    return dict(configs) if isinstance(configs, Mapping) else {}


def collect(
    model: PreTrainedModel,
    encoding: PositionEncoding,
    state: Mapping[str, Tensor] | None = None,
    adapter: str | None = None,
) -> PositionFiles:
    """Collects the contents of the files of a model's scheme.

    Args:
        model: a patched model.
        encoding: its encoding.
        state: its full state dict, if its own parameters are sharded.
        adapter: location of the adapter on top.

    Raises:
        UnsupportedError: if the scheme's parameters are not in the memory of this process, or if a module of the model
            is not patched.
    """
    refuse_changed(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is encoding), "")
    parameters = {}
    for name, parameter in encoding.weights().items():
        tensor = (state or {}).get(prefix + name, parameter)
        if tensor.device.type == "meta" or type(tensor) not in (nn.Parameter, Tensor) or is_partitioned(tensor):
            raise UnsupportedError(
                f"The parameter {name} of the scheme {encoding.config.name!r} is offloaded or sharded, so it cannot "
                "be written from this process. Save from a model that is in memory, or pass a full state_dict to "
                "save_pretrained."
            )
        parameters[name] = tensor.detach().cpu().contiguous()
    return PositionFiles(
        config=encoding.config,
        base_model_type=model.config.model_type,
        fingerprint=fingerprint(model, encoding.record.base_weights, state),
        parameters=parameters,
        adapter=adapter,
        length=None if encoding.lengths is None else encoding.lengths.chosen,
    )
