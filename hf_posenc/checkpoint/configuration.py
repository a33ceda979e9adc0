"""Reads and checks the `config.json` of a patched model."""

from __future__ import annotations

from typing import Any

from hf_posenc.entry import ATTRIBUTE, CLASS_PREFIX, FORMAT, MODEL_TYPE, is_stored_model_type
from hf_posenc.errors import PositionEncodingError, SequenceLengthError, UnsupportedError
from hf_posenc.patching.place.config_entry import (
    NAMES,
    NATIVE_LENGTHS,
    SOURCE_NAMES,
    changed_fields,
    is_length,
    native_fields,
    native_lengths,
    stated_lengths,
    without_sentence,
)
from hf_posenc.patching.place.lengths import apply_stated_lengths
from hf_posenc.patching.place.record import described
from hf_posenc.schemes import SchemeConfig, scheme_from_dict
from hf_posenc.schemes.config import names_native
from hf_posenc.schemes.validation import check_shape_of_json, shown

#: Fields of the entry that describe the file and are not part of the config in memory.
_FILE_FIELDS = ("base_model_type", "hf_posenc_version")
#: Limits for a config.json: nesting depth of dictionaries and lists, and total number of values.
_DEEPEST_CONFIG = 64
_LARGEST_CONFIG = 2**20


class CheckpointError(PositionEncodingError, ValueError):
    """A patched checkpoint is damaged, incomplete, or from a newer version."""


def damaged(
    source: Any, content: str, expected: str = "", remedy: str = "", file: str = "config.json"
) -> CheckpointError:
    """The error for a file with a field that was edited.

    Args:
        source: path or hub id of its folder.
        content: the field and its value.
        expected: what should be there.
        remedy: what to do if it was not edited.
        file: name of the file.
    """
    instead = f", where {expected} is expected" if expected else ""
    cause = f" {remedy} Otherwise, the" if remedy else " The"
    return CheckpointError(
        f"The {file} of {source} has {content}{instead}.{cause} file was edited or damaged; restore it, or save the "
        "model again."
    )


def from_disk(disk: dict[str, Any], source: str) -> dict[str, Any]:
    """Converts the dictionary of a patched `config.json` to the stock dictionary, with the scheme under
    `position_encoding`.

    Args:
        disk: the output of `config_entry.to_disk`.
        source: path or hub id, for error messages.

    Raises:
        CheckpointError: for an entry that is damaged or in a newer format.
    """
    try:
        check_shape_of_json(disk, f"The config.json of {source}", depth=_DEEPEST_CONFIG, size=_LARGEST_CONFIG)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    entry = disk.get(ATTRIBUTE)
    if not isinstance(entry, dict):
        raise damaged(
            source,
            f"model_type {MODEL_TYPE!r}, but the {ATTRIBUTE!r} entry {shown(entry)}",
            'a dictionary with "format", "base_model_type" and "scheme"',
        )
    check_entry(disk, source)
    base_model_type = entry.get("base_model_type")
    if not isinstance(base_model_type, str) or not base_model_type or is_stored_model_type(base_model_type):
        raise damaged(
            source,
            f"base_model_type {shown(base_model_type)} in its {ATTRIBUTE!r} entry",
            "the stock model type (for example 'llama')",
        )
    architectures = [] if disk.get("architectures") is None else disk["architectures"]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise damaged(source, f"architectures {shown(architectures)}", "a list of names of model classes")
    return without_sentence(disk) | {
        "model_type": base_model_type,
        "architectures": [name.removeprefix(CLASS_PREFIX) for name in architectures] or None,
        ATTRIBUTE: {key: value for key, value in entry.items() if key not in _FILE_FIELDS},
    }


def check_format(entry: Any, latest: int, source: Any, file: str) -> None:
    """Checks the format of a file, which its entry names.

    Raises:
        CheckpointError: for a newer format, with the version that wrote it, or if it names none.
    """
    written = entry.get("format") if isinstance(entry, dict) else None
    if type(written) is not int or written < 1:
        raise damaged(source, f"{ATTRIBUTE} format {shown(written)}", f"an integer up to {latest}", file=file)
    if written > latest:
        version = entry.get("hf_posenc_version")
        writer = f" by hf_posenc {shown(version)}" if version else ""
        raise CheckpointError(
            f"The {file} of {source} was written in format {shown(written)}{writer}; this version reads up to format "
            f"{latest}. Update hf_posenc."
        )


def check_entry(disk: dict[str, Any], source: str) -> None:
    """Checks that the scheme in a config can be built, and the fields that are saved with it.

    Raises:
        CheckpointError: if not, with the reason; for a newer format, it names the version that wrote it.
    """
    entry = disk[ATTRIBUTE]
    check_format(entry, FORMAT, source, "config.json")
    scheme = entry.get("scheme")
    if not isinstance(scheme, dict) or not isinstance(scheme.get("scheme"), str):
        content = f"{shown(scheme)} in its {ATTRIBUTE!r} entry, which names no scheme"
        raise damaged(source, content, 'a dictionary like {"scheme": "alibi", ...}')
    if names_native(built_scheme(scheme, source, "config.json")):
        raise damaged(source, "the scheme 'native', which refers to the model's own scheme and is never saved")
    _check_lengths(entry.get(NATIVE_LENGTHS, {}), disk, source)


