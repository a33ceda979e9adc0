"""Checks that the parts of a checkpoint belong together: its config, its weights, and its files.

A state dict, a file, the shards of an index, a checkpoint of `Trainer` and a distributed checkpoint name the schemes of
their weights in the same way. `NamedSchemes` compares them with those of a model; `stored_schemes.py` reads them.

A small config can request tables of several gigabytes. The header of a safetensors file lists every tensor with its
shape and can be read without the values, so a scheme that does not match the weights is refused before it is allocated.
Without a header (`.bin` files, a model built from a config), the limits of the options apply
(`hf_posenc.schemes.validation`).

One shard of several names the scheme. The index holds a digest of each shard, so that the others cannot come from
another model. It is added to the index that transformers has written; other programs ignore it. An index without
digests, of a stock tool or of an older version, is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_posenc.checkpoint.atomic_folder import variant_of
from hf_posenc.checkpoint.configuration import CheckpointError, damaged
from hf_posenc.entry import ATTRIBUTE, MARK, find_file, find_mark, find_marks
from hf_posenc.errors import warn_user
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.place.encoding import PositionEncoding, build_encoding, encodings
from hf_posenc.patching.place.record import disagreement, marked_scheme
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.validation import shown

#: Arguments of `from_pretrained` with which other files are read, or names differ from those of the model.
_ELSEWHERE = ("gguf_file", "key_mapping")
#: The key of the digests in the metadata of an index, `{"hf_posenc_shards": {file: digest}}`.
SHARDS = "hf_posenc_shards"
#: Number of bytes that are read at each of a few places of a tensor.
_SAMPLE, _PLACES = 64, 4


class SchemeMismatchError(CheckpointError, RuntimeError):
    """The weights were trained with a position encoding that differs from that of the model.

    It is also a `RuntimeError`, like torch's error for a state dict that does not match.
    """


@dataclass(frozen=True)
class NamedSchemes:
    """The schemes that weights name.

    Attributes:
        weights: where the weights are, for messages.
        schemes: the schemes by the keys of their marks; empty for weights of a stock model.
    """

    weights: str
    schemes: Mapping[str, dict[str, Any]]

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], weights: str = "this state dict") -> NamedSchemes:
        """The schemes that a state dict names."""
        return cls(weights, {key: marked_scheme(state_dict[key]) for key in find_marks(state_dict)})

    def check(self, model: nn.Module, remedy: str = "", *, reader: str = "") -> None:
        """Compares the schemes with those of a model, before anything is copied.

        Args:
            model: any module; unpatched models have stock positions.
            remedy: sentences appended to the message.
            reader: the program that has read the config that the model was built from, as in `disagreement`.

        Raises:
            SchemeMismatchError: naming both schemes, if they differ.
        """
        present = encodings(model)
        places = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if module in present]
        if len(present) == 1 and len(self.schemes) <= 1:  # Several paths may lead to one model.
            places = places[:1]
        placed = {f"{path}.{MARK}": module.config for path, module in places if isinstance(module, PositionEncoding)}
        self.compare(placed, f"this {type(model).__name__}", remedy, reader)

    def compare(self, placed: Mapping[str, SchemeConfig], target: str, remedy: str = "", reader: str = "") -> None:
        """Compares the schemes with those in force, by the keys of their marks.

        Raises:
            SchemeMismatchError: naming both schemes, if they differ.
        """
        pairs = [(self.schemes.get(key), placed.get(key)) for key in {**placed, **self.schemes}]
        if len(placed) <= 1 and len(self.schemes) <= 1:  # A model inside another module has prefixed keys.
            pairs = [(next(iter(self.schemes.values()), None), next(iter(placed.values()), None))]
        problem = next(filter(None, (disagreement(*pair, reader) for pair in pairs)), None)
        if problem is not None:
            raise SchemeMismatchError(f"The weights in {self.weights} do not belong to {target}: {problem}.{remedy}")


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
            if (below := below_position_encoding(name)) and isinstance(tensor, torch.Tensor)
        }
    if kwargs.get("use_safetensors") is False or any(kwargs.get(option) for option in _ELSEWHERE):
        return None
    variant = kwargs.get("variant")
    single = find_file(source, of_variant(SAFE_WEIGHTS_NAME, variant), kwargs)
    if single is not None:
        return _read_header(single)
    index = find_file(source, of_variant(SAFE_WEIGHTS_INDEX_NAME, variant), kwargs)
    if index is None:
        return None
    tensors: dict[str, StoredTensor] = {}
    content = read_index(index)
    for shard in _shards_of(content, index):
        path = find_file(source, shard, kwargs)
        if path is None:
            if os.path.isdir(source):
                raise CheckpointError(f"{index} lists the file {shard!r}, which does not exist. Copy the whole folder.")
            return None  # The download is incomplete; transformers downloads the rest.
        tensors |= _read_header(path)
        check_shard(content, path)
    return tensors


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
        encoding = build_encoding(config, anatomy.stacks(config.part_names), torch.device("meta"))
    except ValueError as error:
        raise CheckpointError(
            f"The scheme in the config.json of {source} cannot be applied to {type(anatomy.model).__name__}: {error}"
        ) from error
    except RuntimeError:
        return  # A third-party scheme may need real tensors to be built. Its weights are checked after loading.
    if stored is None:
        return
    weights = encoding.weights()
    # Transformers stores some models under other names (`text_model` of TIPSv2). `check_loaded` reports what it misses.
    may_be_renamed = bool(stored.keys() - weights.keys())
    for name, parameter in weights.items():
        needed, tensor = tuple(parameter.shape), stored.get(name)
        if tensor is None and may_be_renamed:
            continue
        if tensor is not None and tensor.shape == needed and tensor.floating == parameter.is_floating_point():
            continue
        if tensor is None:
            problem = "its weights have no such tensor, so it would run with random weights"
        elif tensor.shape != needed:
            problem = f"in {tensor.file} it has the shape {list(tensor.shape)}"
        else:
            problem = f"in {tensor.file} it is {'a floating-point' if tensor.floating else 'an integer'} tensor"
        options = {key: value for key, value in config.to_dict().items() if key != "scheme"}
        raise CheckpointError(
            f"The config with which {source} is loaded has the scheme {config.name!r} with the options "
            f"{shown(options)}. It needs {ATTRIBUTE}.{name} of the shape {list(needed)}, but {problem}. The config and "
            "the weights are from different models, or one of them was edited or damaged. Save the model again, or "
            "load the stock weights with a stock config and call patch_model to train the scheme again."
        )


def check_loaded(
    model: Any, info: Mapping[str, Any], source: str, entry_format: int, named: NamedSchemes | None = None
) -> None:
    """Compares the weights of a folder, and the scheme that they name, with the scheme in its config.

    Args:
        model: the model that was just loaded.
        info: transformers' loading info.
        source: path or hub id, for messages.
        entry_format: format of the folder's config; weights of format 1 do not name a scheme.
        named: the schemes that the files name, if transformers does not load the mark.

    Raises:
        SchemeMismatchError: if the schemes differ, or if the weights should name a scheme but do not.
        CheckpointError: if the scheme would run with random weights, or if there are weights that it does not have.
    """
    (encoding,) = encodings(model)
    missing, unexpected = info.get("missing_keys", ()), info.get("unexpected_keys", ())
    scheme, absent = encoding.loaded_scheme(), find_mark(missing) is not None
    if absent and entry_format < 2:
        warn_of_older_version(source)
    elif scheme is not None or absent:  # Else the weights stay on disk or come from another process.
        (named or NamedSchemes(source, {} if scheme is None or absent else {MARK: scheme})).check(
            model,
            " Restore the config.json that was saved with them, or pass no `config`. To give these weights another "
            "scheme, load them with their config and call patch_model.",
            reader="from_pretrained",
        )
    scheme = encoding.config.to_dict()
    names = set(encoding.weights())
    mismatched = (key[0] if isinstance(key, tuple) else key for key in info.get("mismatched_keys", ()))
    random = sorted(key for key in {*missing, *mismatched} if below_position_encoding(key) in names)
    if random:
        raise CheckpointError(
            f"{source} has no weights of the right shape for its position encoding {scheme!r}: {_first(random)}. It "
            "would run with random weights. Save the model again, or load the stock weights and call patch_model to "
            "train the scheme again."
        )
    # Transformers does not load the mark if it shards a model over processes. It was already compared.
    below = {key: below_position_encoding(key) for key in unexpected}
    surplus = sorted(key for key, name in below.items() if name and find_mark([key]) is None)
    if not all(below.values()):
        # This class lacks modules of the checkpoint's class, for example the decoder of a masked autoencoder.
        surplus = [key for key in surplus if str(below[key]).partition("stacks.")[2].split(".")[0] in encoding.stacks]
    if surplus:
        raise CheckpointError(
            f"{source} contains weights that its position encoding {scheme!r} does not have: {_first(surplus)}. The "
            "entry in config.json and the weights are from different models."
        )


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"


def warn_of_older_version(source: Any) -> None:
    """Warns that weights of format 1 cannot be compared with their config."""
    warn_user(
        f"{source} was saved by an older hf_posenc, whose weights do not name their scheme, so it cannot be checked "
        "whether they belong to this config. Save the model again to store the scheme with the weights."
    )


def below_position_encoding(name: str) -> str | None:
    """`model.position_encoding.stacks...` -> `stacks...`; `None` for any other weight."""
    path = name.split(".")
    return ".".join(path[path.index(ATTRIBUTE) + 1 :]) if ATTRIBUTE in path else None


def read_index(index: Path) -> Any:
    """The content of an index of several weight files."""
    try:
        return json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(index.parent, f"content that cannot be read ({error})", file=index.name) from error


def _shards_of(content: Any, index: Path) -> list[str]:
    """The files that an index lists."""
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not all(isinstance(file, str) and file == Path(file).name for file in weight_map.values())
        or not isinstance(content.get("metadata"), dict)
    ):
        expected = 'a dictionary with "metadata" and with "weight_map", from names of weights to names of files,'
        raise damaged(index.parent, "no index of weights", expected, file=index.name)
    return sorted(set(weight_map.values()))


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            below = {name: below_position_encoding(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
            slices = {below_name: file.get_slice(name) for name, below_name in below.items() if below_name}
            kinds = {name: (tuple(part.get_shape()), "F" in part.get_dtype()) for name, part in slices.items()}
            return {name: StoredTensor(*kind, path.name) for name, kind in kinds.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}). The file is damaged or incomplete: download or save the "
            "checkpoint again."
        ) from error


def of_variant(name: str, variant: str | None) -> str:
    """The name of a weight file of a variant: `model.safetensors` -> `model.fp16.safetensors`."""
    stem, ending = name.rsplit(".", 1)
    return name if variant is None else f"{stem}.{variant}.{ending}"


def record_shards(folder: Path) -> None:
    """Adds the digests of the shards to every index of safetensors in a folder."""
    for path in folder.glob("*.safetensors.index*.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        digests = {shard: digest(folder / shard) for shard in set(index["weight_map"].values())}
        index["metadata"][SHARDS] = digests
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def digest(path: Path) -> str:
    """A digest of the header of a safetensors file, and of some bytes of each tensor."""
    content = hashlib.sha256()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, os.fstat(file.fileno()).st_size))
        content.update(header)
        places = (entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
        for start, end in sorted(places):
            for number in range(_PLACES):
                file.seek(8 + len(header) + start + max(end - start - _SAMPLE, 0) * number // (_PLACES - 1))
                content.update(file.read(min(_SAMPLE, end - start)))
    return content.hexdigest()


def check_shard(index: dict[str, Any], path: Path) -> None:
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
            "or is being replaced by a save in progress. Its weights may belong to another position encoding. Copy "
            "all files of one save together, or save the model again. If the change is intended, remove "
            f"{SHARDS!r} from the index."
        )


def files_read(source: Any, subfolder: str) -> dict[str, tuple[int, ...]] | None:
    """A value that identifies the files of a model in a local folder, until they are replaced; `None` for a hub id."""
    folder = os.path.join(source, subfolder) if isinstance(source, str | os.PathLike) else ""
    if not os.path.isdir(folder):
        return None
    states: dict[str, tuple[int, ...]] = {}
    for entry in os.scandir(folder):
        if entry.name == "config.json" or variant_of(entry.name) is not None:
            status = entry.stat()
            states[entry.name] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return states
