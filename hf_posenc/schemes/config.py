"""Configs: the options of schemes as frozen, validated dataclasses that round-trip through JSON."""

from __future__ import annotations

import builtins
import dataclasses
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch

from hf_posenc.errors import NOT_OF_THE_USER, UnknownNameError, UnsupportedError
from hf_posenc.other_names import hint_for_option
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    SchemeParts,
)
from hf_posenc.schemes.validation import as_declared, check_declared, check_options, check_shape_of_json, shown

ConfigType = TypeVar("ConfigType")
_KINDS: dict[str, tuple[type, ...]] = {
    "additive": (AdditiveEncoding,),
    "query_key_map": (QueryKeyMap,),
    "logit_bias": (DistanceBias, PairwiseBias),
    "logit_scale": (LogitScale,),
}


@dataclass(frozen=True)
class BuildContext:
    """Properties of the model and the layer that a part is built for.

    Args:
        hidden_size: width of the token representations, `hidden`.
        num_heads: number of query heads, `heads`. Biases are per query head.
        head_dim: width of one query or key head, `head_dim`.
        rotary_dim: number of leading dimensions of a head that the architecture itself rotates, or `None` if it rotates
            none. This is the default width of a rotation; without it, the default is `head_dim`.
        causal: whether queries see only keys at or before their own position.
        max_positions: the length that the stock model was built for, or `None` if it has no such limit.
        initializer_range: standard deviation for newly created tables (BERT, arXiv:1810.04805: 0.02).
        num_key_value_heads: number of key heads, `key_value_heads`; `None` for as many as query heads.
        layer_input_size: width of the input from which a layer projects its queries and keys; `None` for
            `hidden_size`.
        logit_terms: for how many summed products of queries and keys the layer's own factor is made: usually 1, and 3
            for `1 / sqrt(3 head_dim)`, as in DeBERTa.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    rotary_dim: int | None = None
    causal: bool = True
    max_positions: int | None = None
    initializer_range: float = 0.02
    num_key_value_heads: int | None = None
    layer_input_size: int | None = None
    logit_terms: int = 1

    @property
    def input_size(self) -> int:
        """Width of the input from which a layer projects its queries and keys."""
        return self.layer_input_size or self.hidden_size

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        return self.num_key_value_heads or self.num_heads


@dataclass(frozen=True)
class SchemeConfig:
    """The options of a scheme. Frozen, hashable, validated on construction, and convertible to and from JSON."""

    #: The scheme's name in the literature, lower case.
    name: ClassVar[str] = ""
    #: Whether every layer has its own copy of the scheme's parts instead of sharing them.
    per_layer: ClassVar[bool] = False
    #: Whether it combines or arranges other schemes; `list_schemes` does not list such names.
    combinator: ClassVar[bool] = False
    #: Whether `merge` creates its parts from those of its children. Each child is then built separately: its
    #: `per_layer` determines whether layers share its parts, and its parts appear separately in the state dict.
    merges_children: ClassVar[bool] = False
    #: Whether equal children share one set of parameters.
    shares_children: ClassVar[bool] = True
    #: The class of its only part, which is called with the config and the context; `None` for another `build`.
    part_class: ClassVar[type[Any] | None] = None
    #: Why `part_class` is refused in a bidirectional model; empty if it is not.
    causal_only: ClassVar[str] = ""
    #: Whether it places anything in a model, where the native positions were.
    has_parts: ClassVar[bool] = True
    #: The end of the error message if it has no parts and cannot be built; empty if it can be built.
    without_parts: ClassVar[str] = ""
    #: Whether the native scheme of a model takes its place.
    stands_for_native: ClassVar[bool] = False

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Records which options the caller passed, to distinguish them from defaults."""
        config = super().__new__(cls)
        named = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        object.__setattr__(config, "_given", frozenset([*named[: len(arguments)], *options]))
        return config

    def __post_init__(self) -> None:
        check_options(self)

    def gave(self, option: str) -> bool:
        """Whether an option was passed to the constructor, even if with its default value."""
        return option in self._given  # type: ignore[attr-defined]

    @property
    def leaves_layout_open(self) -> bool:
        """Whether `layout` is "auto", which stands for the pairing of the architecture."""
        return getattr(self, "layout", None) == "auto" and hasattr(self, "rotary_dim")

    def children(self) -> dict[str, SchemeConfig]:
        """The configs inside this one, by option: `{"inner": ...}`, `{"parts[0]": ...}`."""
        children: dict[str, SchemeConfig] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            items = enumerate(value) if isinstance(value, tuple) else ()
            places = {field.name: value} | {f"{field.name}[{index}]": item for index, item in items}
            children |= {place: item for place, item in places.items() if isinstance(item, SchemeConfig)}
        return children

    def with_children(self, children: Mapping[str, SchemeConfig]) -> Self:
        """A copy of this config in which some children are replaced.

        Args:
            children: the new children, under the names used by `children()`; others are kept.
        """

        def replaced(place: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(replaced(f"{place}[{index}]", item) for index, item in enumerate(value))
            return children.get(place, value)

        if not children:
            return self
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: new for name, value in values.items() if (new := replaced(name, value)) != value}
        return dataclasses.replace(self, **changed) if changed else self

    def acting_together(self) -> tuple[SchemeConfig, ...]:
        """The schemes that this config composes; for other configs, the config itself."""
        return (self,)

    @property
    def label(self) -> str:
        """The name and the non-default options, such as `rope` or `rope(theta=500000, yarn x4)`."""
        changed = []
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if value != default:
                text = _value_label(value)
                changed.append(text if isinstance(value, SubConfig) else f"{field.name}={text}")
        return self.name + (f"({', '.join(changed)})" if changed else "")

    def for_part(self, part: str) -> SchemeConfig | None:
        """The scheme of one part of a composite model; `None` if the part keeps its native positions."""
        return self

    def for_layer(self, layer: int, layer_type: str | None = None) -> SchemeConfig:
        """The scheme of one layer of a model; this one, unless layers have different schemes.

        Args:
            layer: its index in its stack.
            layer_type: its entry in the model's `config.layer_types`, such as "sliding_attention".

        Raises:
            ValueError: if this config does not define a scheme for the layer.
        """
        return self

    @property
    def part_names(self) -> tuple[str, ...] | None:
        """The parts of a composite model that have a scheme; `None` if the config does not name parts."""
        return None

    def within_and_across(self) -> tuple[SchemeConfig, SchemeConfig | None]:
        """The scheme of self-attention, and that of cross-attention or `None`."""
        return self, None

    def merge(self, built: Sequence[SchemeParts]) -> SchemeParts:
        """Combines the parts of the children; only for configs with `merges_children`.

        Args:
            built: the parts of each child, in the order of `children`.
        """
        raise NotImplementedError

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts for one layer of a model.

        Raises:
            UnsupportedError: in a bidirectional model, for a scheme that is not defined for later keys.
            ValueError: if an option is not possible in this layer (for example an odd rotary width), or if the config
                only says which schemes to build.
        """
        if self.without_parts:
            raise ValueError(f"The scheme {self.name!r} {self.without_parts}")
        if not self.has_parts:
            return SchemeParts()
        if self.merges_children:
            return self.merge([child.build(context) for child in self.children().values()])
        if self.part_class is None:
            raise NotImplementedError(f"{type(self).__name__} has neither `part_class` nor a method `build`.")
        if self.causal_only and not context.causal:
            raise UnsupportedError(self.causal_only)
        return SchemeParts.of(self.part_class(self, context))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: `{"scheme": name, **options}`; nested configs are dictionaries too."""
        return {"scheme": self.name} | _options(self)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Builds the config from a dictionary of options, from `to_dict` or from user input.

        Raises:
            UnknownNameError: for an option that this scheme does not have.
            ValueError: for a value out of range or of another type; integers become floats where floats are declared.
        """
        return _construct(cls, f"scheme {cls.name!r}", options)


@dataclass(frozen=True)
class SubConfig:
    """A typed group of options inside a scheme config, such as a RoPE scaling."""

    #: The value of the "type" key in the JSON form.
    type: ClassVar[str] = ""
    _types: ClassVar[dict[str, builtins.type[SubConfig]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.type:
            SubConfig._types[cls.type] = cls

    def __post_init__(self) -> None:
        check_options(self)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: `{"type": type, **options}`."""
        return {"type": self.type} | _options(self)

    @staticmethod
    def from_dict(entry: dict[str, Any]) -> SubConfig:
        """Builds the sub-config of the `type` in the dictionary.

        Raises:
            UnknownNameError: for an unknown type or option.
        """
        options = dict(entry)
        config_class = SubConfig.type_named(str(options.pop("type")))
        return _construct(config_class, config_class.__name__, options)

    @classmethod
    def type_named(cls, kind: str) -> builtins.type[Self]:
        """The subclass of this class whose `type` is `kind`.

        Raises:
            UnknownNameError: if there is none.
        """
        known = {name: config_class for name, config_class in SubConfig._types.items() if issubclass(config_class, cls)}
        if kind not in known:
            raise UnknownNameError(
                "type", kind, known, owner="a group of options" if cls is SubConfig else cls.__name__
            )
        return known[kind]


