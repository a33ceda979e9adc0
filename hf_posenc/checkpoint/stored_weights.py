"""What the files of weights say about themselves: their schemes, their position weights, and which were saved together.

Only headers, indices and a few bytes of each tensor are read.

A small config can request tables of several gigabytes. The header of a safetensors file lists every tensor with its
shape and can be read without the values, so a scheme that does not match the weights is refused before it is allocated.
Without a header (`.bin` files, a model built from a config), the limits of the options apply
(`hf_posenc.schemes.limits`).
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_posenc.checkpoint.adapter_config import CONFIG_FILE, names_a_scheme
from hf_posenc.checkpoint.agreement import NamedSchemes, warn_of_older_version
from hf_posenc.checkpoint.atomic_folder import variant_of
from hf_posenc.checkpoint.configuration import CheckpointError, from_disk
from hf_posenc.checkpoint.position_files import read_position_files
from hf_posenc.checkpoint.recognition import local_file, stored_config
from hf_posenc.checkpoint.shards import SHARDS, digest
from hf_posenc.entry import ATTRIBUTE, find_marks
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.place.encoding import build_encoding, parts_named
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.limits import shown

#: Arguments of `from_pretrained` with which other files are read, or names differ from those of the model.
_ELSEWHERE = ("gguf_file", "key_mapping")
#: Weight files of a whole model: indices of shards or single files.
WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors", "pytorch_model.bin")
#: A file that FSDP saves in addition, without a mark.
_FSDP_WEIGHTS = "pytorch_model_fsdp.bin"


class StoredTensor(NamedTuple):
    """The description of a tensor in a header."""

    shape: tuple[int, ...]
    floating: bool
    file: str


def named_schemes(path: Path) -> NamedSchemes:
    """The schemes that a weight file, or the index of several, names.

    Weights of an older version do not name a scheme. They belong to the config next to them.
    """
    found = _marks_in(path)
    if not found and (disk := stored_config(path.parent, {})) is not None:
        entry = from_disk(disk, str(path.parent))[ATTRIBUTE]
        if entry["format"] < 2:
            warn_of_older_version(path.parent)
            return NamedSchemes(str(path), {ATTRIBUTE: entry["scheme"]})
    return NamedSchemes.of(found, str(path))


def schemes_of_checkpoint(folder: Path) -> NamedSchemes | None:
    """The schemes that the folder of a checkpoint names; `None` if it does not say whether its weights have one."""
    file = next((folder / name for name in (*WEIGHTS, _FSDP_WEIGHTS) if (folder / name).is_file()), None)
    if file is not None and ((named := named_schemes(file)).schemes or file.name != _FSDP_WEIGHTS):
        return named
    stock = NamedSchemes(str(folder), {})
    if (folder / CONFIG_FILE).is_file() and not names_a_scheme(folder, {}):
        return stock
    beside_adapter = read_position_files(folder, {})
    if beside_adapter is not None:
        return NamedSchemes(str(folder), {ATTRIBUTE: beside_adapter.scheme})
    disk = stored_config(folder, {})
    if disk is not None:  # FSDP has saved the weights in shards, or in a file without a mark.
        return NamedSchemes(str(folder), {ATTRIBUTE: from_disk(disk, str(folder))[ATTRIBUTE]["scheme"]})
    return stock if file is not None or (folder / "config.json").is_file() else None


def _marks_in(path: Path) -> dict[str, Any]:
    if path.suffix != ".json":
        with path.open("rb") as raw:  # Loaders accept any name. The header of safetensors is JSON after its length.
            is_safe = raw.read(9)[8:] == b"{"
        if is_safe:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in find_marks(file.keys())}
        # torch can memory-map files in its current format but not in its legacy format.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return {key: state[key] for key in find_marks(state)} if isinstance(state, dict) else {}
    index = _read_index(path)
    shards = index.get("weight_map", index)
    found: dict[str, Any] = {}
    for shard in {shards[key] for key in find_marks(shards)}:
        found |= _marks_in(path.parent / shard)
    for shard in set(shards.values()) if found else ():
        _check_shard(index, path.parent / shard)
    return found


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
            if (below := below_position_encoding(name)) and isinstance(tensor, torch.Tensor)
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
    content = _read_index(index)
    for shard in _shards_of(content, index):
        path = local_file(source, shard, kwargs)
        if path is None:
            if os.path.isdir(source):
                raise CheckpointError(f"{index} lists the file {shard!r}, which does not exist. Copy the whole folder.")
            return None  # The download is incomplete; transformers downloads the rest.
        found |= _read_header(path)
        _check_shard(content, path)
    return found


def check_scheme_fits(
    anatomy: Anatomy, config: SchemeConfig, stored: dict[str, StoredTensor] | None, source: str
) -> None:
    """Raises if a scheme does not fit the model, or needs weights of other shapes than the stored ones.

    The check allocates no memory for the scheme.

    Args:
        anatomy: that of the stock model to which the scheme will be applied.
        config: the scheme.
        stored: the output of `stored_position_weights`; `None` if there is nothing to compare with.
        source: path or hub id, for error messages.

    Raises:
        CheckpointError: with the name of the weight, the expected shape and the shape found.
    """
    try:
        encoding = build_encoding(config, anatomy.stacks(parts_named(config)), torch.device("meta"))
    except ValueError as error:
        raise CheckpointError(
            f"The scheme in the config.json of {source} cannot be applied to {type(anatomy.model).__name__}: {error}"
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


def _read_index(index: Path) -> Any:
    try:
        return json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not valid JSON ({error}). Download or save the checkpoint again.") from error


def _shards_of(content: Any, index: Path) -> list[str]:
    """The files that an index lists."""
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
    return sorted(set(weight_map.values()))


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            below = {name: below_position_encoding(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
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


def below_position_encoding(name: str) -> str | None:
    """`model.position_encoding.stacks...` -> `stacks...`; `None` for any other weight."""
    path = name.split(".")
    return ".".join(path[path.index(ATTRIBUTE) + 1 :]) if ATTRIBUTE in path else None


def _of_variant(name: str, variant: str | None) -> str:
    stem, ending = name.rsplit(".", 1)
    return name if variant is None else f"{stem}.{variant}.{ending}"


def _check_shard(index: dict[str, Any], path: Path) -> None:
    """Refuses a shard that does not have the digest in its index."""
    metadata = index.get("metadata")
    digests = metadata.get(SHARDS) if isinstance(metadata, dict) else None
    if digests is None or path.suffix != ".safetensors":  # A tool has converted the files, and kept the metadata.
        return
    try:
        same = digests[path.name] == digest(path)
    except (OSError, ValueError, LookupError, TypeError):  # one of them is damaged
        same = False
    if not same:
        raise CheckpointError(
            f"{path} is not the file that the index next to it was saved with: it comes from another save, was edited, "
            "or is being replaced by a save that goes on. Its weights may belong to another position encoding. Copy "
            "all files of one save together, or save the model again. If the change is intended, remove "
            f"{SHARDS!r} from the index."
        )


def files_read(source: Any, subfolder: str) -> dict[str, tuple[int, ...]] | None:
    """Identifies the files of a model in a local folder. If it changes, they were replaced; `None` for a hub id."""
    folder = os.path.join(source, subfolder) if isinstance(source, str | os.PathLike) else ""
    if not os.path.isdir(folder):
        return None
    found: dict[str, tuple[int, ...]] = {}
    for entry in os.scandir(folder):
        if entry.name == "config.json" or variant_of(entry.name) is not None:
            status = entry.stat()
            found[entry.name] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found
