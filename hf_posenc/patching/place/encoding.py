"""The module that holds a scheme in a model: its config, its parts and the report; and how it is found in a model."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from hf_posenc.entry import MARK, read_entry
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.anatomy.sites import AddedModule, Stack
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.placed_forward import forward_on_instance
from hf_posenc.patching.place.record import NOT_STRICT, SchemeRecord, disagreement, mark_of, marked_scheme, placed_mark
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.needs import Need
from hf_posenc.schemes.parts import Part
from hf_posenc.schemes.reach import Reach, shortest
from hf_posenc.schemes.refusals import GROWING_CACHE

if TYPE_CHECKING:
    from hf_posenc.patching.place.install import PatchReport
    from hf_posenc.patching.place.journal import Journal
    from hf_posenc.patching.place.lengths import Lengths


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
        return f"the scheme {scheme_label(self.config)!r}"

    @property
    def lengths(self) -> Lengths | None:
        """The sequence lengths of the model; set while the scheme is in place."""
        return self.record.lengths_by_part.get(None)

    def parts(self, stacks: Collection[str] | None = None) -> list[Part]:
        """The parts in use, without duplicates. A part that contains others is listed in their place.

        Args:
            stacks: names of stacks; all by default.
        """
        chosen = [stack for name, stack in self.stacks.items() if stacks is None or name in stacks]
        found = [part for stack in chosen for part in stack.acting_parts()]
        return list({id(part): part for part in found}.values())

    def needs(self) -> dict[Need, Part]:
        """What the parts in use need."""
        return {need: part for stack in self.stacks.values() for need, part in stack.needs().items()}

    def reach(self, stacks: Collection[str] | None = None) -> Reach:
        """The longest sequence that the scheme can encode, and the length it was made for.

        Args:
            stacks: names of stacks; all by default.
        """
        return shortest(part.length_reach for part in self.parts(stacks))

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
        """Reports weights of another scheme as mismatched keys, which raises an error if loading is strict.

        torch does not tell a module whether loading is strict: `strict` is always true here.
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
            UnsupportedError: for a copy of the encoding, or of a layer that refers to it, without the model.
        """
        holder = self.__dict__.get("holder")
        if holder is not None and id(holder) not in memo:
            raise UnsupportedError(
                "A copy of a position encoding without its model would be trained and saved, but not used. Copy the "
                "whole model. If PEFT makes the copy, name smaller modules in `modules_to_save`, without attention."
            )
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


class PartParameters:
    """Stands in for the method `parameters` of an encoder or another part of a model.

    The base model holds the scheme of all its parts. Code that freezes a part, clips its gradients or gives it to an
    optimizer asks the part for its parameters, and means those of its scheme too.

    Args:
        module: the part.
        schemes: the schemes of the stacks in it.
    """

    def __init__(self, module: nn.Module, schemes: list[nn.Module]) -> None:
        self.module = module
        self.schemes = schemes

    def __call__(self, recurse: bool = True) -> Iterator[Parameter]:
        """Iterates over the parameters of the part, then over those of its scheme."""
        yield from type(self.module).parameters(self.module, recurse)
        for scheme in self.schemes if recurse else ():
            yield from scheme.parameters()

    @classmethod
    def place(cls, base: nn.Module, schemes: Mapping[int, nn.Module], journal: Journal) -> None:
        """Sets an instance on every module between a base model and its stacks.

        Args:
            base: the module that holds the schemes.
            schemes: the scheme of each stack that has parameters, by the identity of the stack.
            journal: records the changes.
        """
        for module in base.modules():
            inside = [schemes[id(one)] for one in module.modules() if id(one) in schemes]
            if inside and module is not base:
                journal.set(module, "parameters", cls(module, inside))


def is_length_dependent(encoding: PositionEncoding) -> bool:
    """Whether a part needs more than a growing cache stores. Only causal stacks have growing caches."""
    growing = [stack for stack in encoding.stacks.values() if any(layer.causal for layer in stack.layers)]
    return any(stack.problems[GROWING_CACHE.name] for stack in growing)


def parameter_count(module: nn.Module) -> int:
    """Number of trainable scalars."""
    return sum(parameter.numel() for parameter in module.parameters())


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
        RuntimeError: on the meta device, for a scheme from outside this package that reads its parameters while it is
            built.
    """
    built = dict(kept or {})
    for stack in stacks:
        if stack.name in built:
            continue
        scheme = scheme_of(config, stack.part)
        assert scheme is not None
        built[stack.name] = StackEncoding(scheme, stack, device)
    return PositionEncoding(config, {stack.name: built[stack.name] for stack in stacks})


