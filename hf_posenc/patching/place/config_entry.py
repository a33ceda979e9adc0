"""The position encoding in a model's config and in its name, in memory and in `config.json`.

In memory the config has the same class name and `model_type` as before, and one more attribute. Code that uses the
config to look up a model (auto classes, pipelines, PEFT, `generate`) therefore keeps working. The attribute is a
dictionary with `format`, `scheme` and other fields that are saved with the scheme.

On disk the config must be unreadable for a process without this package, because stock transformers ignores unknown
keys and would run the model with its native positions. Three fields of `config.json` ensure this:

- `model_type` is `"hf_posenc"` and an instruction: the auto classes refuse it, and quote it in their error;
- `transformers_weights` is a sentence: a concrete class such as `LlamaForCausalLM` only warns about an unknown
  `model_type`, but fails to find a weights file of that name, and quotes the name in its error;
- `architectures` has a prefix: converters and servers choose their implementation by this field.

A stock class creates its position tables with the lengths in its config, and a patched model keeps the weights of these
tables. If a patch changes a length in the config, the entry stores the native value, which the stock class gets.

`to_dict` returns the `model_type` of the model in memory, which PEFT and others rely on, and users write its result to
`config.json` themselves. It therefore contains the sentence as well. A config built from it drops the sentence.

Programs rebuild a model from `config._name_or_path`, for example TRL's trainers for the reference model of DPO. The
files under that name do not contain a scheme that was placed in memory, so the name itself carries it (`SchemeName`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from yaml.representer import Representer, SafeRepresenter

from hf_posenc.entry import ATTRIBUTE, CLASS_PREFIX, FORMAT, INSTALL, STORED_MODEL_TYPE, read_entry, read_fields
from hf_posenc.patching.anatomy.discovery import SOURCE_LENGTH
from hf_posenc.patching.anatomy.sites import AddedModule
from hf_posenc.version import __version__

if TYPE_CHECKING:
    from hf_posenc.patching.place.encoding import PositionEncoding

#: The field of an entry with the position fields of the stock config, by name of the sub-config. They are compared when
#: the model is loaded, because a field that is changed in the file would have no effect.
NATIVE_FIELDS = "native_fields"
#: The field of an entry with the native lengths, `{"max_position_embeddings": 512}`; a dot separates sub-configs.
NATIVE_LENGTHS = "native_lengths"
#: Names of config attributes for the maximum sequence length.
NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "model_max_length",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_target_positions",
)
#: Names for the length of an encoder that reads features.
SOURCE_NAMES = (SOURCE_LENGTH,)
#: Fields of a config that describe a position mechanism.
_POSITION_FIELD = re.compile(r"(^|_)(rope|rotary|alibi|relative|rel|pos|positions?)(_|$)")
#: Fields whose names match, but that state a length or belong to this package.
_OTHER_FIELDS = frozenset((*NAMES, *SOURCE_NAMES, "position_encoding"))
WEIGHTS_KEY = "transformers_weights"
_WEIGHTS_SENTENCE_START = "this checkpoint has a position encoding of the package hf_posenc"
WEIGHTS_SENTENCE = (
    f"{_WEIGHTS_SENTENCE_START}, which this process did not import. "
    f"Install it (`{INSTALL}`), and `import hf_posenc` before loading the checkpoint"
)


def attach_entry(config: PreTrainedConfig, scheme: dict[str, Any]) -> None:
    """Adds the entry for a scheme to `config`, in place. An earlier scheme is replaced; other fields of the entry stay.

    Args:
        config: the config of the model that is being patched.
        scheme: the result of `SchemeConfig.to_dict`.

    Raises:
        ValueError: if the config already uses the attribute for something else.
    """
    fields = read_fields(config)
    if ATTRIBUTE in config.__dict__ and fields is None:
        raise ValueError(
            f"{type(config).__name__} already has an attribute {ATTRIBUTE!r} ({config.__dict__[ATTRIBUTE]!r}), which "
            "hf_posenc would overwrite. Rename it before patching."
        )
    setattr(config, ATTRIBUTE, {**(fields or {}), "format": FORMAT, "scheme": scheme})
    carry_entry(config)


def position_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config that describe its native position mechanism, JSON-ready, without lengths."""
    fields = {}
    for name, value in config.__dict__.items():
        if _POSITION_FIELD.search(name) and not name.startswith("_") and name not in _OTHER_FIELDS:
            with suppress(TypeError, ValueError):  # JSON has no such value.
                fields[name] = json.loads(json.dumps(value))
    return fields


