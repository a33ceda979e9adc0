"""What a position encoding is made of.

A scheme is a frozen config (its options, and nothing else) that builds at most three parts:

======================  ==========================================================================
`AdditiveEncoding`      positions -> vectors added to the token representations, once per forward
`QueryKeyMap`           positions -> a linear map of every query and every key, before the cache
`LogitBias`             key position minus query position -> a number added to the attention logits
======================  ==========================================================================

Nothing in this package knows about transformers: a part receives positions and tensors, and the code
that places it inside a model lives in `hf_posenc.patching`.
"""

from __future__ import annotations

import builtins
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnknownNameError

ConfigType = TypeVar("ConfigType")


@dataclass(frozen=True)
class BuildContext:
    """What a part may need to know about the place it is built for.

    Args:
        hidden_size: width of the token representations, `hidden`.
        num_heads: number of query heads, `heads`. Biases are per query head.
        head_dim: width of one query or key head, `head_dim`.
        rotary_dim: how many leading dimensions of a head the architecture itself rotates, or `None` where
            it rotates none. A rotation whose own width is left open takes this one, else `head_dim`.
        causal: whether queries see only keys at or before their own position.
        max_positions: the length the stock model was built for, or `None` where it has no such limit.
        initializer_range: standard deviation for newly created tables (BERT, arXiv:1810.04805: 0.02).
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    rotary_dim: int | None = None
    causal: bool = True
    max_positions: int | None = None
    initializer_range: float = 0.02


@dataclass(frozen=True)
class Positions:
    """Where the tokens of one forward call stand.

    Args:
        ids: `(batch or 1, query_len)` int64. The first real token of a sequence has position 0; padding
            tokens may carry any negative value.
        lengths: `(batch or 1, 1)` int64, the number of real tokens of each sequence, cached ones included.
    """

    ids: Tensor
    lengths: Tensor


class Part(nn.Module):
    """Common to all parts: what a cache may assume, and how native weights are taken over."""

    #: True where the encoding of a token depends on how long the sequence has become since. Such a part
    #: cannot extend a cache unless `check_cache` says that the cached tokens are still right.
    length_dependent: bool = False

    def check_cache(self, cached_length: int, total_length: int) -> None:
        """Refuses to extend a cache of `cached_length` tokens to `total_length` if that would be wrong.

        Raises:
            UnsupportedError: where tokens computed at `cached_length` are no longer right at `total_length`.
        """

    def adopt(self, native: Tensor) -> bool:
        """Takes over the weight of the stock mechanism this part replaces; returns whether it could."""
        return False


class AdditiveEncoding(Part):
    """Positions -> vectors added to the token representations."""

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, query_len, hidden)` in float32, or in the dtype of the learned table."""
        raise NotImplementedError


class QueryKeyMap(Part):
    """A linear map of queries and keys that depends on their own position only."""

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Everything that depends on positions but not on q or k; computed once per forward for all layers.

        Returns float32 tensors, `(batch or 1, query_len, ...)`.
        """
        raise NotImplementedError

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`query` is `(batch, heads, query_len, head_dim)`; the result has the same shape and dtype."""
        raise NotImplementedError

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`key` is `(batch, key_value_heads, query_len, head_dim)`; the result has the same shape and dtype."""
        raise NotImplementedError


class LogitBias(Part):
    """A number added to every attention logit, as a function of distance."""

    def forward(self, distance: Tensor) -> Tensor:
        """`distance` is key position minus query position, int64 of any shape (negative: in the past).

        Returns `(heads, *distance.shape)` in float32.
        """
        raise NotImplementedError


@dataclass
class SchemeParts:
    """The parts a config was built into; `None` stands for "this scheme does not act there"."""

    additive: AdditiveEncoding | None = None
    query_key_map: QueryKeyMap | None = None
    logit_bias: LogitBias | None = None

    def __iter__(self) -> Any:
        return (part for part in (self.additive, self.query_key_map, self.logit_bias) if part is not None)


@dataclass(frozen=True)
class SchemeConfig:
    """The options of a scheme. Frozen, hashable, validated on construction, and a round trip through JSON."""

    #: The scheme's name in the field, lower case.
    name: ClassVar[str] = ""
    #: Whether every layer owns its own copy of a `LogitBias` or `QueryKeyMap` instead of sharing one.
    per_layer: ClassVar[bool] = False
    #: Whether it arranges other schemes instead of being one; such names are not listed.
    combinator: ClassVar[bool] = False

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds the parts for one place in a model.

        Raises:
            ValueError: if an option cannot hold at this place (for example an odd rotary width).
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: `{"scheme": name, **options}`; nested configs carry their own type."""
        return {"scheme": self.name} | {
            field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Builds the config from a dictionary of options, as `to_dict` wrote it or as a user typed it.

        Raises:
            UnknownNameError: for an option this scheme does not have.
            ValueError: for a value out of range.
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

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: `{"type": type, **options}`."""
        return {"type": self.type} | {
            field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    @staticmethod
    def from_dict(entry: dict[str, Any]) -> SubConfig:
        """Builds the sub-config whose `type` the dictionary names.

        Raises:
            UnknownNameError: for an unknown type or option.
        """
        options = dict(entry)
        kind = str(options.pop("type"))
        if kind not in SubConfig._types:
            raise UnknownNameError("type of sub-config", kind, SubConfig._types)
        return _construct(SubConfig._types[kind], repr(kind), options)


def _construct(cls: builtins.type[ConfigType], owner: str, options: dict[str, Any]) -> ConfigType:
    """Calls a config's constructor after checking the names of its options."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for option in options:
        if option not in fields:
            raise UnknownNameError(f"option of {owner}", option, fields)
    required = [name for name, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in options]
    if missing:
        raise ValueError(
            f"{owner[0].upper()}{owner[1:]} needs the option{'s'[: len(missing) - 1]} {', '.join(missing)}."
        )
    return cls(**{option: _decode(value) for option, value in options.items()})


def _encode(value: Any) -> Any:
    if isinstance(value, SchemeConfig | SubConfig):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and "scheme" in value:
        from hf_posenc.schemes.registry import scheme_from_dict

        return scheme_from_dict(value)
    if isinstance(value, dict) and "type" in value:
        return SubConfig.from_dict(value)
    if isinstance(value, tuple | list):
        return tuple(_decode(item) for item in value)
    return value


def integer_range(start: int, length: int, device: torch.device | str | None = None) -> Tensor:
    """`(1, length)` int64: `start, start + 1, ...`."""
    return torch.arange(start, start + length, device=device).unsqueeze(0)
