"""The parts of a scheme in one stack of a model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.layer_context import build_context, execution_device, with_layout
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.schemes import LayeredConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.needs import Environment, Need, needs_of
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    SchemeParts,
)
from hf_posenc.schemes.refusals import (
    CAPPED_LOGITS,
    CONTEXT_PARALLELISM,
    ENGINES,
    GROWING_CACHE,
    LATENT_ATTENTION,
    SHARED_KEYS,
)

_KINDS: dict[str, tuple[type, ...]] = {
    "additive": (AdditiveEncoding,),
    "query_key_map": (QueryKeyMap,),
    "logit_bias": (DistanceBias, PairwiseBias),
    "logit_scale": (LogitScale,),
}


class UnfilledTable(NamedTuple):
    """A table of a scheme that keeps random rows: how many, of how many, and of how many the native table has; and
    whether the native table was taken over at all.
    """

    random: int
    rows: int
    native_rows: int
    taken: bool


class StackEncoding(nn.Module):
    """The parts of a scheme in one stack. A part that several layers share is stored once.

    Args:
        config: the scheme, or a schedule of schemes.
        stack: the stack in which it is placed.
        device: device on which parts are built; `None` for torch's default device.

    Raises:
        UnsupportedError: if the layers of a schedule add different encodings to the embeddings.
    """

    def __init__(
        self,
        config: SchemeConfig,
        stack: Stack,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        #: The part of the model that the stack belongs to.
        self.part = stack.part
        self.runtime = StackRuntime(config, stack)
        self.groups = nn.ModuleList()
        self.additive: AdditiveEncoding | None = None
        self.layers: list[LayerEncoding] = []
        #: The native weights that parts took over when they were first placed; `None` before that.
        self.adopted: list[str] | None = None
        #: What native tables did not fill of the tables that could have taken them over.
        self.unfilled: list[UnfilledTable] = []
        self._built: dict[Hashable, SchemeParts] = {}
        self._build(config, stack)

    def _build(self, config: SchemeConfig, stack: Stack) -> None:
        additive_layers: dict[SchemeConfig, AdditiveEncoding | None] = {}
        for attention in stack.attentions:
            layer_config = config
            if isinstance(config, LayeredConfig):
                layer_config = config.for_layer(attention.layer, attention.layer_type)
            context = build_context(stack, attention)
            layer_config = with_layout(layer_config, stack, attention)
            parts = self._parts(layer_config, context, attention.path)
            for environment in _environments(stack, attention.module):
                layer = f"layer {attention.layer} ({type(attention.module).__name__})"
                environment.refuse(needs_of(parts), f"the scheme {scheme_label(layer_config)!r} in {layer}")
            stack.layout.check_parts(layer_config, parts)
            additive_layers.setdefault(layer_config, parts.additive)
            self.layers.append(
                LayerEncoding(
                    query_key_map=parts.query_key_map,
                    logit_bias=parts.logit_bias,
                    logit_scale=parts.logit_scale,
                    causal=attention.causal,
                    num_heads=attention.num_heads,
                    num_key_value_heads=attention.num_key_value_heads,
                    head_dim=attention.head_dim,
                    num_cached_heads=attention.num_cached_heads,
                )
            )
        self._built.clear()
        self.additive = _one_additive(additive_layers)
        self._check_shared_keys(stack)
        needs = self.needs()
        self.runtime.split_problem = CONTEXT_PARALLELISM.problem(needs)
        cache_problem = _cache_problem(self.acting_parts())
        #: By the name of an environment, why it cannot run these parts, as a clause about the scheme; empty if it can.
        self.problems = {engine.name: engine.problem(needs) or cache_problem for engine in ENGINES}
        self.problems[GROWING_CACHE.name] = GROWING_CACHE.problem(needs)
        self.runtime.reads_coordinates = any(getattr(module, "reads_coordinates", False) for module in self.modules())

    def acting_parts(self) -> Iterator[Part]:
        """The parts that are in use. A part that several layers share appears once for each."""
        if self.additive is not None:
            yield self.additive
        for layer in self.layers:
            yield from layer.parts

    def needs(self) -> dict[Need, Part]:
        """What the parts in use need."""
        places = {tuple(map(id, layer.parts)): layer.parts for layer in self.layers}
        needs = needs_of([] if self.additive is None else [self.additive])
        for parts in places.values():
            needs = needs_of(parts) | needs
        return needs

    def _parts(self, config: SchemeConfig, context: BuildContext, path: str, side: str = "") -> SchemeParts:
        """The parts at one layer: those of an earlier layer, unless the scheme has separate parts in every layer.

        In a composed scheme each scheme is shared separately and named in the state dict; their sum is not. The two
        sides of a blend share nothing, even if they hold the same scheme.
        """
        key = (config, context, path if config.per_layer else None, side)
        if key in self._built:
            return self._built[key]
        if config.merges_children:
            sides = {place: side if config.shares_children else f"{side}.{place}" for place in config.children()}
            children = config.children().items()
            parts = config.merge([self._parts(child, context, path, sides[place]) for place, child in children])
        else:
            with contextlib.nullcontext() if self._device is None else self._device:
                parts = config.build(context)
                _check_parts(config, parts)
            in_layers = [part for part in parts if part is not parts.additive]
            if in_layers:
                self.groups.append(nn.ModuleList(in_layers))
        self._built[key] = parts
        return parts

    def _check_shared_keys(self, stack: Stack) -> None:
        """Refuses a layer that reads keys which an earlier layer has mapped in another way."""
        owners: dict[str | None, tuple[int, Any]] = {}
        for attention, layer in zip(stack.attentions, self.layers, strict=True):
            mapped = (layer.query_key_map, layer.rotation_before_cache)
            if not _reads_earlier_keys(attention.module):
                owners[attention.layer_type] = (attention.layer, mapped)
                continue
            source, found = owners.get(attention.layer_type, (None, mapped))
            if found != mapped:
                raise UnsupportedError(
                    f"Layer {attention.layer} reads the keys of layer {source}, so both need the same rotation, but "
                    "the schedule gives them different ones. Give both the same rotation, or choose layers whose keys "
                    "no other layer reads."
                )

    def follow_layers(self, stack: Stack) -> None:
        """Moves every part to the device of the first layer that uses it."""
        for attention, layer in reversed(list(zip(stack.attentions, self.layers, strict=True))):
            for part in layer.parts:
                if next(part.parameters(), None) is not None:
                    part.to(execution_device(attention.module))

    def adopt(self, stack: Stack) -> list[str]:
        """Copies native weights into parts that can use them; returns what was adopted."""
        adopted = []
        vectors = None if self.additive is None else stack.layout.native_vectors(stack, self.additive)
        if self.additive is not None and vectors is not None:
            table, path = vectors
            if table.device.type != "meta" and self._takes_over(self.additive, table):
                adopted.append(f"additive: {path}")
        for index, (attention, layer) in enumerate(zip(stack.attentions, self.layers, strict=True)):
            native = stack.layout.native_bias(stack, attention)
            if layer.logit_bias is None or native is None or native.device.type == "meta":
                continue
            # The other layers copy the same numbers into a part that they share.
            first = all(layer.logit_bias is not other.logit_bias for other in self.layers[:index])
            if self._takes_over(layer.logit_bias, native) if first else layer.logit_bias.adopt(native):
                adopted.append(f"logit_bias: {attention.path}")
        return adopted

    def _takes_over(self, part: Part, native: Tensor) -> bool:
        """Whether a part copies a native table; notes the rows that keep their random numbers."""
        before = {name: weight.detach().clone() for name, weight in part.named_parameters()}
        taken = bool(part.adopt(native))
        for name, weight in part.named_parameters():
            rows = (weight.detach() == before[name]).all(-1) if weight.ndim else weight.new_zeros(())
            # Tables of another kind, such as that of DeBERTa for T5's buckets, are not expected to fit.
            same_kind = weight.shape[-1:] == native.shape[-1:] and native.ndim - weight.ndim in (0, 1)
            unfilled = UnfilledTable(int(rows.sum()), rows.numel(), math.prod(native.shape[:-1]), taken)
            if same_kind and unfilled.random and type(part).adopt is not Part.adopt and unfilled not in self.unfilled:
                self.unfilled.append(unfilled)
        return taken


def _cache_problem(parts: Iterable[Part]) -> str:
    """Why a growing cache cannot hold what the parts need, as a clause; empty if it can."""
    for part in parts:
        try:
            part.check_cache(1, 2)
        except UnsupportedError as error:
            return str(error).rstrip(".")
    return ""


def _one_additive(found: dict[SchemeConfig, AdditiveEncoding | None]) -> AdditiveEncoding | None:
    if len(found) <= 1:
        return next(iter(found.values()), None)
    additives = [part for part in found.values() if part is not None]
    if not additives:
        return None
    raise UnsupportedError(
        "The layers of the schedule add different encodings to the embeddings "
        f"({', '.join(config.name for config in found)}). An additive scheme acts once, before the first layer, so it "
        "has to be the same in every layer. Rotations and biases can differ between layers. To remove the additive "
        "scheme everywhere, pass elsewhere='none'. To keep it, compose it with the scheme of every layer."
    )


def _check_parts(config: SchemeConfig, parts: Any) -> None:
    """Refuses with a `TypeError` what is not `SchemeParts` with parts of the right types."""
    owner = f"{type(config).__name__}.build"
    if not isinstance(parts, SchemeParts):
        raise TypeError(f"{owner} returned {type(parts).__name__}; expected SchemeParts(...).")
    for name, kinds in _KINDS.items():
        part = getattr(parts, name)
        if part is not None and not isinstance(part, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{owner} returned a {type(part).__name__} as {name}; expected a subclass of {expected}.")
    if isinstance(parts.logit_bias, DistanceBias):
        _check_bias(parts.logit_bias)


@torch.no_grad()
def _check_bias(bias: DistanceBias) -> None:
    """Refuses a bias that does not return `(heads, *distance.shape)`, by three distances.

    Without numbers (a model that is built on the meta device) nothing is computed.
    """
    distance = torch.arange(-2, 1)
    if any(one.is_meta for one in (distance, *bias.parameters(), *bias.buffers())):
        return
    found = tuple(bias(distance).shape)
    if len(found) != 2 or found[1:] != distance.shape:
        raise ValueError(
            f"{type(bias).__name__}.forward returned the shape {found} for distances of the shape "
            f"{tuple(distance.shape)}; expected (heads, {len(distance)}), one value per head and distance."
        )


def _environments(stack: Stack, module: nn.Module) -> Iterator[Environment]:
    """What limits the parts of a scheme in one attention module."""
    if stack.architecture.limits is not None:
        yield stack.architecture.limits
    if hasattr(module, "kv_lora_rank"):
        yield LATENT_ATTENTION
    if getattr(module, "attn_logit_softcapping", None):
        yield CAPPED_LOGITS
    if _reads_earlier_keys(module):
        yield SHARED_KEYS


def _reads_earlier_keys(module: nn.Module) -> bool:
    """Whether a layer reads the keys of an earlier layer, already mapped by its scheme (Gemma 3n and 4)."""
    return bool(getattr(module, "is_kv_shared_layer", False))
