"""The module that holds a scheme inside a model: its config, its parts and the report."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_posenc.entry import MARK
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.context_parallel import needs_all_tokens
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.runtime import StackRuntime
from hf_posenc.patching.call.table_site import table_origin, table_weight
from hf_posenc.patching.find.architectures import Architecture
from hf_posenc.patching.find.fingerprint import Sample
from hf_posenc.patching.find.layer_context import build_context, with_layout
from hf_posenc.patching.find.sites import AddedModule, Stack
from hf_posenc.patching.place.journal import Journal
from hf_posenc.patching.place.lengths import Lengths
from hf_posenc.patching.place.mark import NOT_STRICT, disagreement, mark_of, marked_scheme, placed_mark
from hf_posenc.patching.place.report import PatchReport
from hf_posenc.patching.place.suitability import check_parts, refuse_unsuited
from hf_posenc.schemes import LayeredConfig
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import AdditiveEncoding, Part, SchemeParts
from hf_posenc.schemes.reach import Reach, shortest


class StackEncoding(nn.Module):
    """The parts of a scheme in one stack; parts that layers share are held once.

    Args:
        config: the scheme, or a schedule of schemes.
        stack: where it is placed.
        pairing_override: the pairing of the architecture's rotary method, where it has one instead of a function.
        device: where parts are built; `None` for torch's default device.

    Raises:
        UnsupportedError: if the layers of a schedule disagree about what is added to the embeddings.
    """

    def __init__(
        self,
        config: SchemeConfig,
        stack: Stack,
        pairing_override: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        self.runtime = StackRuntime()
        self.groups = nn.ModuleList()
        self.additive: AdditiveEncoding | None = None
        self.layers: list[LayerEncoding] = []
        self._built: dict[Hashable, SchemeParts] = {}
        self._build(config, stack, pairing_override)

    def _build(self, config: SchemeConfig, stack: Stack, pairing_override: str | None) -> None:
        additive_layers: dict[SchemeConfig, AdditiveEncoding | None] = {}
        for attention in stack.attentions:
            layer_config = config
            if isinstance(config, LayeredConfig):
                layer_config = config.for_layer(attention.layer, attention.layer_type)
            context = build_context(stack, attention)
            layer_config = with_layout(layer_config, stack, attention, pairing_override)
            parts = self._parts(layer_config, context, attention.path)
            refuse_unsuited(attention.module, parts)
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
                )
            )
        self._built.clear()
        self.additive = _one_additive(additive_layers)
        self._check_shared_keys(stack)
        self.runtime.needs_all_tokens = needs_all_tokens(self._acting())
        self.runtime.reads_coordinates = any(getattr(module, "reads_coordinates", False) for module in self.modules())

    def _acting(self) -> Iterator[Part]:
        """The parts that act somewhere, once for each layer."""
        if self.additive is not None:
            yield self.additive
        for layer in self.layers:
            yield from (part for part in (layer.query_key_map, layer.logit_bias, layer.logit_scale) if part is not None)

    def _parts(self, config: SchemeConfig, context: BuildContext, path: str, side: str = "") -> SchemeParts:
        """The parts at one layer: those of an earlier one, unless the scheme wants its own in every layer.

        Of schemes that act together each is shared on its own, and is what the state dict names; their sum is not. The
        two sides of a blend share nothing, even where they hold the same scheme.
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
            check_parts(config, parts)
            in_layers = [part for part in parts if part is not parts.additive]
            if in_layers:
                self.groups.append(nn.ModuleList(in_layers))
        self._built[key] = parts
        return parts

    def _check_shared_keys(self, stack: Stack) -> None:
        """Layers that read an earlier layer's keys find them mapped by that layer's scheme (Gemma 3n and 4)."""
        owners: dict[str | None, tuple[int, Any]] = {}
        for attention, layer in zip(stack.attentions, self.layers, strict=True):
            if not getattr(attention.module, "is_kv_shared_layer", False):
                owners[attention.layer_type] = (attention.layer, layer.query_key_map)
                continue
            if _maps_keys_at_cache_update(layer):
                raise UnsupportedError(
                    f"Layer {attention.layer} reads the keys of an earlier layer, which cannot be met on their way "
                    f"into a cache, as {type(layer.query_key_map or layer.logit_bias).__name__} needs."
                )
            source, query_key_map = owners.get(attention.layer_type, (None, layer.query_key_map))
            if query_key_map is not layer.query_key_map:
                raise UnsupportedError(
                    f"Layer {attention.layer} reads the keys of layer {source}, so both need the same rotation; the "
                    "schedule gives them different ones."
                )

    def adopt(self, stack: Stack, native_bias: Any) -> list[str]:
        """Takes over native weights where a part can; returns what was adopted."""
        adopted = []
        if self.additive is not None and stack.tables:
            table = stack.tables[0]
            weight = table_weight(table.module)
            offset = max(getattr(part, "offset", 0) for part in self.additive.modules())
            skip = max(table_origin(table.module) - offset, 0)
            if weight is not None and weight.device.type != "meta" and self.additive.adopt(weight[skip:]):
                adopted.append(f"additive: {table.path}")
        for attention, layer in zip(stack.attentions, self.layers, strict=True):
            native = native_bias(stack, attention)
            if layer.logit_bias is None or native is None or native.device.type == "meta":
                continue
            if layer.logit_bias.adopt(native):
                adopted.append(f"logit_bias: {attention.path}")
        return adopted


