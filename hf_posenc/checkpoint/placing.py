"""Applies a scheme that was saved without its model to the base model it was trained on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.checkpoint.position_files import PositionFiles
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.fingerprint import difference
from hf_posenc.patching.patch import patch_model, unpatch_model
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding
from hf_posenc.patching.place.lengths import Lengths, choose_length, restore_length


def place(model: PreTrainedModel, files: PositionFiles, source: str, *, shared: bool = False) -> Callable[[], object]:
    """Patches a model with the scheme in the files, or loads the files' parameters into the same scheme.

    The model gets the length in the files, unless another length was set with `extend_context`.

    Args:
        model: the base model.
        files: the files read from `source`.
        source: folder or hub id, for messages.
        shared: whether adapters in the model already use its scheme. Its parameters must then not change.

    Returns:
        A function that restores the model, for callers that fail later.

    Raises:
        CheckpointError: if the files belong to another base.
        UnsupportedError: if the model has another scheme, or other parameters that adapters use.
    """
    name = files.scheme["scheme"]
    if model.config.model_type != files.base_model_type:
        raise CheckpointError(
            f"The scheme in {source} was trained on a {files.base_model_type!r} model, but this is a "
            f"{model.config.model_type!r} model. Load it on the base model it was trained on."
        )
    encoding = current_encoding(model)
    found = difference(files.fingerprint, model, None if encoding is None else encoding.record.base_weights)
    if found is not None:
        raise CheckpointError(
            f"The scheme {name!r} in {source} was trained on other weights than those of this {type(model).__name__}: "
            f"{found}. Load it on the base model it was trained on. (For another base, call patch_model with the "
            "scheme and train it again.)"
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
    if encoding is None:
        try:
            patch_model(model, files.config)
        except ValueError as error:
            raise CheckpointError(
                f"The scheme in {source} cannot be placed in this {type(model).__name__}: {error} The file was edited "
                "or damaged; save it again from the model."
            ) from error
        encoding = current_encoding(model)
        undo: Callable[[], object] = functools.partial(unpatch_model, model)
    else:
        values = {name: parameter.detach().clone() for name, parameter in encoding.named_parameters()}
        undo = functools.partial(_restore, encoding, model, copy.copy(encoding.lengths), values)
    assert encoding is not None
    assert encoding.lengths is not None
    try:
        _load_parameters(encoding, files.parameters, source, shared)
        if files.length is not None and encoding.lengths.chosen is None:
            choose_length(encoding, model, files.length)
    except BaseException:
        undo()
        raise
    return undo


@torch.no_grad()
def _restore(
    encoding: PositionEncoding, model: PreTrainedModel, lengths: Lengths | None, values: Mapping[str, Tensor]
) -> None:
    for name, parameter in encoding.named_parameters():
        if parameter.device.type != "meta":
            parameter.copy_(values[name])
    if lengths is not None and encoding.lengths != lengths:
        restore_length(encoding, model, lengths)


@torch.no_grad()
def _load_parameters(encoding: PositionEncoding, parameters: Mapping[str, Tensor], source: str, shared: bool) -> None:
    own = dict(encoding.named_parameters())
    expected = {name: tuple(parameter.shape) for name, parameter in own.items()}
    found = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if found != expected:
        name = min(set(found.items()) ^ set(expected.items()))[0]
        raise CheckpointError(
            f"The parameters in {source} are not those of {encoding.config!r} in this model: {name} has the shape "
            f"{found.get(name)} there, but {expected.get(name)} is expected. The files do not belong together."
        )
    if any(parameter.device.type == "meta" for parameter in own.values()):
        raise UnsupportedError(
            "The parameters of the scheme are offloaded, so the parameters in the file cannot be loaded. Load the "
            "base model with a device_map that keeps `position_encoding` in memory."
        )
    if shared:
        other = [name for name, parameter in own.items() if not torch.equal(parameter, parameters[name].to(parameter))]
        if other:
            raise UnsupportedError(
                f"The adapters of this model share the scheme {encoding.config.name!r}, but {source} was trained with "
                f"other values of its parameters ({', '.join(other[:3])}). Load it on a separate model."
            )
        return
    for name, parameter in own.items():
        parameter.copy_(parameters[name])