@dataclass(frozen=True)
class OuterConfig(SchemeConfig):
    """Base class of configs that contain other schemes."""

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """Whether any of the schemes has its own copy in every layer."""
        return any(child.per_layer for child in self.children().values())

    @property
    def invisible_under_layer_norm(self) -> bool:
        """Whether a LayerNorm removes the additive part of any of the schemes."""
        return any(getattr(child, "invisible_under_layer_norm", False) for child in self.children().values())


class SharedConfig(SchemeConfig):
    """Base class of configs whose option `shared` says whether all layers share the parts."""

    shared: bool

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        """Whether every layer has its own parts."""
        return not self.shared


def walk(config: SchemeConfig) -> Iterator[SchemeConfig]:
    """A config and all configs inside it."""
    yield config
    for child in config.children().values():
        yield from walk(child)


def check_savable(config: SchemeConfig) -> None:
    """Refuses a config with an option that a saved model could not give back. Own configs may check nothing themselves.

    Raises:
        ValueError: naming the option and what is expected.
    """
    for nested in walk(config):
        for field in dataclasses.fields(nested):
            value, owner = getattr(nested, field.name), type(nested).__name__
            if not _is_savable(value):
                raise ValueError(
                    f"{owner}.{field.name} is {shown(value)}, which could not be saved with a model. Options are "
                    "finite numbers (not those of numpy or torch), texts, True, False, None, schemes, and tuples of "
                    "these."
                )
            check_declared(as_declared(value, field), field, owner)


