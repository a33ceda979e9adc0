"""The record of a patch: every attribute that it set, and whether a model, a config or weights belong to it.

The journal holds what was set on instances, and how to restore it.

`SchemeRecord.agrees` compares the model with what was placed and describes the first difference. It is called before a
model is saved, exported or inspected. The record of each stack is in `stack_record.py`.

Weights name the scheme that they were trained with in an entry of the state dict, its mark. Many schemes have no
parameters, so without it the weights of an ALiBi model and of a stock model would have the same keys. The mark is
torch's extra state of `PositionEncoding`, a tensor of bytes created from the config together with each state dict.
Casts, device moves, averaging and quantisation act on parameters and buffers only, and cannot change it.
"""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_posenc.entry import ATTRIBUTE, FORMAT, is_entry, read_entry
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import config_paths
from hf_posenc.patching.anatomy.weights import Sample
from hf_posenc.patching.forwards import (
    PlacedForward,
    as_forward,
    forward_on_instance,
    is_of_transformers,
    place_of_forward,
    placed_forward,
    refuse_foreign_forward,
    remove_hook,
)
from hf_posenc.patching.place.stack_record import StackRecord, exchanged
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import scheme_from_dict
from hf_posenc.schemes.validation import shown

if TYPE_CHECKING:
    from hf_posenc.patching.place.lengths import Lengths

Site = TypeVar("Site", bound=PlacedForward)
#: Types whose values are compared, not their identity. Copies and pickles of models have several copies of a method.
_PLAIN = (int, float, str, types.MethodType)


@dataclass
class _Change:
    target: Any
    attribute: str
    had_value: bool
    value: Any
    kind: Literal["attribute", "aside", "forward", "frozen", "hook"] = "attribute"
    ours: Any = None

    def put(self, value: Any) -> None:
        """Changes the value that the attribute has while the patch is in place."""
        self.target.__dict__[self.attribute] = self.ours = value

    @property
    def is_in_place(self) -> bool:
        """Whether the attribute still has the patch's value."""
        present = self.target.__dict__.get(self.attribute)
        is_plain = type(present) is type(self.ours) and isinstance(present, _PLAIN)
        return present is self.ours or (is_plain and present == self.ours)


