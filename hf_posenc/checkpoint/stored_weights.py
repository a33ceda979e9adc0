"""Compares the position weights in the files of a checkpoint with those that its scheme needs.

A small config can request tables of several gigabytes. The header of a safetensors file lists every tensor with its
shape and can be read without the values, so a scheme that does not match the weights is refused before it is allocated.
Without a header (`.bin` files, a model built from a config), the limits of the options apply
(`hf_posenc.schemes.limits`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.checkpoint.local_files import local_file
from hf_posenc.checkpoint.weight_files import check_shard
from hf_posenc.entry import ATTRIBUTE
from hf_posenc.patching.find.discovery import find_stacks
from hf_posenc.patching.place.encoding import build_encoding, parts_named
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.limits import shown

#: Arguments of `from_pretrained` with which other files are read, or names differ from those of the model.
_ELSEWHERE = ("gguf_file", "key_mapping")


class StoredTensor(NamedTuple):
    """The description of a tensor in a header."""

    shape: tuple[int, ...]
    floating: bool
    file: str


def stored_position_weights(source: Any, kwargs: dict[str, Any]) -> dict[str, StoredTensor] | None:
    """Returns the position weights of a checkpoint, by their names below `position_encoding`.

    Args:
        source: the first argument of `from_pretrained`.
        kwargs: its other arguments.

    Returns:
        The weights, or `None` if the checkpoint has no local safetensors files.

    Raises:
        CheckpointError: for a file that is damaged.
    """
    state_dict = kwargs.get("state_dict")
    if state_dict is not None:
        return {
            below: StoredTensor(tuple(tensor.shape), tensor.is_floating_point(), "the state dict")
            for name, tensor in state_dict.items()
            if (below := _below_position_encoding(name)) and isinstance(tensor, torch.Tensor)
        }
    if kwargs.get("use_safetensors") is False or any(kwargs.get(option) for option in _ELSEWHERE):
        return None
    variant = kwargs.get("variant")
    single = local_file(source, _of_variant(SAFE_WEIGHTS_NAME, variant), kwargs)
    if single is not None:
        return _read_header(single)
    index = local_file(source, _of_variant(SAFE_WEIGHTS_INDEX_NAME, variant), kwargs)
    if index is None:
        return None
    found: dict[str, StoredTensor] = {}
    content, shards = _read_index(index)
    for shard in shards:
        path = local_file(source, shard, kwargs)
        if path is None:
            if os.path.isdir(source):
                raise CheckpointError(f"{index} lists the file {shard!r}, which does not exist. Copy the whole folder.")
            return None  # The download is incomplete; transformers downloads the rest.
        found |= _read_header(path)
        check_shard(content, path)
    return found


def check_scheme_fits(model: Any, config: SchemeConfig, stored: dict[str, StoredTensor] | None, source: str) -> None:
    """Raises if a scheme does not fit the model, or needs weights of other shapes than the stored ones.

    The check allocates no memory for the scheme.

    Args:
        model: the stock model to which the scheme will be applied.
        config: the scheme.
        stored: the output of `stored_position_weights`; `None` if there is nothing to compare with.
        source: path or hub id, for error messages.

    Raises:
        CheckpointError: with the name of the weight, the expected shape and the shape found.
    """
    try:
        encoding = build_encoding(config, find_stacks(model, parts_named(config)), torch.device("meta"))
    except ValueError as error:
        raise CheckpointError(
            f"The scheme in the config.json of {source} cannot be applied to {type(model).__name__}: {error}"
        ) from error
    except RuntimeError:
        return  # A third-party scheme may need real tensors to be built. Its weights are checked after loading.
    if stored is None:
        return
    for name, parameter in encoding.named_parameters():
        needed, found = tuple(parameter.shape), stored.get(name)
        if found is not None and found.shape == needed and found.floating:
            continue
        if found is None:
            problem = "its weights have no such tensor, so it would run with random weights"
        elif found.shape != needed:
            problem = f"in {found.file} it has the shape {list(found.shape)}"
        else:
            problem = f"in {found.file} it is an integer tensor"
        options = {key: value for key, value in config.to_dict().items() if key != "scheme"}
        raise CheckpointError(
            f"The config.json of {source} has the scheme {config.name!r} with the options {shown(options)}. It needs "
            f"{ATTRIBUTE}.{name} of the shape {list(needed)}, but {problem}. The config and the weights are from "
            "different models, or one of them was edited or damaged. Save the model again, or load the stock weights "
            "and call patch_model to train the scheme again."
        )


def _read_index(index: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the contents of an index, and the files that it lists."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not valid JSON ({error}). Download or save the checkpoint again.") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not all(isinstance(file, str) and file == Path(file).name for file in weight_map.values())
        or not isinstance(content.get("metadata"), dict)
    ):
        raise CheckpointError(
            f'{index} is not an index of weights: a dictionary with "metadata" and with "weight_map", from names of '
            "weights to names of files, is expected. Download or save the checkpoint again."
        )
    return content, sorted(set(weight_map.values()))


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            below = {name: _below_position_encoding(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
            slices = {own: file.get_slice(name) for name, own in below.items() if own}
            return {
                name: StoredTensor(tuple(part.get_shape()), "F" in part.get_dtype(), path.name)
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}). The file is damaged or incomplete: download or save the "
            "checkpoint again."
        ) from error


def _below_position_encoding(name: str) -> str | None:
    """`model.position_encoding.stacks...` -> `stacks...`; `None` for any other weight."""
    path = name.split(".")
    return ".".join(path[path.index(ATTRIBUTE) + 1 :]) if ATTRIBUTE in path else None


def _of_variant(name: str, variant: str | None) -> str:
    stem, ending = name.rsplit(".", 1)
    return name if variant is None else f"{stem}.{variant}.{ending}"