def _is_savable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_savable, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, SchemeConfig | SubConfig | str | int)


def names_native(config: SchemeConfig) -> bool:
    """Whether the native scheme of a model takes the place of a config, or of any config inside it."""
    return any(nested.stands_for_native for nested in walk(config))


def nesting(config: SchemeConfig) -> int:
    """The nesting depth of a config: 1 if it contains no other scheme."""
    return 1 + max(map(nesting, config.children().values()), default=0)


def _construct(cls: builtins.type[ConfigType], owner: str, options: dict[str, Any]) -> ConfigType:
    """Calls a config's constructor after checking the size and the names of its options.

    Every conversion from JSON to a config calls this function before it reads the options.
    """
    check_shape_of_json(options, f"{owner[0].upper()}{owner[1:]}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in options:
        if name not in fields:
            raise UnknownNameError("option", name, fields, owner=owner, hint=hint_for_option(name, fields))
    missing = [name for name in required_options(cls) if name not in options]
    if missing:
        raise ValueError(
            f"{owner[0].upper()}{owner[1:]} needs the option{'s' if len(missing) > 1 else ''} {', '.join(missing)}."
        )
    values = {name: as_declared(_decode(value), fields[name]) for name, value in options.items()}
    config = cls(**values)
    for name, value in values.items():
        check_declared(value, fields[name], cls.__name__)
    return config


def required_options(cls: builtins.type[Any]) -> list[str]:
    """The options of a config class that have no default."""
    fields = dataclasses.fields(cls)
    return [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]


def constructor_example(cls: builtins.type[Any]) -> str:
    """An example call of a config class, with dots for required options: `LinearScaling(factor=...)`."""
    return f"{cls.__name__}({', '.join(f'{name}=...' for name in required_options(cls))})"


def _options(config: SchemeConfig | SubConfig) -> dict[str, Any]:
    return {field.name: _encode(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _value_label(value: Any) -> str:
    if isinstance(value, SchemeConfig):
        return value.label
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value_label, value)) + "]"
    if isinstance(value, SubConfig):
        factor = getattr(value, "factor", None)
        return f"{value.type} x{factor:g}" if isinstance(factor, int | float) else value.type
    return f"{value:g}" if isinstance(value, float) else str(value)


def _encode(value: Any) -> Any:
    if isinstance(value, SchemeConfig | SubConfig):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and "type" in value:
        return SubConfig.from_dict(value)
    if isinstance(value, tuple | list):
        return tuple(_decode(item) for item in value)
    return value


def name_own_code(error: Exception, config: SchemeConfig) -> None:
    """Adds to an error that code from outside of this package raised in a part or in `build` where that happened."""
    in_scheme = False
    for frame, line in traceback.walk_tb(error.__traceback__):
        in_scheme = in_scheme or isinstance(frame.f_locals.get("self"), Part | SchemeConfig)
        module = frame.f_globals.get("__name__", "")
        if in_scheme and module.partition(".")[0] not in NOT_OF_THE_USER:
            code = f"{frame.f_code.co_qualname} (module {module}, line {line})"
            error.add_note(f"This happened in {code}, which the position encoding {config.label!r} calls.")
            break


def check_parts(config: SchemeConfig, parts: Any) -> None:
    """Raises a `TypeError` for anything other than `SchemeParts` with parts of the right types."""
    owner = f"{type(config).__name__}.build"
    if not isinstance(parts, SchemeParts):
        raise TypeError(f"{owner} returned {type(parts).__name__}; expected SchemeParts(...).")
    for name, kinds in _KINDS.items():
        part = getattr(parts, name)
        if part is not None and not isinstance(part, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{owner} returned a {type(part).__name__} as {name}; expected a subclass of {expected}.")
    kind, order, part_class = type(config), type(config).__mro__, config.part_class
    named, *makers = (
        next((place for place, base in enumerate(order) if name in vars(base)), len(order))
        for name in ("part_class", "build", "rotation")
    )
    if part_class and named < min(makers) and not any(isinstance(part, part_class) for part in parts):
        raise TypeError(
            f"{kind.__name__}.part_class is {part_class.__name__}, but {owner} is that of "
            f"{order[min(makers)].__name__}, which builds other parts. Define `build` as well, or derive "
            f"{kind.__name__} from SchemeConfig."
        )
    for part in parts:
        for module in part.modules():
            if isinstance(module, Part):
                module.check_statements()
    if isinstance(parts.logit_bias, DistanceBias):
        _check_bias(parts.logit_bias)


@torch.no_grad()
def _check_bias(bias: DistanceBias) -> None:
    """Refuses a bias that does not return `(heads, *distance.shape)` for three distances, or one that gives NaN.

    Skipped on meta devices.
    """
    distance = torch.arange(-2, 1)
    if any(tensor.is_meta for tensor in (distance, *bias.parameters(), *bias.buffers())):
        return
    values = bias(distance)
    shape = tuple(values.shape)
    if len(shape) != 2 or shape[1:] != distance.shape:
        raise ValueError(
            f"{type(bias).__name__}.forward returned the shape {shape} for distances of the shape "
            f"{tuple(distance.shape)}; expected (heads, {len(distance)}), one value per head and distance."
        )
    wrong = values.isnan() | (values == torch.inf)
    if type(values) is torch.Tensor and bool(wrong.any()):
        head, at = wrong.nonzero()[-1].tolist()
        raise ValueError(
            f"{bias._get_name()} returned {float(values[head, at])} for the distance {int(distance[at])}, "
            "so outputs would be NaN. To hide a pair, return -inf (by torch.where, not by a product with 0)."
        )