def changed_fields(before: Mapping[str, Any], config: PreTrainedConfig) -> str:
    """Describes the first position field of a config that differs from a record; empty if none does.

    A field that one side lacks counts as the default of the config's class, because another version of transformers
    may add or drop it.
    """
    now = position_fields(config)
    for name in sorted({*before, *now}):
        default = getattr(type(config), name, None)
        if before.get(name, default) != now.get(name, default):
            return f"{name}={now.get(name)!r} instead of {before.get(name)!r}"
    return ""


def native_fields(config: Any) -> dict[str, dict[str, Any]]:
    """The position fields in the entry of a config; empty if it does not have them."""
    fields = (read_fields(config) or {}).get(NATIVE_FIELDS)
    return fields if isinstance(fields, dict) else {}


def is_length(value: Any) -> bool:
    """Whether a value is a context length in tokens that a config can state."""
    return type(value) is int and 0 < value < 2**31


def find_lengths(
    config: PreTrainedConfig, stack_configs: Iterable[Any] = (), names: Iterable[str] = NAMES
) -> dict[str, int]:
    """The lengths in a config by name, including those of sub-configs that a stack uses."""
    used = [id(config) for config in stack_configs]
    inside = ((name, value) for name, value in config.__dict__.items() if isinstance(value, PreTrainedConfig))
    owners = {"": config} | {f"{name}.": value for name, value in inside if id(value) in used}
    values = {path + name: owner.__dict__.get(name) for path, owner in owners.items() for name in names}
    return {path: value for path, value in values.items() if is_length(value)}


def native_lengths(config: Any) -> dict[str, int]:
    """The lengths in the config before it was patched; empty for a stock config."""
    return (read_fields(config) or {}).get(NATIVE_LENGTHS, {})


def stated_lengths(config: Any) -> dict[str, int]:
    """The current lengths in the config, under the same names."""
    return {path: getattr(*_place(config, path)) for path in native_lengths(config)}


def remember(config: Any, field: str, values: Mapping[str, Any]) -> None:
    """Stores native values in a field of the entry of a config."""
    setattr(config, ATTRIBUTE, {**(read_fields(config) or {}), field: dict(values)})


def write_lengths(config: Any, lengths: Mapping[str, int]) -> None:
    """Writes lengths to a config."""
    for path, length in lengths.items():
        setattr(*_place(config, path), length)


@contextmanager
def at_native_lengths(config: Any) -> Iterator[None]:
    """Context manager in which the config has its native lengths."""
    stated = stated_lengths(config)
    write_lengths(config, native_lengths(config))
    try:
        yield
    finally:
        write_lengths(config, stated)


def _place(config: Any, path: str) -> tuple[Any, str]:
    *outer, name = path.split(".")
    for attribute in outer:
        config = getattr(config, attribute)
    return config, name


def carry_entry(config: PreTrainedConfig) -> None:
    """Changes the class of a config with an entry to a subclass that saves the entry."""
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        # Other versions of this package may have written another ending of the sentence.
        if str(getattr(part, WEIGHTS_KEY, "")).startswith(_WEIGHTS_SENTENCE_START):
            delattr(part, WEIGHTS_KEY)
    stock: Any = stock_class(type(config))
    config.__class__ = carrier_class(stock)


def detach_entry(config: PreTrainedConfig, written: dict[str, Any] | None = None) -> None:
    """Undoes `attach_entry`: restores the stock class and the native lengths of the config, and removes the entry.

    `written` is the entry as it was written. The one in the config may have been changed since.
    """
    if written is not None:
        setattr(config, ATTRIBUTE, written)
    if read_entry(config) is not None:
        write_lengths(config, native_lengths(config))
        delattr(config, ATTRIBUTE)
    config.__class__ = stock_class(type(config))


