"""The module that holds a scheme in a model: its config, its parts in every stack, and how it is found in a model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.entry import MARK, read_entry
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.discovery import build_context, with_layout
from hf_posenc.patching.anatomy.sites import AddedModule, AttentionLayer
from hf_posenc.patching.anatomy.weights import computed_buffers, execution_device
from hf_posenc.patching.call.attention_site import is_attention_site
from hf_posenc.patching.call.parallel import HeadShard
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.place.cross_layers import cross_parts
from hf_posenc.patching.place.record import NOT_STRICT, SchemeRecord, disagreement, mark_of, marked_scheme, placed_mark
from hf_posenc.preserve import evaluation_mode
from hf_posenc.schemes import refusals
from hf_posenc.schemes.config import BuildContext, SchemeConfig, check_parts, walk
from hf_posenc.schemes.needs import Environment, Need, generation_problems, needs_of
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    Reach,
    SchemeParts,
    feature_counts,
    shortest,
)
from hf_posenc.schemes.rotary.contextual import rotation_before_cache

if TYPE_CHECKING:
    from hf_posenc.patching.place.install import PatchReport, UnfilledTable
    from hf_posenc.patching.place.lengths import Lengths


@dataclass
class LayerEncoding:
    """The parts of a scheme at one attention layer.

    Args:
        query_key_map: applied to queries and keys, or `None`.
        logit_bias: added to the logits, or `None`.
        logit_scale: multiplied with the logits, or `None`.
        causal: whether the layer's queries see only keys at or before them.
        num_heads: number of query heads.
        num_key_value_heads: number of key heads.
        head_dim: width of the heads the scores are computed from.
        num_cached_heads: number of key heads that the layer caches; `None` for all of them.
        shard: the heads of this process, if several processes share the layer (tensor parallelism).
        kind: equal for layers of a stack whose parts differ only in their weights; `None` if it is unknown.
    """

    query_key_map: QueryKeyMap | None
    logit_bias: LogitBias | None
    logit_scale: LogitScale | None
    causal: bool
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    num_cached_heads: int | None = None
    shard: HeadShard | None = None
    kind: int | None = None

    @classmethod
    def of(cls, parts: SchemeParts, attention: AttentionLayer, kind: int | None = None) -> LayerEncoding:
        """The parts at a layer."""
        shape = (attention.num_heads, attention.num_key_value_heads, attention.head_dim, attention.num_cached_heads)
        return cls(parts.query_key_map, parts.logit_bias, parts.logit_scale, attention.causal, *shape, kind=kind)

    def exchange(self, **fields: Any) -> None:
        """Sets fields by name and derives everything that depends on them again."""
        self.__dict__.update(fields)
        self.__post_init__()

    def __post_init__(self) -> None:
        # Computed once, because every layer reads these in every call.
        bias, parts = self.logit_bias, (self.query_key_map, self.logit_bias, self.logit_scale)
        #: The parts that are not `None`.
        self.parts: list[Part] = [part for part in parts if part is not None]
        #: Those that are computed together with parts of other layers. A subclass may compute something else.
        self.joined = {part for part in self.parts if "of_layers" in vars(type(part))}
        pairwise = bias if isinstance(bias, PairwiseBias) else None
        by_head, shared = (0, 0) if pairwise is None else feature_counts(pairwise)
        #: Number of heads for which the bias caches features next to the keys.
        self.feature_heads = self.num_key_value_heads if shared else self.num_heads
        groups = self.num_heads // self.num_key_value_heads if shared else 1
        #: Number of features per token of each of these heads.
        self.num_features = groups * by_head + shared
        #: The bias of queries at positions below this is 0.
        self.zero_below = 0 if pairwise is None else pairwise.zero_below
        #: Whether the scheme changes keys, or caches something next to them.
        self.has_keys = self.num_features > 0 or self.query_key_map is not None
        #: Whether the bias combines features of neighbouring tokens.
        self.needs_oldest_keys = pairwise is not None and pairwise.needs_oldest_keys
        #: The biases whose sum the bias is. Some may be rotations of heads by the layer's input.
        summands = self.summands = () if bias is None else tuple(bias.summands())
        kinds = [summand.rotates_heads for summand in summands]
        whole = self.num_cached_heads in (None, self.num_key_value_heads)
        #: Whether the bias rotates heads by the layer's input, and whether it does nothing else.
        self.rotates_by_input, self.only_rotates_by_input = any(kinds), any(kinds) and all(kinds)
        #: The rotation that can be applied to keys before they are cached.
        self.rotation_before_cache = rotation_before_cache(summands) if whole and any(kinds) else None
        #: Whether the map makes queries and keys wider.
        self.widens_heads = self.query_key_map is not None and self.query_key_map.width_factor != 1
        rotates = self.logit_scale is None and not self.widens_heads
        again = self.query_key_map is not None and self.query_key_map.mapped_again
        by_distance = all(isinstance(summand, DistanceBias) for summand in summands)
        #: Whether the logits change by the same bias in every layer with these parts.
        self.repeats_bias = bool(summands) and by_distance and rotates and not again
        #: A value that is equal for layers with the same parts and heads.
        self.identity = (bias, self.causal, self.num_heads, self.num_key_value_heads, self.head_dim, self.shard)
        scale, hides = self.logit_scale, pairwise is not None and pairwise.hides_pairs
        scales = scale is not None and (scale.factor_of_all is None or hides)
        special = scales or self.widens_heads or again or self.zero_below or self.rotates_by_input or self.shard
        #: Whether layers of the kind only have to compute the rows of their bias.
        self.differs_in_rows = self.kind is not None and len(summands) == 1 and not special
        #: Whether layers of the kind only have to rotate their queries, if keys were rotated before they were cached.
        self.differs_in_rotation = self.only_rotates_by_input and rotates and not (again or self.shard)
        #: A name of the layers that leave their checks to the first of them; `None` if each checks.
        of_kind = self.differs_in_rows or self.differs_in_rotation
        self.checked_with: Hashable = self.kind if of_kind else self.identity if self.repeats_bias else None
        #: Whether the scheme needs no other change than replacing the rotary function.
        self.only_rotates = rotates and bias is None and not again
        #: Like `only_rotates`, where the bias is zero, once a call has shown that the module changes no rotated heads.
        self.only_rotates_near = rotates and again and self.zero_below > 0 and not self.num_features
        #: Whether paged keys (continuous batching) must be read before the attention function is called.
        self.reads_pages = self.widens_heads or bias is not None

    def needs(self) -> dict[Need, Part]:
        """The needs of the parts."""
        return needs_of(self.parts)


class StackEncoding(nn.Module):
    """The parts of a scheme in one stack. A part that several layers share is stored once.

    Args:
        config: the scheme, or a schedule of schemes.
        stack: the stack in which it is placed.
        device: device on which parts are built; `None` for torch's default device.

    Raises:
        UnsupportedError: if the layers of a schedule add different encodings to the embeddings.
    """

    def __init__(self, config: SchemeConfig, stack: Stack, device: torch.device | None = None) -> None:
        super().__init__()
        self._device = device
        #: The part of the model that the stack belongs to.
        self.part = stack.part
        self.runtime = StackRuntime(config, stack)
        self.groups = nn.ModuleList()
        self.additive: AdditiveEncoding | None = None
        self.layers: list[LayerEncoding] = []
        #: The parts in each cross-attention layer; empty if cross-attention is not changed.
        self.cross: dict[str, LayerEncoding] = {}
        #: The native weights that parts took over when they were first placed; `None` before that.
        self.adopted: list[str] | None = None
        #: The tables that could have taken over a native table but still have random rows.
        self.unfilled: list[UnfilledTable] = []
        self._built: dict[Hashable, SchemeParts] = {}
        self._build(config, stack)

    def _build(self, config: SchemeConfig, stack: Stack) -> None:
        additive_layers: dict[SchemeConfig, AdditiveEncoding | None] = {}
        kinds: dict[Hashable, int] = {}
        for attention in stack.attentions:
            context = build_context(stack, attention)
            layer_config = config.for_layer(attention.layer, attention.layer_type)
            layer_config = with_layout(layer_config, stack, attention)
            parts = self._parts(layer_config, context, attention.path)
            for environment in _environments(stack, attention):
                layer = f"layer {attention.layer} ({type(attention.module).__name__})"
                environment.refuse(needs_of(parts), f"the scheme {layer_config.label!r} in {layer}")
            additive_layers.setdefault(layer_config, parts.additive)
            kind = kinds.setdefault((layer_config, context, attention.layer_type), len(kinds))
            self.layers.append(LayerEncoding.of(parts, attention, kind))
        scheme = config.within_and_across()[1]
        if scheme is not None:
            across = cross_parts(scheme, stack, self._parts)
            self.cross = {attention.path: LayerEncoding.of(parts, attention) for attention, parts in across}
            self.runtime.reads_encoder = bool(self.cross)
        self._built.clear()
        self.additive = _one_additive(additive_layers)
        self._check_shared_keys(stack)
        needs = self.needs()
        with evaluation_mode(self):
            self.problems = generation_problems(refusals.ENGINES, refusals.GROWING_CACHE, needs, self.acting_parts())
        self.runtime.split_problem = refusals.CONTEXT_PARALLELISM.problem(needs)
        self.runtime.reads_coordinates = any(getattr(module, "reads_coordinates", False) for module in self.modules())

    def acting_parts(self) -> Iterator[Part]:
        """The parts that are in use. A part that several layers share appears once for each."""
        if self.additive is not None:
            yield self.additive
        for layer in self.layers:
            yield from layer.parts

    def needs(self) -> dict[Need, Part]:
        """The needs of the parts in use."""
        places = {tuple(map(id, layer.parts)): layer.parts for layer in self.layers}
        needs = needs_of([] if self.additive is None else [self.additive])
        for parts in places.values():
            needs = needs_of(parts) | needs
        across = next((part for layer in self.cross.values() for part in layer.parts), None)
        return needs if across is None else needs | {Need.CROSS: across}

    def _parts(self, config: SchemeConfig, context: BuildContext, path: str, side: str = "") -> SchemeParts:
        """The parts at one layer: those of an earlier layer, unless the scheme has separate parts in every layer.

        In a composed scheme each scheme is shared separately and named in the state dict; their sum is not. The two
        sides of a blend share nothing, even if they hold the same scheme.
        """
        key = (config, context, path if config.per_layer else None, side)
        if key in self._built:
            return self._built[key]
        if config.merges_children and type(config).build is SchemeConfig.build:
            sides = {place: side if config.shares_children else f"{side}.{place}" for place in config.children()}
            children = config.children().items()
            parts = config.merge([self._parts(child, context, path, sides[place]) for place, child in children])
        else:
            reasons = [part.causal_only for part in walk(config) if part.causal_only]  # Not every `build` reads it.
            if reasons and not context.causal:
                raise UnsupportedError(reasons[0])
            with contextlib.nullcontext() if self._device is None else self._device:
                parts = config.build(context)
                check_parts(config, parts)
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
            if not attention.reads_earlier_keys:
                owners[attention.layer_type] = (attention.layer, mapped)
                continue
            source, first = owners.get(attention.layer_type, (None, mapped))
            if first != mapped:
                raise UnsupportedError(
                    f"Layer {attention.layer} reads the keys of layer {source}, so both need the same rotation, but "
                    "the schedule gives them different ones. Give both the same rotation, or choose layers whose keys "
                    "no other layer reads."
                )

    def follow_layers(self, stack: Stack) -> None:
        """Moves every part to the device of the first layer that uses it."""
        places = [(attention.module, layer) for attention, layer in zip(stack.attentions, self.layers, strict=True)]
        across = [(stack.module.get_submodule(path), layer) for path, layer in self.cross.items()]
        for module, layer in (*reversed(places), *across):
            for part in layer.parts:
                part.to(execution_device(module))


def _one_additive(added_by: dict[SchemeConfig, AdditiveEncoding | None]) -> AdditiveEncoding | None:
    added = ", ".join(config.name for config, part in added_by.items() if part is not None)
    if len(added_by) > 1 and added:
        raise UnsupportedError(
            f"The layers have different schemes ({', '.join(config.name for config in added_by)}), but {added} adds "
            "vectors to the embeddings, which happens once, before the first layer. To use it, leave out layers=. "
            "Rotations and biases may differ between layers: combine each with the additive scheme (ComposedConfig). "
            "If only the layers outside of layers= have it, pass elsewhere='none'."
        )
    return next(iter(added_by.values()), None)


def _environments(stack: Stack, attention: AttentionLayer) -> Iterator[Environment]:
    """The environments that limit the parts of a scheme in one attention layer."""
    known: Any = (
        (stack.architecture.limits, stack.architecture.limits),
        (attention.sparse, refusals.SPARSE_ATTENTION),
        (hasattr(attention.module, "kv_lora_rank"), refusals.LATENT_ATTENTION),
        (getattr(attention.module, "attn_logit_softcapping", None), refusals.CAPPED_LOGITS),
        (attention.reads_earlier_keys, refusals.SHARED_KEYS),
    )
    yield from (environment for applies, environment in known if applies)


class PositionEncoding(AddedModule):
    """The scheme that `patch_model` has placed in a model, available as `model.position_encoding`.

    Attributes:
        report: what was replaced and what was placed.
        record: what was placed where.
        stacks: the parts, by name of the stack.
    """

    def __init__(self, config: SchemeConfig, stacks: dict[str, StackEncoding]) -> None:
        super().__init__()
        self.record = SchemeRecord(config)
        self.report: PatchReport | None = None
        self.stacks: Mapping[str, StackEncoding] = cast("Any", nn.ModuleDict(stacks))

    @property
    def config(self) -> SchemeConfig:
        """The scheme in force."""
        return self.record.scheme

    @property
    def label(self) -> str:
        """The scheme in messages."""
        return f"the scheme {self.config.label!r}"

    @property
    def lengths(self) -> Lengths | None:
        """The sequence lengths of the model; set while the scheme is in place."""
        return self.record.lengths_by_part.get(None)

    def parts(self, stacks: Collection[str] | None = None) -> list[Part]:
        """The parts in use in some stacks, by default all. A part that contains others is listed in their place."""
        chosen = [stack for name, stack in self.stacks.items() if stacks is None or name in stacks]
        parts = [part for stack in chosen for part in stack.acting_parts()]
        return list({id(part): part for part in parts}.values())

    def needs(self) -> dict[Need, Part]:
        """The needs of the parts in use."""
        return {need: part for stack in self.stacks.values() for need, part in stack.needs().items()}

    def reach(self, stacks: Collection[str] | None = None) -> Reach:
        """The longest sequence that the scheme can encode in some stacks, by default all, and that it was made for."""
        return shortest(part.length_reach for part in self.parts(stacks))

    def weights(self) -> dict[str, Tensor]:
        """What is saved of the scheme: its parameters, and the persistent buffers of custom parts, by name."""
        computed = {id(buffer) for _, _, buffer in computed_buffers(self)}
        weights = (*self.named_parameters(), *self.named_buffers())
        return {name: weight for name, weight in weights if id(weight) not in computed}

    def extra_repr(self) -> str:
        """The scheme, for `print(model)`."""
        return repr(self.config)

    def get_extra_state(self) -> Tensor:
        """The mark of the scheme in force, `(bytes,)`."""
        return mark_of(self.config)

    def set_extra_state(self, state: Any) -> None:
        """Records which scheme the loaded weights name. The scheme in force does not change."""
        if getattr(state, "is_meta", False):
            return  # With FSDP, a process that receives its weights from another one has no mark to load.
        self.__dict__["loaded_mark"] = state

    def loaded_scheme(self) -> dict[str, Any] | None:
        """The scheme named by the weights that were loaded last. `None` without a mark, and on a second call."""
        self.__dict__.pop(MARK, None)  # Transformers sets an attribute for a key that a checkpoint lacks.
        mark = self.__dict__.pop("loaded_mark", None)
        return None if mark is None else marked_scheme(mark)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + MARK
        destination[key] = placed_mark(destination[key], self.__dict__.get("holder", self))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Reports weights of another scheme as mismatched keys, which raises an error if loading is strict.

        torch does not tell a module whether loading is strict: `strict` is always true here.
        """
        super()._load_from_state_dict(state_dict, prefix, *others)
        _, _, missing_keys, unexpected_keys, _ = others
        key, loaded = prefix + MARK, self.loaded_scheme()
        if key in missing_keys:
            missing_keys.remove(key)
        problem = disagreement(loaded, self.config)
        if problem is not None:
            (missing_keys if loaded is None else unexpected_keys).append(f"{key}: {problem}. {NOT_STRICT}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionEncoding:
        """Copies the encoding as a part of its model.

        Raises:
            UnsupportedError: for a copy of the encoding, or of a layer that refers to it, without the model.
        """
        holder = self.__dict__.get("holder")
        if holder is not None and not self.record.is_copied_with(holder, memo):
            raise UnsupportedError(
                "A copy of a position encoding without its model would be trained and saved, but not used. Copy the "
                "whole model. If PEFT makes the copy, name smaller modules in `modules_to_save`, without attention."
            )
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def build_encoding(
    config: SchemeConfig,
    stacks: list[Stack],
    device: torch.device | None = None,
    kept: Mapping[str, StackEncoding] | None = None,
) -> PositionEncoding:
    """Builds the parts of a scheme for every stack.

    Args:
        config: the scheme, or the scheme of each part of the model.
        stacks: the stacks in which it will be placed.
        device: where parts are built; `None` for torch's default device. On the meta device, parameters have names and
            shapes but no memory.
        kept: the parts of another encoding that are used again, by name of the stack.

    Raises:
        RuntimeError: on the meta device, for a third-party scheme that reads its parameters while it is built.
    """
    built = dict(kept or {})
    for stack in stacks:
        if stack.name not in built:
            scheme = config.for_part(stack.part)
            assert scheme is not None
            built[stack.name] = StackEncoding(scheme, stack, device)
    return PositionEncoding(config, {stack.name: built[stack.name] for stack in stacks})


def encodings(model: nn.Module) -> list[PositionEncoding]:
    """Every encoding in a model. There are several if parts of the model were patched separately.

    Raises:
        UnsupportedError: if an encoding was created by another copy of this package.
    """
    kinds = {type(module) for module in model.modules()}
    ours = {kind for kind in kinds if issubclass(kind, PositionEncoding)}
    name, package = f"{PositionEncoding.__module__}.{PositionEncoding.__qualname__}", __name__.partition(".")[0]
    if any(f"{base.__module__}.{base.__qualname__}" == name for kind in kinds - ours for base in kind.__mro__):
        raise UnsupportedError(
            f"This {type(model).__name__} was patched by another copy of {package}: the package has been imported "
            "again in this process, after its modules were removed from sys.modules (test plugins and notebooks do "
            "so). The new copy cannot undo or save the changes of the old one. Load and patch the model again, or "
            f"restart the process, and exclude {package} from reloading."
        )
    return [module for module in model.modules() if isinstance(module, PositionEncoding)] if ours else []


def current_encoding(model: PreTrainedModel) -> PositionEncoding | None:
    """The encoding in force, or `None` for a stock model.

    Raises:
        UnsupportedError: if a part of the model was patched on its own.
    """
    placed = encodings(model)
    for encoding in placed:
        if encoding.__dict__.get("holder") is not model.base_model:
            raise UnsupportedError(
                f"A part of this {type(model).__name__} was patched on its own with {encoding.config.name!r}. Call "
                "unpatch_model on that part first, because a scheme is placed in a whole model."
            )
    return placed[0] if placed else None


def difference(model: PreTrainedModel) -> str:
    """How a model differs from what was placed, or its positions from its config; empty if they agree."""
    entry, placed = read_entry(model.config), encodings(model)
    if placed:
        return next(filter(None, (encoding.record.agrees(model) for encoding in placed)), "")
    if any(map(is_attention_site, model.modules())):
        return (
            "it uses a position encoding that it does not hold itself, because it is a part of a patched model or "
            "shares layers with one. Its files could not be loaded with this encoding. Save or export the model that "
            "was patched, and take the part from it after loading; or unpatch that model first, and patch this one "
            "instead."
        )
    if entry is not None:
        return (
            f"it uses its stock positions, but its config names the scheme {entry['scheme']!r}: it is the config of a "
            "patched model, so a saved copy would be loaded with that scheme. Restore the config it was built with."
        )
    return ""


def refuse_changed(model: PreTrainedModel) -> None:
    """Refuses to save or export a model that was changed after it was patched, or that its config does not describe."""
    problem = difference(model)
    if problem:
        raise UnsupportedError(f"This {type(model).__name__} is not saved or exported: {problem}")


def scheme_in_part(encoding: PositionEncoding | None, part: str) -> SchemeConfig | None:
    """The scheme in force in a part; `None` if the part has its native positions."""
    return None if encoding is None else encoding.config.for_part(part)


def stacks_in_part(encoding: PositionEncoding, part: str) -> dict[str, StackEncoding]:
    """The parts of a scheme in the stacks of a part, by name of the stack."""
    return {name: stack for name, stack in encoding.stacks.items() if stack.part == part}