def scheme_of(config: SchemeConfig, part: str) -> SchemeConfig | None:
    """The scheme of one part of a model; `None` for a part that keeps its native positions."""
    return config.by_part().get(part) if isinstance(config, PartsConfig) else config


def parts_named(config: SchemeConfig) -> tuple[str, ...] | None:
    """The parts of a composite model that have a scheme; `None` if the config does not name parts."""
    return config.names if isinstance(config, PartsConfig) else None


def encodings(model: nn.Module) -> list[PositionEncoding]:
    """Every encoding in a model. There are several if parts of the model were patched separately.

    Raises:
        UnsupportedError: if an encoding was created by another copy of this package.
    """
    kinds = {type(module) for module in model.modules()}
    found = {kind for kind in kinds if issubclass(kind, PositionEncoding)}
    name, package = f"{PositionEncoding.__module__}.{PositionEncoding.__qualname__}", __name__.partition(".")[0]
    if any(f"{one.__module__}.{one.__qualname__}" == name for kind in kinds - found for one in kind.__mro__):
        raise UnsupportedError(
            f"This {type(model).__name__} was patched by another copy of {package}: the package has been imported "
            "again in this process, after its modules were removed from sys.modules (test plugins and notebooks do "
            "so). The new copy cannot undo or save the changes of the old one. Load and patch the model again, or "
            f"restart the process, and exclude {package} from reloading."
        )
    return [module for module in model.modules() if isinstance(module, PositionEncoding)] if found else []


def current_encoding(model: PreTrainedModel) -> PositionEncoding | None:
    """The encoding in force, or `None` for a stock model.

    Raises:
        UnsupportedError: if a part of the model was patched on its own.
    """
    found = encodings(model)
    for encoding in found:
        if encoding.__dict__.get("holder") is not model.base_model:
            raise UnsupportedError(
                f"A part of this {type(model).__name__} was patched on its own with {encoding.config.name!r}. Call "
                "unpatch_model on that part first, because a scheme is placed in a whole model."
            )
    return found[0] if found else None


def has_patched_layers(model: nn.Module) -> bool:
    """Whether any attention layer of a model is patched, including layers shared with another model."""
    placed = [site for encoding in encodings(model) for site in encoding.record.journal.forwards()]
    shared = [forward_on_instance(module) for module in model.modules()]
    return any(isinstance(forward, AttentionSite) for forward in (*placed, *shared))


def difference(model: PreTrainedModel) -> str:
    """How a model differs from what was placed, or its positions from its config; empty if they agree."""
    entry, found = read_entry(model.config), encodings(model)
    if found:
        return next(filter(None, (encoding.record.agrees(model) for encoding in found)), "")
    if has_patched_layers(model):
        return (
            "it uses a position encoding that it does not hold itself, because it is a part of a patched model or "
            "shares layers with one. Its files could not be loaded with this encoding. Save or export the model that "
            "was patched, and take the part from it after loading; or unpatch that model first, and patch this one "
            "instead."
        )
    if entry is not None:
        return (
            f"it uses its stock positions, but its config names the scheme {entry['scheme']!r}: it is the config of a "
            "patched model, with whose positions it would be loaded. Give it the config that it was built with."
        )
    return ""


def refuse_changed(model: PreTrainedModel) -> None:
    """Refuses to save or export a model that is not what was placed, or whose positions are not those of its config.

    Raises:
        UnsupportedError: naming the first difference.
    """
    problem = difference(model)
    if problem:
        raise UnsupportedError(f"This {type(model).__name__} is not saved or exported: {problem}")


def named_part(model: PreTrainedModel, part: str | None) -> str:
    """The name of a part of a model; `None` stands for the one that `patch_model` patches by default.

    Raises:
        UnknownNameError: if the model has no such part.
    """
    return Anatomy(model).part(part)


def scheme_in_part(encoding: PositionEncoding | None, part: str) -> SchemeConfig | None:
    """The scheme in force in a part; `None` if the part has its native positions."""
    return None if encoding is None else scheme_of(encoding.config, part)


def stacks_in_part(encoding: PositionEncoding, part: str) -> dict[str, StackEncoding]:
    """The parts of a scheme in the stacks of a part, by name of the stack."""
    return {name: stack for name, stack in encoding.stacks.items() if stack.part == part}