class _CarrierType(type):
    """The metaclass of the classes below, which makes each of them equal to its stock class as a dictionary key.

    `AutoModel.register(MyConfig, MyModel)` keeps `MyConfig` itself as a key, so a lookup by name is not enough.
    """

    _stock_class: type[PreTrainedConfig]

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._stock_class

    def __hash__(cls) -> int:
        return hash(cls._stock_class)


def stock_class(config_class: type) -> type:
    """The class that a config has without an entry."""
    return config_class._stock_class if isinstance(config_class, _CarrierType) else config_class


@functools.cache
def carrier_class(stock: Any) -> Any:
    """The subclass of a config class whose instances carry an entry. It has the same name on purpose."""

    class Carrier(stock, metaclass=_CarrierType):
        __doc__ = stock.__doc__
        _stock_class = stock
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            stock.__init__(self, *args, **kwargs)

        def to_dict(self) -> dict[str, Any]:
            memory = stock.to_dict(self)
            return memory if read_entry(self) is None else _with_sentence(memory)

        def to_json_string(self, use_diff: bool = True) -> str:
            text = stock.to_json_string(self, use_diff=use_diff)
            if read_entry(self) is None:
                return text
            return json.dumps(to_disk(json.loads(text)), indent=2, sort_keys=True) + "\n"

        def __repr__(self) -> str:
            memory = without_sentence(json.loads(stock.to_json_string(self)))
            return f"{stock.__name__} {json.dumps(memory, indent=2, sort_keys=True)}\n"

        def __eq__(self, other: object) -> Any:
            same = stock.__eq__(self, other)
            return same if same is NotImplemented else same and read_fields(self) == read_fields(other)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            # Models copy their config in a forward. A compiler cannot trace `__reduce_ex__`.
            clone = memo[id(self)] = type(self).__new__(type(self))
            for name, value in self.__dict__.items():
                clone.__dict__[name] = copy.deepcopy(value, memo)
            return clone

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            _, _, *rest = stock.__reduce_ex__(self, max(protocol, 2))
            return (_empty_carrier, (stock,), *rest)

    carrier: Any = Carrier
    for name in ("__name__", "__qualname__", "__module__"):
        setattr(carrier, name, getattr(stock, name))
    # `dataclasses.replace` and `asdict` carry the entry along.
    carrier.__dataclass_fields__ = {**stock.__dataclass_fields__, ATTRIBUTE: _ENTRY}
    return carrier


_ENTRY = dataclasses.fields(dataclasses.make_dataclass("_", [(ATTRIBUTE, Any)], kw_only=True))[0]


def _empty_carrier(stock: Any) -> PreTrainedConfig:
    """An empty instance for `pickle` and `copy`, which then restore its attributes, including the entry."""
    carrier: Any = carrier_class(stock)
    return carrier.__new__(carrier)


def to_disk(memory: dict[str, Any]) -> dict[str, Any]:
    """Converts the dictionary of a config with an entry from its form in memory to that of `config.json`."""
    disk = _with_sentence(memory)
    disk["model_type"] = STORED_MODEL_TYPE
    plain = (name.removeprefix(CLASS_PREFIX) for name in memory.get("architectures") or [])
    disk["architectures"] = [CLASS_PREFIX + name for name in plain]
    disk[ATTRIBUTE] = memory[ATTRIBUTE] | {
        "format": FORMAT,
        "hf_posenc_version": __version__,
        "base_model_type": memory["model_type"],
    }
    return disk


def _with_sentence(value: Any) -> Any:
    """Marks a serialised config and its sub-configs, because a text-only class reads only its own part of the file."""
    if isinstance(value, dict) and "model_type" in value:
        return {key: _with_sentence(item) for key, item in value.items()} | {WEIGHTS_KEY: WEIGHTS_SENTENCE}
    return value


def without_sentence(value: Any) -> Any:
    """Undoes `_with_sentence`, for any version of the sentence."""
    if isinstance(value, dict) and "model_type" in value:
        return {key: without_sentence(item) for key, item in value.items() if key != WEIGHTS_KEY}
    return value


