"""The form of a declaration, and the registry of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_posenc.extensions import import_named_modules
from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.find.sites import FixedTable, FoundAttention, Stack
    from hf_posenc.patching.place.journal import Journal

#: Puts a native mechanism out of action on one stack, through the journal that undoes it.
Silencer = Callable[["Stack", "Journal"], None]


@dataclass(frozen=True)
class Architecture:
    """What is special about one `config.model_type`.

    Args:
        unsupported: why no scheme can be placed, or `None`. A function of the config where it depends on it.
        attention_classes: class names of its self-attention modules, where they cannot be recognised.
        tables: paths below the stack of its position tables, where their names do not show what they are.
        causal: whether its attention is causal, where neither its modules nor its config say so. A function of the
            config where it depends on it.
        table_is_rotary: its position table feeds a rotation, so it is no additive table.
        rotary_method: attention method that rotates `(phases, query, key)`, instead of a global function.
        pairing: which dimensions `rotary_method` pairs, "half" or "interleaved".
        mechanism: name of what `bias_arguments` and `silence` put out of action, for the report.
        head_shape: `(attention module, config) -> (num_heads, head_dim)`, where attribute names do not say.
        key_value_heads: `(attention module) -> num_key_value_heads` of the keys it multiplies with queries, where
            attribute names do not say.
        time_major: hidden states are `(time, batch, hidden)`.
        channels_first: its attention layers get `(batch, hidden, time)`.
        bias_arguments: arguments of its attention forward that carry a native bias; they are replaced by zeros.
        silence: silences native mechanisms that are none of these.
        native: the scheme those mechanisms amount to, `(stack) -> config`, or `None` where discovery suffices.
        fixed_tables: tables that `native` describes: all rows have to be sines and cosines of their number (base 10000,
            sines first).
        bias_table: the native `(buckets, heads)` table of relative biases that a layer uses, or `None`.
        kept: native position-dependent behaviour that stays whatever the scheme, for the report.
        fixed_length: why it takes no sequence past its native length, whatever the scheme; `None` where it does.
    """

    unsupported: str | Callable[[Any], str | None] | None = None
    attention_classes: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    causal: bool | Callable[[Any], bool] | None = None
    table_is_rotary: bool = False
    rotary_method: str | None = None
    pairing: str | None = None
    mechanism: str | None = None
    head_shape: Callable[[nn.Module, Any], tuple[int, int]] | None = None
    key_value_heads: Callable[[nn.Module], int] | None = None
    time_major: bool = False
    channels_first: bool = False
    bias_arguments: tuple[str, ...] = ()
    silence: Silencer | None = None
    native: Callable[[Stack], SchemeConfig | None] | None = None
    fixed_tables: Callable[[Stack], list[FixedTable]] | None = None
    bias_table: Callable[[Stack, FoundAttention], Tensor | None] | None = None
    kept: tuple[str, ...] = field(default_factory=tuple)
    fixed_length: str | None = None

    def native_bias_table(self, stack: Stack, attention: FoundAttention) -> Tensor | None:
        """The native table of relative biases behind one layer, or `None`."""
        return None if self.bias_table is None else self.bias_table(stack, attention)

    def refusal(self, config: Any) -> str | None:
        """Why this config is refused, or `None`."""
        return self.unsupported(config) if callable(self.unsupported) else self.unsupported


_ARCHITECTURES: dict[str, Architecture] = {}
_ORDINARY = Architecture()


def register_architecture(*model_types: str, architecture: Architecture) -> None:
    """Declares what is special about one or more architectures; a later declaration replaces an earlier one.

    Raises:
        ValueError: without a model type.
    """
    if not model_types or not all(isinstance(name, str) and name for name in model_types):
        raise ValueError("register_architecture needs the `model_type` of the architecture's config, e.g. 'bloom'.")
    for model_type in model_types:
        _ARCHITECTURES[model_type] = architecture


def architecture_of(config: Any) -> Architecture:
    """The declaration for a config; the empty one for everything ordinary."""
    import_named_modules()
    return _ARCHITECTURES.get(getattr(config, "model_type", ""), _ORDINARY)