class PositionEncoding(AddedModule):
    """Everything `patch_model` put into a model; reachable as `model.position_encoding`.

    Attributes:
        config: the scheme in force.
        report: what was replaced and what was placed.
        lengths: how long a sequence the model takes; set while the scheme is in place.
        base_weights: a few values of the weights below, as they were when a scheme was first placed on them.
        stacks: the parts, by name of the stack.
    """

    def __init__(self, config: SchemeConfig, stacks: dict[str, StackEncoding]) -> None:
        super().__init__()
        self.config = config
        self.report: PatchReport | None = None
        self.lengths: Lengths | None = None
        self.base_weights: dict[str, Sample] = {}
        self.stacks = nn.ModuleDict(stacks)
        self.journal = Journal()

    def parts(self) -> list[Part]:
        """The parts that act somewhere; one that is made of others stands for all of them."""
        found = [part for stack in self.stacks.values() for part in cast("StackEncoding", stack)._acting()]
        return list({id(part): part for part in found}.values())

    def reach(self) -> Reach:
        """How long a sequence the scheme can encode, and the length it was made for."""
        return shortest(part.length_reach for part in self.parts())

    def extra_repr(self) -> str:
        """The scheme, for `print(model)`."""
        return repr(self.config)

    def get_extra_state(self) -> Tensor:
        """The mark of the scheme in force, `(bytes,)`."""
        return mark_of(self.config)

    def set_extra_state(self, state: Any) -> None:
        """Remembers which scheme the weights being loaded name. The one in force does not follow them."""
        if getattr(state, "is_meta", False):
            return  # A process that gets its weights from another one (FSDP) loads none itself.
        self.__dict__["loaded_mark"] = state

    def loaded_scheme(self) -> dict[str, Any] | None:
        """The scheme that the weights loaded last name; asked a second time, and without a mark, `None`."""
        self.__dict__.pop(MARK, None)  # Transformers sets an attribute for a key that a checkpoint lacks.
        mark = self.__dict__.pop("loaded_mark", None)
        return None if mark is None else marked_scheme(mark)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + MARK
        destination[key] = placed_mark(destination[key], self.__dict__.get("holder", self))

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Reports weights of another scheme as keys that do not fit, which raises where loading is strict.

        torch does not tell a module whether it is: `strict` is always true here.
        """
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key, found = prefix + MARK, self.loaded_scheme()
        if key in missing_keys:
            missing_keys.remove(key)
        problem = disagreement(found, self.config)
        if problem is not None:
            (missing_keys if found is None else unexpected_keys).append(f"{key}: {problem}. {NOT_STRICT}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PositionEncoding:
        """Copies the encoding as a part of its model.

        Raises:
            UnsupportedError: for a copy of the encoding alone (PEFT's `modules_to_save`), which no layer would use.
        """
        holder = self.__dict__.get("holder")
        if holder is not None and id(holder) not in memo:
            raise UnsupportedError(
                "A copy of position_encoding without its model would be trained and saved, but no layer would use it. "
                "To train a scheme beside LoRA, leave it out of `modules_to_save`, set requires_grad on the parameters "
                "of model.position_encoding after get_peft_model: save_pretrained writes them beside the adapter."
            )
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def _maps_keys_at_cache_update(layer: LayerEncoding) -> bool:
    """Whether a scheme has to meet keys elsewhere than at the architecture's own rotary function."""
    query_key_map = layer.query_key_map
    asymmetric = query_key_map is not None and (query_key_map.whole_heads or not query_key_map.symmetric)
    return asymmetric or layer.num_features > 0


def _one_additive(found: dict[SchemeConfig, AdditiveEncoding | None]) -> AdditiveEncoding | None:
    if len(found) <= 1:
        return next(iter(found.values()), None)
    additives = [part for part in found.values() if part is not None]
    if not additives:
        return None
    raise UnsupportedError(
        "The layers of the schedule disagree about what is added to the embeddings "
        f"({', '.join(config.name for config in found)}). An additive scheme acts once, before the first layer, so it "
        "has to be the same in every layer; rotations and biases can differ. To drop it everywhere pass "
        "elsewhere='none'; to keep it, compose it with the scheme of every layer."
    )


def is_length_dependent(encoding: PositionEncoding) -> bool:
    """Whether some part encodes a token by more than a growing cache keeps; only causal stacks ever grow."""
    stacks = [stack for stack in encoding.stacks.values() if isinstance(stack, StackEncoding)]
    growing = [stack for stack in stacks if any(layer.causal for layer in stack.layers)]
    flags = ("length_dependent", "needs_whole_sequence")
    return any(getattr(module, flag, False) for stack in growing for module in stack.modules() for flag in flags)


def parameter_count(module: nn.Module) -> int:
    """Number of scalars that can be learned."""
    return sum(parameter.numel() for parameter in module.parameters())


def build_encoding(
    config: SchemeConfig, stacks: list[Stack], architecture: Architecture, device: torch.device | None = None
) -> PositionEncoding:
    """Builds the parts of a scheme for every stack.

    Args:
        config: the scheme.
        stacks: where it is to be placed.
        architecture: the declaration for the model.
        device: where parts are built; `None` for torch's default device. On the meta device, parameters have names and
            shapes but no memory.

    Raises:
        RuntimeError: on the meta device, for a scheme from outside this package that reads its parameters while it is
            built.
    """
    built = {stack.name: StackEncoding(config, stack, architecture.pairing, device) for stack in stacks}
    for stack in stacks:
        runtime = built[stack.name].runtime
        runtime.slots.rows_before = max((table_origin(table.module) for table in stack.tables), default=0)
        runtime.time_major = architecture.time_major
        runtime.channels_first = architecture.channels_first
    return PositionEncoding(config, built)