@dataclass
class Journal:
    """A journal of instance attributes. No class and no module file is ever changed.

    It is plain data, so a deep copy or a pickle of the model has a journal that refers to the copy.
    """

    changes: list[_Change] = field(default_factory=list)

    def set(self, target: Any, attribute: str, value: Any) -> None:
        """Sets `target.attribute` on the instance and records the previous value."""
        attributes = target.__dict__
        self.changes.append(_Change(target, attribute, attribute in attributes, attributes.get(attribute), ours=value))
        attributes[attribute] = value

    def put_aside(self, target: Any, attribute: str) -> None:
        """Removes an attribute from the instance until the patch is undone. Undoing overwrites a later value."""
        attributes = target.__dict__
        self.changes.append(_Change(target, attribute, attribute in attributes, attributes.get(attribute), "aside"))
        attributes.pop(attribute, None)

    def replace(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Sets an attribute that the module, or its class, has."""
        if not hasattr(module, attribute):
            kind, version = type(module), f"transformers {transformers.__version__}"
            raise UnsupportedError(
                f"{kind.__name__} has no {attribute!r} to replace, which is declared for its model type. The code of "
                f"{version if is_of_transformers(kind.__module__) else kind.__module__} computes positions in a place "
                "unknown to hf_posenc, and they would remain active next to any scheme. Use a class and a version of "
                "transformers that hf_posenc was tested with."
            )
        self.set(module, attribute, value)

    def set_forward(self, module: nn.Module, value: Any) -> None:
        """Replaces the module's forward, or the forward inside accelerate's hook where the module has one.

        Raises:
            UnsupportedError: if another library has set a forward on the instance, which would no longer be called.
        """
        if any(change.kind == "forward" and change.target is module for change in self.changes):
            raise UnsupportedError(
                f"This {type(module).__name__} is used in several layers of the model, and a scheme has separate state "
                "for each layer. Give each layer its own module (copy.deepcopy)."
            )
        if refuse_foreign_forward(module) is not None:
            raise UnsupportedError(
                f"This {type(module).__name__} is shared with another model that is patched, so it would run two "
                "position encodings. Unpatch that model, or give each model its own modules (copy.deepcopy)."
            )
        self.place_forward(module, None, value)

    def place_forward(self, module: nn.Module, before: Any, value: Any) -> None:
        """Gives a module a forward, and records the one that was set on the instance before, or `None`."""
        place = place_of_forward(module)
        self.changes.append(_Change(module, place, before is not None, before, "forward", ours=value))
        module.__dict__[place] = as_forward(value)

    def forwards(self) -> Iterator[Any]:
        """The forwards that are in effect, directly or inside a wrapper from another library."""
        for change in self.changes:
            if change.kind == "forward" and forward_on_instance(change.target) is not None:
                yield change.ours

    def add_forward_pre_hook(self, module: nn.Module, hook: Any) -> None:
        """Registers a hook that also takes keyword arguments."""
        self.changes.append(_Change(module, "_forward_pre_hooks", False, None, "hook", ours=hook))
        module.register_forward_pre_hook(hook, with_kwargs=True)

    def freeze(self, module: nn.Module, *names: str) -> None:
        """Freezes native weights that have no effect under the new scheme: parameters, or all weights of submodules.

        Names of anything else are skipped. A parameter is recorded by module and name, because loading a state dict may
        replace it.
        """
        for name in names:
            parameter = module._parameters.get(name)
            if parameter is not None:
                self.changes.append(_Change(module, name, True, parameter.requires_grad, "frozen"))
                parameter.requires_grad_(False)
            elif module._modules.get(name) is not None:
                self.freeze_all(module._modules[name])

    def freeze_all(self, module: Any) -> None:
        """Freezes all native weights in a module that has no effect under the new scheme."""
        for inner in module.modules():
            if type(inner).__module__.startswith("peft."):
                raise UnsupportedError(
                    f"A scheme would replace the {type(module).__name__} of PEFT, which holds a part of an adapter. "
                    "That part would be lost, and training it would change nothing. Remove the adapter first "
                    "(model.unload()), and leave positions out of its config."
                )
            self.freeze(inner, *inner._parameters)

    def undo(self) -> None:
        """Restores everything in reverse order, except attributes that were set again since.

        After an interrupt, a second call finishes the work.
        """
        while self.changes:
            _restore(self.changes[-1])
            self.changes.pop()


def _restore(change: _Change) -> None:
    if change.kind == "forward":
        _restore_forward(change)
    elif change.kind == "hook":
        remove_hook(change.target, change.ours)
    elif change.kind == "frozen":
        # A weight that was made trainable while the patch was in place stays trainable.
        parameter = change.target._parameters[change.attribute]
        parameter.requires_grad_(change.value or parameter.requires_grad)
    elif change.kind != "aside" and not change.is_in_place:
        return
    elif change.had_value:
        change.target.__dict__[change.attribute] = change.value
    else:
        change.target.__dict__.pop(change.attribute, None)


def _restore_forward(change: _Change) -> None:
    """Removes a forward from its current place: other libraries may have added or removed wrappers since."""
    attributes, ours, before = change.target.__dict__, change.ours, change.value
    if isinstance(ours, PlacedForward):
        ours.retire()
    stock = types.MethodType(type(change.target).forward, change.target)
    if placed_forward(attributes.get("_old_forward")) is ours:
        attributes["_old_forward"] = stock if before is None else as_forward(before)
    elif placed_forward(attributes.get("forward")) is ours:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = as_forward(before)


class SchemeRecord:
    """What `patch_model` has placed in a model.

    Attributes:
        scheme: the scheme in force.
        journal: every attribute that was set, with the forwards and the modules they were set on.
        stacks: the layers of every stack, by its name.
        active_config: the config of the model while the scheme is in place; set when it is placed.
        lengths_by_part: the sequence lengths of the model, under `None`, and those of other parts whose length the
            config states (the encoder of Whisper), by name of the part; set while the scheme is in place.
        base_weights: a few values of the base model's weights, recorded when a scheme was first placed in it,
            and again when PEFT gets the model.
    """

    def __init__(self, scheme: SchemeConfig) -> None:
        self.scheme = scheme
        self.journal = Journal()
        self.stacks: dict[str, StackRecord] = {}
        self.active_config: OwnConfig | None = None
        self.lengths_by_part: dict[str | None, Lengths] = {}
        self.base_weights: dict[str, Sample] = {}

    def follow(self, previous: SchemeRecord, stacks: Container[str]) -> None:
        """Takes over what belongs to the model and not to its scheme: lengths, weights and fields of the config.

        The fields are those of the `stacks` that have a scheme now.
        """
        self.lengths_by_part, self.base_weights = dict(previous.lengths_by_part), previous.base_weights
        self.stacks = {name: stack for name, stack in previous.stacks.items() if name in stacks}

    def is_copied_with(self, holder: nn.Module, memo: Container[int]) -> bool:
        """Whether a copy that has `memo` is one of the module that holds the scheme, or of a stack around it."""
        around = [holder, *(stack.stack for stack in self.stacks.values())]
        return any(id(module) in memo and holder in module.modules() for module in around)

    def placed(self, kind: type[Site]) -> list[Site]:
        """The forwards of a kind that are in effect."""
        return [forward for forward in self.journal.forwards() if isinstance(forward, kind)]

    def stacks_by_path(self) -> dict[str, StackRecord]:
        """The stacks by the name that their config has in the model's config; "" for the config itself."""
        assert self.active_config is not None
        names = dict(config_paths(self.active_config.config))
        return {names.get(id(stack.stack.config), ""): stack for stack in self.stacks.values()}

    def agrees(self, model: PreTrainedModel) -> str:
        """Describes how a model differs from what was placed, and what to do; empty if it does not."""
        entry = read_entry(model.config)
        if entry is None or not same_scheme(entry, self.scheme):
            placed = f"its position encoding is {described(self.scheme.to_dict())}, but"
            if self.active_config is not None and model.config is self.active_config.config:
                return (
                    f"{placed} the field {ATTRIBUTE!r} of its config was changed after patch_model, and holds "
                    f"{shown(getattr(model.config, ATTRIBUTE, None))}. The field records the scheme and does not set "
                    "it. Call patch_model with the scheme that the model should have, which writes the field, or undo "
                    "the change."
                )
            named = "no scheme" if entry is None else described(entry)
            return (
                f"{placed} its config names {named}, so it could not be loaded again. The config was replaced, or only "
                "a part of the model was patched. Restore the config, or call unpatch_model on the model that was "
                "patched, and patch_model on this one."
            )
        lost = exchanged(model, self.stacks.values())
        return lost or next(filter(None, (stack.difference() for stack in self.stacks.values())), "")


class OwnConfig:
    """Copies of a model's config and generation config, which replace the originals in every module.

    A patch writes its entry and lengths into the copies. Other models that were built from the same objects keep them.

    Attributes:
        fields: a copy of the complete entry, once it is written.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.fields: dict[str, Any] | None = None
        copies: dict[int, Any] = {}
        originals = (model.config, getattr(model, "generation_config", None))
        self._pairs = [(original, copy.deepcopy(original, copies)) for original in originals if original is not None]
        self._places = [
            (module, name, value, copies[id(value)])
            for module in model.modules()
            for name, value in module.__dict__.items()
            if isinstance(value, PreTrainedConfig | GenerationConfig) and id(value) in copies
        ]

    @property
    def config(self) -> PreTrainedConfig:
        """The copy of the model's config."""
        return self._pairs[0][1]

    def belongs_to(self, model: PreTrainedModel) -> bool:
        """Whether a model has this config, or the original of it."""
        return any(model.config is config for config in self._pairs[0])

    def place(self) -> None:
        """Gives the copies to the model. Calling it again changes nothing."""
        self.fields = None
        for module, name, original, copied in self._places:
            if module.__dict__.get(name) is original:
                module.__dict__[name] = copied

    def remove(self) -> None:
        """Gives the model its original configs, except one that was changed: then the model keeps the copy.

        A change to the copy (such as a resized vocabulary) belongs to the model, and a change to the original does not.
        """
        same = {isinstance(copied, GenerationConfig): _are_same(original, copied) for original, copied in self._pairs}
        for module, name, original, copied in self._places:
            if module.__dict__.get(name) is copied and same[isinstance(copied, GenerationConfig)]:
                module.__dict__[name] = original


def _are_same(original: Any, copied: Any) -> bool:
    """Whether two values are equal, with the private fields of configs, which their `==` leaves out."""
    if type(original) is not type(copied):
        return False  # A name that carries a scheme equals the plain name.
    if not isinstance(copied, PreTrainedConfig | GenerationConfig):
        return bool(original == copied)
    fields, others = original.__dict__, copied.__dict__
    return fields.keys() == others.keys() and all(_are_same(fields[name], others[name]) for name in fields)


def mark_of(config: SchemeConfig) -> Tensor:
    """The entry for a scheme: JSON as `(bytes,)` in uint8, on the CPU, equal for equal configs."""
    entry = {"format": FORMAT, "scheme": config.to_dict()}
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def marked_scheme(mark: Any) -> dict[str, Any]:
    """The scheme dictionary in a mark; `{"scheme": "?"}`, which equals no scheme, if the bytes are invalid."""
    try:
        local = mark.to_local() if hasattr(mark, "to_local") else mark
        entry = json.loads(bytes(local.detach().cpu().to(torch.uint8).flatten().tolist()))
    except (AttributeError, ValueError, RuntimeError):
        entry = None
    return entry["scheme"] if is_entry(entry) else {"scheme": "?"}


def same_scheme(entry: Mapping[str, Any], config: SchemeConfig) -> bool:
    """Whether a scheme dictionary describes a config; options that it lacks have their defaults."""
    try:
        return entry == config.to_dict() or scheme_from_dict(dict(entry)) == config
    except (ValueError, TypeError, KeyError):
        return False


def described(scheme: Mapping[str, Any]) -> str:
    """A scheme with its non-default options: `t5(max_distance=64)`."""
    options = _chosen(scheme)
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{scheme['scheme']}({shown})" if shown else str(scheme["scheme"])


def _chosen(scheme: Mapping[str, Any]) -> dict[str, Any]:
    try:
        defaults = type(scheme_from_dict(dict(scheme)))().to_dict()
    except (ValueError, TypeError, KeyError):
        defaults = {}
    absent = object()
    return {name: value for name, value in scheme.items() if name != "scheme" and defaults.get(name, absent) != value}


def disagreement(trained: Mapping[str, Any] | None, config: SchemeConfig | None, reader: str = "") -> str | None:
    """Describes how the schemes of weights and of a model differ, and what to do; `None` if they are the same.

    Args:
        trained: the scheme named in the weights; `None` for weights without a mark.
        config: the scheme in force; `None` for a stock model.
        reader: the program that has read the scheme from a config. The user then has no model yet that could be
            patched, so the caller says what to do.
    """
    if trained is config or (trained is not None and config is not None and same_scheme(trained, config)):
        return None
    here = "its stock positions" if config is None else f"the position encoding {described(config.to_dict())}"
    here = f"the config that {reader} has read names {here}" if reader else f"this model has {here}"
    if trained is None:
        fact = f"these weights do not name a position encoding, like those of a stock model, but {here}"
        remedy = "To use the scheme with stock weights, load them before patch_model"
    else:
        fact = f"these weights were trained with the position encoding {described(trained)}, but {here}"
        scheme = {"scheme": trained["scheme"]} | _chosen(trained)
        remedy = f"Call patch_model(model, {scheme!r}) before loading them. To use another, patch it again afterwards"
    return fact if reader else f"{fact}. {remedy}"


#: Added to a disagreement by a strict `load_state_dict`.
NOT_STRICT = (
    "To load only the weights, pass strict=False (options=StateDictOptions(strict=False) to the functions of "
    "torch.distributed.checkpoint.state_dict)"
)


def placed_mark(mark: Tensor, module: nn.Module) -> Tensor:
    """Converts a mark to a `DTensor` if the weights of a module are, because their loaders accept no other tensors.

    The mark is replicated, so nothing has to be communicated.
    """
    mesh = next((parameter.device_mesh for parameter in module.parameters() if hasattr(parameter, "device_mesh")), None)
    if mesh is None:
        return mark
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(mark, mesh, [Replicate()] * mesh.ndim, run_check=False)
