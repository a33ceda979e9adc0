"""The class of declarations, their registry, and what silencers put in place of a native mechanism."""

from __future__ import annotations

import functools
import importlib
import operator
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf_posenc.errors import UnsupportedError
from hf_posenc.extensions import MODULES, import_named_modules
from hf_posenc.patching.forwards import OtherForward, zero_output
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.needs import Environment

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Stack
    from hf_posenc.patching.anatomy.sites import AttentionLayer, FixedTable
    from hf_posenc.patching.place.record import Journal

#: Disables a native mechanism of one stack. All changes are made through the journal, which can undo them.
Silencer = Callable[["Stack", "Journal"], None]


@dataclass(frozen=True)
class Architecture:
    """The special properties of one `config.model_type`.

    Args:
        unsupported: why no scheme can be placed, or `None`. May be a function of the config.
        attention_classes: class names of its self-attention modules, if they cannot be recognised.
        sparse: class names of self-attention modules that never compute the logits of all pairs of tokens. No scheme
            acts in them, so their stack takes only what is added to embeddings. May be a function of the config.
        left_alone: path of attention below the stack that keeps its native positions, as a regular expression, and why.
        tables: paths of its position tables below the stack, if they cannot be recognised by name.
        rows_before: number of rows of these tables before that of the first token, if the tables do not show it.
        causal: whether its attention is causal, if neither its modules nor its config show it. May be a function of the
            config.
        table_is_rotary: whether its position table holds rotary phases, and is therefore not an additive table.
        rotary_method: attention method that rotates `(phases, query, key)`, instead of a global function.
        pairing: which dimensions `rotary_method` pairs, "half" or "interleaved".
        mechanism: name of the mechanism that `bias_arguments` and `silence` disable, for the report.
        head_shape: `(attention module, config) -> (num_heads, head_dim)`, if attribute names do not show it.
        key_value_heads: `(attention module) -> num_key_value_heads` of the keys it multiplies with queries, if
            attribute names do not show it.
        time_major: whether hidden states are `(time, batch, hidden)`.
        channels_first: whether its attention layers receive `(batch, hidden, time)`.
        bias_arguments: arguments of its attention forward that carry a native bias; they are replaced by zeros.
        keeps_bias: whether the `position_bias` that its attention passes to an attention function is kept, because it
            does not contain the mechanism that a scheme replaces.
        silence: disables native mechanisms that the fields above do not cover.
        native: the scheme that is equivalent to those mechanisms, `(stack) -> config`; `None` if discovery finds it.
        fixed_tables: tables that `native` describes. Row p must hold the sines, then the cosines of p (base 10000).
        bias_table: the native table of relative biases that a layer uses, in the shape that the part of the native
            scheme adopts: `(buckets, heads)` for T5; or `None`.
        logit_terms: `(attention module) -> number` of products for which the factor of its logits is made, such as 3
            for `1 / sqrt(3 head_dim)`; `None` for 1.
        operand_factors: `(attention module) -> (factor of queries, factor of keys)` with which the module multiplies
            them before it calls the attention function; `None` if it does not, or only with its own `scaling`.
        kept: native position-dependent behaviour that remains active under every scheme, for the report.
        suffix_tokens: number of tokens without a place on the grid that follow the patches of an image. May be a
            function of the config.
        limits: what its attention layers, or others that read their cache, cannot do; `None` if there is no limit.
        example_inputs: `(stack or model, tokens) -> arguments` of its forward for a short run, if tokens, an image or
            features of the usual shape are not enough. Text has that number of tokens; images and sound have their own.
    """

    unsupported: str | Callable[[Any], str | None] | None = None
    attention_classes: tuple[str, ...] = ()
    sparse: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = ()
    left_alone: tuple[str, str] | None = None
    tables: tuple[str, ...] = ()
    rows_before: int = 0
    causal: bool | Callable[[Any], bool] | None = None
    table_is_rotary: bool = False
    rotary_method: str | None = None
    pairing: str | None = None
    mechanism: str | None = None
    head_shape: Callable[[Any, Any], tuple[int, int]] | None = None
    key_value_heads: Callable[[Any], int] | None = None
    time_major: bool = False
    channels_first: bool = False
    bias_arguments: tuple[str, ...] = ()
    keeps_bias: bool = False
    silence: Silencer | None = None
    native: Callable[[Stack], SchemeConfig | None] | None = None
    fixed_tables: Callable[[Stack], list[FixedTable]] | None = None
    bias_table: Callable[[Stack, AttentionLayer], Tensor | None] | None = None
    logit_terms: Callable[[nn.Module], int] | None = None
    operand_factors: Callable[[Any], tuple[float, float]] | None = None
    kept: tuple[str, ...] = field(default_factory=tuple)
    suffix_tokens: int | Callable[[Any], int] = 0
    limits: Environment | None = None
    example_inputs: Callable[[Any, int], dict[str, Any]] | None = None

    def refuse(self, model: Any) -> None:
        """Refuses a model, or a stack, that is declared as unsupported."""
        refusal = self.unsupported(model.config) if callable(self.unsupported) else self.unsupported
        if refusal:
            raise UnsupportedError(f"{type(model).__name__} ({model.config.model_type}) cannot be patched: {refusal}")

    def is_sparse(self, attention: nn.Module, config: Any) -> bool:
        """Whether a self-attention module of a stack with this config never computes all logits."""
        return type(attention).__name__ in (self.sparse(config) if callable(self.sparse) else self.sparse)


def refused_if(applies: Callable[[Any], bool], reason: str) -> Callable[[Any], str | None]:
    """Returns an `unsupported` function for an architecture that is refused with some configs."""
    return lambda config: reason if applies(config) else None