class SchemeName(str):
    """A model's name or path, together with the scheme of the model in memory.

    It equals the plain string, and is written as a plain string to JSON and YAML. `str(name)` is the plain string,
    which refers to the files without the scheme. A copied or pickled config keeps the scheme, but after unpickling the
    reference to the model is lost.

    Args:
        text: the name.
        entry: the scheme's dictionary; `None` for a model that was unpatched, but whose files have a scheme.
        holder: the base model that holds the encoding, stored as a weak reference. `None` if the files under this name
            contain the scheme and its parameters.
        length: the context length that was chosen for the model, or `None`.
    """

    entry: dict[str, Any] | None
    length: int | None

    def __new__(  # noqa: D102
        cls, text: str, entry: dict[str, Any] | None, holder: nn.Module | None = None, length: int | None = None
    ) -> SchemeName:
        name = super().__new__(cls, text)
        name.entry = entry
        name.length = length
        name._holder = None if holder is None else weakref.ref(holder)  # type: ignore[attr-defined]
        return name

    def encoding(self) -> PositionEncoding | None:
        """The encoding in force in the model, if the model still exists and still has this scheme."""
        holder = self.holder
        encoding: Any = None if holder is None else holder._modules.get(ATTRIBUTE)
        added: bool = isinstance(encoding, AddedModule)
        return encoding if added and encoding.config.to_dict() == self.entry else None

    @property
    def holder(self) -> nn.Module | None:
        """The base model, if it still exists."""
        reference: Any = self.__dict__["_holder"]
        return None if reference is None else reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> SchemeName:
        # The name of a copied model refers to the copy. The name of a copied config still refers to the original model.
        holder = memo.get(id(self.holder))
        return self if holder is None else type(self)(str(self), self.entry, holder, self.length)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.entry, None, self.length)


for _representer in (SafeRepresenter, Representer):
    yaml.add_representer(SchemeName, lambda dumper, name: dumper.represent_str(str(name)), Dumper=_representer)
# `torch.load` reads only types that it knows.
torch.serialization.add_safe_globals([SchemeName])


def mark_names(model: PreTrainedModel, encoding: PositionEncoding) -> None:
    """Adds the scheme to the names of a model, until the patch is undone. A model without a name is not changed."""
    entry = encoding.config.to_dict()
    models = [(module, "name_or_path") for module in model.modules() if isinstance(module, PreTrainedModel)]
    for target, attribute in [(model.config, "_name_or_path"), *models]:
        name = target.__dict__.get(attribute)
        if not isinstance(name, str) or not name:
            continue
        if isinstance(name, SchemeName) and name.entry is not None:  # the config was copied from a patched model's
            target.__dict__[attribute] = str(name)
        named = SchemeName(str(name), entry, model.base_model, _length(encoding))
        encoding.record.journal.set(target, attribute, named)


def refresh_names(encoding: PositionEncoding, *, scheme_changed: bool = False) -> None:
    """Updates the names of a model after its length, or the config of its encoding, was changed.

    Args:
        encoding: the encoding in force.
        scheme_changed: whether the files under a plain name, which contain the scheme and its parameters, have another
            scheme.
    """
    for change in _marks(encoding):
        name = change.target.__dict__[change.attribute]
        holder = encoding.__dict__["holder"] if scheme_changed else getattr(name, "holder", None)
        change.put(SchemeName(str(name), encoding.config.to_dict(), holder, _length(encoding)))


def unmark_names(encoding: PositionEncoding) -> None:
    """Restores plain names, for a model whose files contain the scheme. Undoing the patch marks them as unpatched."""
    for change in _marks(encoding):
        plain = str(change.target.__dict__[change.attribute])
        change.put(plain)
        change.value = SchemeName(plain, None)


def _length(encoding: PositionEncoding) -> int | None:
    return None if encoding.lengths is None else encoding.lengths.chosen


def _marks(encoding: PositionEncoding) -> list[Any]:
    names = ("_name_or_path", "name_or_path")
    return [change for change in encoding.record.journal.changes if change.attribute in names]