def built_scheme(scheme: dict[str, Any], source: Any, file: str) -> SchemeConfig:
    """The scheme that a file describes.

    Raises:
        CheckpointError: if it cannot be built, with the reason.
    """
    try:
        return scheme_from_dict(scheme)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"The scheme in the {file} of {source} cannot be built: {error} If a newer hf_posenc wrote the file, "
            "update hf_posenc. If the scheme is not one of hf_posenc, the README.md of the folder names the module."
        ) from error


def check_model_type(config_class: Any, memory: dict[str, Any], source: str) -> None:
    """Checks that the entry, the architecture and the class that reads the file belong to the same model type.

    `base_model_type` determines which declarations apply to the model, so it must be correct.

    Args:
        config_class: the class `from_pretrained` was called on; `PreTrainedConfig` for the auto classes. The class of a
            part of a model (for example the text model of a vision-language model) would read the nested dictionary of
            that part, without the scheme.
        memory: the output of `from_disk`.
        source: path or hub id, for error messages.

    Raises:
        CheckpointError: if they differ; names the field.
        UnsupportedError: for the class of a part, because the scheme belongs to the whole model.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type, known = memory["model_type"], getattr(config_class, "model_type", "")
    content = f"base_model_type {model_type!r} in its {ATTRIBUTE!r} entry, but"
    if known and known != model_type:
        nested = [item for item in memory.values() if isinstance(item, dict) and item.get("model_type") == known]
        if nested or getattr(config_class, "base_config_key", "") in memory:
            raise UnsupportedError(
                f"{source} contains a complete {model_type!r} model whose position encoding was replaced. "
                f"{config_class.__name__} describes only a part of it, but the scheme belongs to the whole model. Load "
                f"it with the class it was saved from ({_classes(memory)}) and take the part from that model."
            )
        raise damaged(
            source,
            f"{content} {config_class.__name__} is the config class of {known!r} models",
            remedy=f"Load it with the class it was saved from ({_classes(memory)}), if that is a different class.",
        )
    if not known and model_type not in CONFIG_MAPPING and "AutoConfig" not in (memory.get("auto_map") or {}):
        raise damaged(
            source,
            f"{content} transformers has no such model type",
            remedy="If it is your own model type, register its config with AutoConfig.register before loading.",
        )
    # Another package may give a class the name of one of transformers.
    for architecture in (memory["architectures"] or []) if model_type in CONFIG_MAPPING_NAMES else []:
        types = _model_types_of(architecture)
        if types and model_type not in types:
            raise damaged(source, f"{content} {architecture} is a {' or '.join(map(repr, sorted(types)))}")


def _classes(memory: dict[str, Any]) -> str:
    return ", ".join(memory["architectures"] or ["see config.json"])


def _model_types_of(architecture: str) -> set[str]:
    """Returns the model types of a class name in transformers' auto classes; empty for an unlisted class."""
    from transformers.models.auto import modeling_auto

    types = set()
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            for model_type, names in mapping.items():
                if architecture == names or (isinstance(names, tuple | list) and architecture in names):
                    types.add(model_type)
    return types


def _check_lengths(native: Any, disk: dict[str, Any], source: str) -> None:
    for path, length in native.items() if isinstance(native, dict) else [("", None)]:
        *outer, name = str(path).split(".")
        if name not in (*NAMES, *SOURCE_NAMES) or not is_length(length):
            raise damaged(
                source,
                f"{NATIVE_LENGTHS} {shown(native)} in its {ATTRIBUTE!r} entry",
                'a dictionary of the lengths in the stock config, such as {"max_position_embeddings": 512},',
            )
        owner: Any = disk
        for key in outer:
            owner = owner.get(key) if isinstance(owner, dict) else None
        stated = owner.get(name) if isinstance(owner, dict) else None
        if not is_length(stated):
            raise damaged(source, f"{path} {shown(stated)}, which {NATIVE_LENGTHS} names", "a positive integer")


def follow_lengths(model: Any, config: Any) -> None:
    """Sets the length of a newly built model to the length in its config file.

    Args:
        model: a patched model with the lengths set by its scheme.
        config: the config as read.

    Raises:
        CheckpointError: if the scheme does not support the length, because the file was edited.
    """
    stated = stated_lengths(config)
    try:
        apply_stated_lengths(model.position_encoding, model, stated)
    except SequenceLengthError as error:
        raise CheckpointError(
            f"The config.json of this {type(model).__name__} has the length {stated}, which its position encoding "
            f"does not support: {error} Restore {native_lengths(config)}, and call extend_context(model, tokenizer, "
            "length=...) on the loaded model."
        ) from error


def check_native_fields(model: Any, written: Any) -> None:
    """Compares the position fields of a config with those that the model had when it was saved.

    Args:
        model: a newly built patched model.
        written: the config as read, with the arguments of `from_pretrained`.

    Raises:
        CheckpointError: if one was edited or passed to `from_pretrained`, because it would have no effect.
    """
    record = model.position_encoding.record
    known = native_fields(written)
    for path, stack in record.stacks_by_path().items():
        changed = changed_fields(known[path], stack.stack.config) if isinstance(known.get(path), dict) else ""
        if changed:
            raise CheckpointError(
                f"The config of this {type(model).__name__} has {changed}, with which it was saved. The field belongs "
                "to the native position mechanism, and the model has the position encoding "
                f"{described(record.scheme.to_dict())} instead, so the field would have no effect. It was edited in "
                "config.json, or passed to from_pretrained. Restore it. To scale or change the encoding, load the "
                "model and call patch_model with other options, for example "
                "RopeConfig(theta=..., scaling=YarnScaling(factor=4.0))."
            )