def undescribed(what: str, them: str = "it", by: str = "Any scheme") -> UnsupportedError:
    """The error for a native mechanism that no scheme describes."""
    restored = "it" if them == "it" else "them"
    return UnsupportedError(f"{what} {by} can replace {them}, and unpatch_model restores {restored}.")


def no_native(
    what: str, them: str = "it", *, if_set: str = "", by: str = "Any scheme"
) -> Callable[[Stack], SchemeConfig | None]:
    """Returns a `native` function for a mechanism that no scheme describes, active if `if_set` is set or empty."""

    def native(stack: Stack) -> SchemeConfig | None:
        if if_set and not operator.attrgetter(if_set)(stack.module):
            return None
        raise undescribed(what, them, by)

    return native


def silencer(*unused: str, of: str | None = None, **instead: Any) -> Silencer:
    """Returns a `silence` function for mechanisms that are methods or settings of modules.

    Args:
        *unused: weights and submodules that only the mechanism uses. They are frozen.
        of: path of the module below the stack; by default every self-attention module.
        **instead: by name, what replaces a setting, or a function of the module and the arguments of a method.
    """

    def silence(stack: Stack, patches: Journal) -> None:
        attentions = (attention.module for attention in stack.attentions)
        for module in attentions if of is None else [stack.module.get_submodule(of)]:
            for name, substitute in instead.items():
                if name == "forward":  # Other tools may wrap it.
                    patches.set_forward(module, OtherForward(module, substitute))
                else:
                    value = functools.partial(substitute, module) if callable(substitute) else substitute
                    patches.replace(module, name, value)
            patches.freeze(module, *unused)

    return silence


def silenced_children(*paths: str) -> Silencer:
    """Returns a `silence` function for modules below self-attention modules: they return zeros and are frozen."""

    def silence(stack: Stack, patches: Journal) -> None:
        for attention in stack.attentions:
            below = dict(attention.module.named_modules())
            for module in (below[path] for path in paths if path in below):
                patches.set_forward(module, OtherForward(module, zero_output))
                patches.freeze_all(module)

    return silence


_ARCHITECTURES: dict[str, Architecture] = {}
#: Those of transformers' own architectures.
STOCK: dict[str, Architecture] = {}
_ORDINARY = Architecture()


def register_architecture(*model_types: str, architecture: Architecture) -> None:
    """Declares the special properties of one or more architectures, replacing any earlier declaration.

    Raises:
        ValueError: if no model type is given.
    """
    if not model_types or not all(isinstance(name, str) and name for name in model_types):
        raise ValueError("register_architecture needs the `model_type` of the architecture's config, e.g. 'bloom'.")
    for model_type in model_types:
        _ARCHITECTURES[model_type] = architecture


def architecture_of(module: Any) -> Architecture:
    """The declaration for a model or a part of it; an empty one if its architecture needs none."""
    if MODULES in os.environ:
        import_named_modules()
    model_type = getattr(module.config, "model_type", "")
    architecture = _ARCHITECTURES.get(model_type, _ORDINARY)
    of_transformers = architecture is not _ORDINARY and STOCK.get(model_type) is architecture
    return _ORDINARY if of_transformers and not has_stock_code(module) else architecture


def has_stock_code(module: nn.Module) -> bool:
    """Whether a model, or a model inside it, is that of transformers for its `model_type`, or a copy of it.

    Code of other packages may have the same `model_type`. In a copy of the file, classes have the same names.
    """
    config: Any = module.config
    inside = (each for each in module.modules() if getattr(each, "config", None) is config)
    if any(base.__module__.startswith("transformers.models.") for each in inside for base in type(each).__mro__):
        return True
    folder = model_type_to_module_name(config.model_type)
    with suppress(ModuleNotFoundError):
        code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        return hasattr(code, type(module).__name__)
    return False


def zero_bias(*args: Any, **kwargs: Any) -> Tensor:
    """Replaces a method that computes a bias: a zero `(1, 1, 1, 1)` on the device of the first tensor of a call."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else kwargs.get("device")
    dtype = tensors[0].dtype if tensors and tensors[0].is_floating_point() else torch.get_default_dtype()
    return torch.zeros(1, 1, 1, 1, device=device, dtype=kwargs.get("dtype", dtype))


def zero_bias_of(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for the forward of a module whose output is a bias: a zero `(1, 1, 1, 1)`, which fits any scores."""
    weight = next(module.parameters())
    return torch.zeros(1, 1, 1, 1, dtype=weight.dtype, device=weight.device)


def no_bias(*args: Any, **kwargs: Any) -> None:
    """Replaces a method whose result is added to the scores only if it is not `None`."""


def no_vectors(module: nn.Module, inputs: Tensor, *args: Any) -> Tensor:
    """Replaces the forward of a module that makes vectors for embeddings or positions: a zero `()` of their dtype."""
    return inputs.new_zeros(())


def zero_phases(table: nn.Embedding, shape: torch.Size, cached: int = 0, position_ids: Any = None) -> Tensor:
    """Replaces the forward of a table of rotary phases: zeros `(length, width)` for tokens `(batch, length)`."""
    length = shape[1] if position_ids is None else position_ids.shape[-1]
    return table.weight.new_zeros(length, table.embedding_dim)


def zero_relative_shift(module: nn.Module, scores: Tensor, klen: int = -1) -> Tensor:
    """Replaces XLNet's `rel_shift_bnij`: the position term of the scores is zeros `(batch, heads, query_len, klen)`."""
    return scores.new_zeros(*scores.shape[:3], klen)
