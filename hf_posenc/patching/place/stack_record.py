"""The record of what was placed in one stack of a model, and checks that its layers are unchanged.

After a patch, other code may replace the forward of an attention module or of its class, add, drop, move or share
layers, or change a field of the config that has no effect any more. The record of a stack describes the first
difference. It is checked before each call in which something has changed since the last one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.errors import UnsupportedError, warn_user
from hf_posenc.patching.anatomy.anatomy import Stack, modules_by_stack
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.cross_attention import CrossAttention
from hf_posenc.patching.call.module_sites import AddToHiddenStates, TableSite
from hf_posenc.patching.forwards import (
    PlacedForward,
    answer_of,
    forward_on_instance,
    globals_used,
    leads_to,
    number_of,
    reads_places,
    registered_function,
    remove_hook,
    replaced_global,
)
from hf_posenc.patching.place.config_entry import changed_fields, position_fields
from hf_posenc.schemes.parts import Part
from hf_posenc.schemes.statements import STATED_METHODS, overlooked

if TYPE_CHECKING:
    from hf_posenc.patching.place.encoding import StackEncoding
    from hf_posenc.patching.place.record import Journal

#: The field of a config that names its attention function.
_BACKEND = "_attn_implementation_internal"
#: Training calls that a module may miss in a row. If dropped in 9 of 10 calls, it misses so many once in 40,000 times.
_MISSED_IN_TRAINING = 100
#: Held during a search. Two threads that search at once in their first calls would await layers that the other has run.
_SEARCHING = threading.RLock()
_REPLACED = (
    "was replaced after patch_model, and the scheme was placed in the code that it had before. Restore it. Or call "
    "patch_model again, which examines the new code, and refuses it if a scheme would bypass it."
)


class StackRecord:
    """What was placed in the layers of one stack.

    Before each call, the forwards that were placed, the children of the modules above them and the position fields of
    the config are compared with those of the last check. Only if one differs is the stack searched again.

    Args:
        stack: the stack as it was found.
        encoding: the parts of the scheme in it.
        journal: that of the patch.
        before: the record of an earlier patch of the stack, if there was one. It keeps the position fields that this
            patch found.
    """

    def __init__(self, stack: Stack, encoding: StackEncoding, journal: Journal, before: StackRecord | None) -> None:
        self.stack: Any = stack.module
        self.attentions = [attention.module for attention in stack.attentions]
        self.across = [stack.module.get_submodule(path) for path in encoding.cross]
        self.encoding = encoding
        #: Where attention was at the last check; cross-attention too, if it has a scheme.
        self.places = [*(attention.path for attention in stack.attentions), *encoding.cross]
        self.depth = getattr(stack.config, "num_hidden_layers", None)
        #: The layer at whose input positions are added; `None` if a table adds them, or nothing does.
        self.first_layer: nn.Module | None = None
        self.trainable: list[tuple[nn.Module, str]] = []
        #: The attention function of other code that was seen to have no positions.
        self.function: Any = None
        self.journal = journal
        self.fields: dict[str, Any] = position_fields(stack.config) if before is None else before.fields
        #: The parameters that `patch_model` has initialised, and how often they had been written to then. Not by weak
        #: references, with which torch.utils.swap_tensors refuses a tensor.
        self.new: list[tuple[nn.Parameter, int]] = before.new if before and before.encoding is encoding else []
        #: Those among them that an adapter has frozen.
        self.frozen: list[nn.Parameter] = []
        self._reset()
        self._class_forwards: dict[int, Any] = {id(module): type(module).forward for module in self.stack.modules()}
        self._globals = globals_used([*self.attentions, *self.across])

    def _reset(self) -> None:
        self._children: list[tuple[dict[str, Any], list[Any]]] = []
        self._forwards: list[tuple[nn.Module, dict[str, Any], Any, type, Any]] = []
        #: The attributes and hooks of each part, and their number.
        self._parts: list[tuple[dict[str, Any], dict[int, Any], dict[int, Any], int]] = []
        self._settings: dict[str, Any] = {}
        self._found: list[nn.Module] = []
        self._awaited: list[AttentionSite] = []
        #: Number of fields of the stack's config; -1 before the first check, so that it never matches.
        self._number_of_fields = -1
        self._called: Any = None
        self._missed = 0
        self._class_forwards = {}
        self.number = number_of(self)

    def __getstate__(self) -> dict[str, Any]:
        without = ("number", "new")
        return {name: value for name, value in self.__dict__.items() if name[0] != "_" and name not in without}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, new=[], _globals=[])
        self._reset()

    def check(self) -> None:
        """Refuses a call of a stack that was changed after it was patched."""
        if torch.compiler.is_compiling():
            self._search()
        elif not self._is_unchanged():
            with _SEARCHING:
                if not self._is_unchanged():
                    self._search()

    def _search(self) -> None:
        problem = answer_of(self.number, "problem")
        self.encoding.runtime.unattended = () if problem else answer_of(self.number, "_attentions_to_run")
        if problem:
            raise UnsupportedError(problem)

    def new_and_trained(self) -> list[nn.Parameter]:
        """The trainable parameters that have the numbers with which `patch_model` has initialised them."""
        written = {id(parameter): version for parameter, version in self.new}
        trained = [parameter for parameter in self.encoding.parameters() if parameter.requires_grad]
        return [parameter for parameter in trained if parameter._version == written.get(id(parameter))]

    def warn_of_frozen(self) -> None:
        """Warns, in the first training call, about new parameters that an adapter has frozen."""
        frozen = {id(parameter) for parameter in self.frozen if not parameter.requires_grad}
        names = [name for name, parameter in self.encoding.named_parameters() if id(parameter) in frozen]
        self.frozen = []
        if names:
            warn_user(
                f"PEFT has frozen parameters of {self.encoding.runtime.scheme.label!r} that were never trained "
                f"({names[0]}; {len(names)} in all): they have the values that patch_model gave them. The adapter is "
                "trained with an untrained scheme. To train both, call hf_posenc.recipes.add_lora(model, config) "
                "instead of get_peft_model, or model.get_base_model().position_encoding.requires_grad_(True) after it. "
                "To keep these values, call model.position_encoding.requires_grad_(False) before it."
            )

    def refuse_unattended(self) -> None:
        """Refuses a call in which a patched attention module did not run; in training only after many."""
        runtime, compiling = self.encoding.runtime, torch.compiler.is_compiling()
        runtime.unattended = tuple([number for number in runtime.unattended if self._awaited[number].awaited])
        if not runtime.unattended:
            return
        if self.stack.training and (compiling or self._missed < _MISSED_IN_TRAINING):
            self._missed += not compiling
            return
        raise UnsupportedError(answer_of(self.number, "_unattended", *runtime.unattended))

    def _unattended(self, *waiting: int) -> str:
        missed = self._awaited[waiting[0]].module
        path = next(path for path, module in self.stack.named_modules() if module is missed)
        return (
            f"{path} of this {type(self.stack).__name__}, which patch_model has changed, did not run in this call ("
            f"{len(waiting)} such attention modules), so the scheme had no effect there. Something around it (a "
            "module, a layer's forward or a __call__) computes attention itself, or skips it. Remove it, or let it "
            "call the attention module. To skip a layer, remove it from its list."
        )

    def difference(self) -> str:
        """Describes how the stack differs from what was placed; empty if it does not. Called before a save."""
        return ("" if self._is_unchanged() else self.problem()) or self.moved()

    def problem(self) -> str:
        """Describes why a call would not compute the scheme; empty if it would."""
        present = modules_by_stack(self.stack)[0]
        attentions = [*present.self_attentions, *(present.cross_attentions if self.encoding.cross else ())]
        sites = [(table.path, table.module) for table in (*present.tables, *present.layout.tables) if table.path]
        patched = [each for each in attentions if not present.architecture.is_sparse(each[1], self.stack.config)]
        self.adopt_copies()
        forwards = [change for change in self.journal.changes if change.kind == "forward"]
        # PEFT puts a table into a wrapper.
        tables = {id(change.target) for change in forwards if isinstance(change.ours, TableSite)}
        stock = ((path, module) for path, module in (*patched, *sites) if forward_on_instance(module) is None)
        bare = [(path, module) for path, module in stock if tables.isdisjoint(map(id, module.modules()))]
        if bare:
            path, module = bare[0]
            more = f", and {len(bare) - 1} more" if len(bare) > 1 else ""
            return (
                f"{path} ({type(module).__name__}) of this {type(self.stack).__name__}{more} has no position encoding: "
                "it was added to the model, or lost its forward, after patch_model, and would use its native "
                "positions. Call patch_model again with the same scheme, which keeps its trained parameters."
            )
        if replaced := self._replaced({*map(id, self.attentions), *(id(module) for _, module in attentions)}):
            return replaced
        for part in (module for module in self.encoding.modules() if isinstance(module, Part)):
            touched = part._forward_pre_hooks or part._forward_hooks or not STATED_METHODS.isdisjoint(vars(part))
            if touched and (ignored := overlooked(part)):
                return ignored
            if part._stated_about["forward"] is not type(part).forward:
                part.check_statements()
        moved = next((each for each in patched if not self._is_ours(forward_on_instance(each[1]))), None)
        if moved is not None:
            path, module = moved
            return (
                f"{path} ({type(module).__name__}) of this {type(self.stack).__name__} was moved here from another "
                "patched model, whose scheme it would run. Call unpatch_model on that model, then patch_model on this "
                "one with the same scheme, which keeps the trained parameters of the other layers."
            )
        inside = {id(module) for module in self.stack.modules()}
        placed = [change for change in forwards if id(change.target) in inside]
        for change in placed:
            module, ours = change.target, change.ours
            if not leads_to(module.__dict__.get("forward"), ours, module):
                return (
                    f"The forward of a {type(module).__name__} of this {type(self.stack).__name__} was replaced after "
                    "patch_model by one that does not call the forward in which the scheme is placed, so the scheme "
                    "would have no effect there. To keep both, let the new forward call the one that it replaces "
                    "(with functools.wraps, or as an attribute of the module). To use the new forward without a "
                    "scheme, call unpatch_model first."
                )
            if self._class_forwards.get(id(module), type(module).forward) is not type(module).forward:
                return f"{type(module).__name__}.forward {_REPLACED}"
        if other := replaced_global(self._globals):
            return f"{other} {_REPLACED}"
        if self.first_layer is not None and not self._begins_with(self.first_layer, present):
            return (
                f"The scheme adds positions at the input of a {type(self.first_layer).__name__} that is no longer the "
                f"first layer of this {type(self.stack).__name__}, or is used several times. Call patch_model again "
                "with the same scheme, which keeps its trained parameters."
            )
        function = registered_function(self.stack.config)
        if function not in (None, self.function):
            if reads_places(function, self.attentions[0], self.encoding.layers[0]):
                return (
                    f"The attention function {self.stack.config._attn_implementation!r} was registered by other code, "
                    "and its result depends on the order of keys. It computes positions itself, which would be used in "
                    "addition to the scheme. Use a function of transformers, or remove the positions from yours."
                )
            self.function = function
        changed = changed_fields(self.fields, self.stack.config)
        if changed:
            return (
                f"The config of this {type(self.stack).__name__} has {changed}, set after patch_model. The field "
                "belongs to the native position mechanism, which the scheme replaces, so it has no effect. Restore "
                "it, and pass its meaning to patch_model as options of a scheme; or call unpatch_model first."
            )
        self._found = [module for _, module in present.self_attentions]
        self.places = [path for path, _ in attentions]
        self._remember([path for path, _ in (*attentions, *sites)], placed)
        return ""

    def _replaced(self, known: set[int]) -> str:
        """Describes a module with weights that took the place of an attention module, and contains no known one."""
        for place in self.places:
            module, path = self.stack, []
            for name in place.split("."):
                if module._modules.get(name) is None:
                    break
                module = module._modules[name]
                path.append(name)
            is_known = id(module) in known or not known.isdisjoint(map(id, module.modules()))
            if not is_known and module.state_dict():
                return (
                    f"{'.'.join(path)} ({type(module).__name__}) of this {type(self.stack).__name__} replaced an "
                    "attention module that patch_model had patched, and would run without the scheme. Call patch_model "
                    "again, which examines it, or unpatch_model. To drop a layer, remove it from its list."
                )
        return ""

    def adopt_copies(self) -> None:
        """Adds the forwards of layers that were copied inside the model to the journal, which removes them again.

        A copy of the first layer would add the positions again, so it loses that hook.
        """
        known = {id(change.target) for change in self.journal.changes if change.kind == "forward"}
        for module in self.stack.modules():
            forward = forward_on_instance(module) if "forward" in module.__dict__ else None
            if isinstance(forward, PlacedForward) and id(module) not in known and self._is_ours(forward):
                self.journal.place_forward(module, forward.inner, forward)
            for hook in [*module._forward_pre_hooks.values()]:
                if isinstance(hook, AddToHiddenStates) and module is not self.first_layer and self._is_ours(hook):
                    remove_hook(module, hook)

    def _is_ours(self, forward: Any) -> bool:
        """Whether a forward on a module does not belong to another patched model."""
        return getattr(forward, "runtime", self.encoding.runtime) is self.encoding.runtime

    def moved(self) -> str:
        """Describes why the layers would get other parts of the scheme in a new process; empty if they would not."""
        places = self.encoding.layers, [*self.encoding.cross.values()]
        pairs = [(layer, layers[0]) for layers in places for layer in layers]
        if all(getattr(layer, kind) is getattr(first, kind) for layer, first in pairs for kind in KINDS_IN_LAYERS):
            return ""
        same_depth = getattr(self.stack.config, "num_hidden_layers", None) == self.depth
        if same_depth and self.holds(modules_by_stack(self.stack)[0]):
            return ""
        return (
            f"Layers of this {type(self.stack).__name__} were added, dropped, moved or repeated after patch_model, and "
            "the scheme has a part for each layer, which is saved by the number of the layer. A loaded model would "
            "give the parts to other layers. Call patch_model again with the scheme that each layer should have, such "
            "as model.position_encoding.config: layers that keep their scheme keep its parameters."
        )

    def holds(self, stack: Stack) -> bool:
        """Whether a stack, as it is found now, has the same layers in the same order."""
        across = stack.cross_attentions if self.across else ()
        modules = [module for _, module in (*stack.self_attentions, *across)]
        return modules == [*self.attentions, *self.across]

    @torch.no_grad()
    def copy_parameters(self, encoding: StackEncoding, stack: Stack) -> None:
        """Copies the parameters of the layers that are still in a stack into new parts of the same scheme."""
        # From the forwards, because a copy of a layer shares the parts of the original.
        forwards = {id(module): forward_on_instance(module) for module in self.stack.modules()}
        before = {
            key: site.encoding for key, site in forwards.items() if isinstance(site, AttentionSite | CrossAttention)
        }
        pairs: list[tuple[Any, Any]] = [(self.encoding.additive, encoding.additive)]
        across = [(stack.module.get_submodule(path), layer) for path, layer in encoding.cross.items()]
        within = zip((attention.module for attention in stack.attentions), encoding.layers, strict=True)
        for module, layer in (*within, *across):
            known = before.get(id(module))
            pairs += [] if known is None else [(getattr(known, kind), getattr(layer, kind)) for kind in KINDS_IN_LAYERS]
        for source, target in pairs:
            for name, parameter in [] if source is None else source.named_parameters():
                copied = target.get_parameter(name)
                copied.copy_(parameter)
                copied.requires_grad_(parameter.requires_grad)
            for name, buffer in [] if source is None else source.named_buffers():
                target.get_buffer(name).copy_(buffer)
        encoding.adopted, encoding.unfilled = self.encoding.adopted, self.encoding.unfilled

    def note_trainable(self) -> None:
        """Records which weights of the stack are trained."""
        self.trainable = [
            (module, name)
            for module in self.stack.modules()
            for name, weight in module._parameters.items()
            if weight is not None and weight.requires_grad
        ]

    def prepare_removal(self) -> None:
        """Completes the journal before it is undone: with copies of layers, and with what was frozen since."""
        self.adopt_copies()
        weights = (module._parameters.get(name) for module, name in self.trainable)
        if self.trainable and not any(weight is not None and weight.requires_grad for weight in weights):
            # The stack was frozen as a whole, so what the patch had frozen before stays frozen too.
            inside = {id(module) for module in self.stack.modules()}
            for change in self.journal.changes:
                if change.kind == "frozen" and id(change.target) in inside:
                    change.value = False

    def _begins_with(self, layer: nn.Module, present: Stack) -> bool:
        """Whether a layer of the stack, as it is found now, holds its first attention, and is used once."""
        if all(module is not layer for module in self.stack.modules()):
            return False
        in_layer = {id(module) for module in layer.modules()}
        attentions = [id(module) for _, module in present.self_attentions]
        inside = [attention in in_layer for attention in attentions]
        return sorted(inside, reverse=True) == inside and sum(inside) <= len(in_layer & {*attentions})

    def _attentions_to_run(self) -> tuple[int, ...]:
        """Awaits the attention modules in the layers that the config counts; for an early exit, fewer than all."""
        attentions, depth = self._found, getattr(self.stack.config, "num_hidden_layers", None)
        fewer = isinstance(depth, int) and len(self.attentions) == self.depth
        counted = attentions[:depth] if fewer else attentions
        forwards = map(forward_on_instance, counted)
        self._awaited = [site for site in forwards if isinstance(site, AttentionSite)]
        for site in self._awaited:
            site.awaited = True
        return tuple(range(len(self._awaited)))

    def _is_unchanged(self) -> bool:
        # Loops, because `all` with a generator takes twice as long.
        for module, attributes, before, kind, of_class in self._forwards:
            if attributes.get("forward") is not before or type(module) is not kind or kind.forward is not of_class:
                return False
        for children, before in self._children:
            if [*children.values()] != before:
                return False
        for attributes, hooks, others, number in self._parts:
            if len(attributes) + len(hooks) + len(others) != number:
                return False
        for namespace, name, before in self._globals:
            if namespace.get(name) is not before:
                return False
        settings = self.stack.config.__dict__
        for name, value in self._settings.items():
            if settings.get(name) != value:
                return False
        same = ALL_ATTENTION_FUNCTIONS.get(settings.get(_BACKEND)) is self._called
        return same and len(settings) == self._number_of_fields

    def _remember(self, sites: list[str], placed: list[Any]) -> None:
        present = {id(weight) for weight in self.encoding.parameters()}
        self.new = [known for known in self.new if id(known[0]) in present]  # Replaced ones are not kept in memory.
        # The stack, and the modules on the way from it to the sites.
        way = (parent for path in sites for parent, _, _ in _along(path, self.stack))
        above = list({id(module): module for module in (self.stack, *way)}.values())
        parts = [module for module in self.encoding.modules() if isinstance(module, Part)]
        seen = {id(module): module for module in (*(change.target for change in placed), *above, *parts)}.values()
        self._forwards = [
            (module, module.__dict__, module.__dict__.get("forward"), type(module), type(module).forward)
            for module in seen
        ]
        self._children = [(module._modules, [*module._modules.values()]) for module in above]
        self._parts = []
        for part in parts:
            hooks = part._forward_pre_hooks, part._forward_hooks
            self._parts.append((part.__dict__, *hooks, len(part.__dict__) + sum(map(len, hooks))))
        self._globals = globals_used([*self.attentions, *self.across])
        settings = self.stack.config.__dict__
        self._settings = {name: copy.deepcopy(settings[name]) for name in (*self.fields, _BACKEND) if name in settings}
        self._number_of_fields = len(settings)
        self._called = ALL_ATTENTION_FUNCTIONS.get(settings.get(_BACKEND))
        self._missed = 0


class StacksInside:
    """A forward pre-hook of a patched model that refuses a call if one of its stacks was exchanged.

    The stacks are searched again only if another module is on the way to one of them, such as a wrapper around it.
    """

    def __init__(self, model: nn.Module, stacks: list[nn.Module]) -> None:
        self.__setstate__({"model": model})
        self.way.extend(_way_to(stacks, model))

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model: Any = state["model"]
        self.way: list[tuple[nn.Module, str, nn.Module]] = []
        self.number = number_of(self)

    def problem(self) -> str:
        """Describes what was exchanged; empty if nothing was."""
        stacks = self.model.position_encoding.record.stacks.values()
        lost = exchanged(self.model, stacks)
        for parent, name, child in self.way:
            other, inside = parent._modules.get(name), {id(module) for module in child.modules()}
            if other is not None and other is not child:
                # The former child may be kept under another name.
                lost = lost or exchanged(other, [record for record in stacks if id(record.stack) in inside])
        if not lost:
            self.way = [*_way_to([record.stack for record in stacks], self.model)]
        return f"This {type(self.model).__name__} was changed after it was patched: {lost}" if lost else ""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called before each forward."""
        if self.way:
            for parent, name, child in self.way:
                if parent._modules.get(name) is not child:
                    break
            else:
                return
        problem = answer_of(self.number, "problem")
        if problem:
            raise UnsupportedError(problem)


def exchanged(model: nn.Module, stacks: Iterable[StackRecord]) -> str:
    """Describes the first patched stack that is no longer inside a model, and what to do; empty if all are."""
    inside = {id(module) for module in model.modules()}
    lost = next((record.stack for record in stacks if id(record.stack) not in inside), None)
    if lost is None:
        return ""
    return (
        f"its {type(lost).__name__} was replaced after patch_model, and the new one lacks this scheme. Call "
        "unpatch_model on the model that the new one was taken from, and patch_model on this one."
    )


def _way_to(wanted: list[nn.Module], model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The children, each after its parent and name, on the way from a model to modules inside it."""
    ids = {*map(id, wanted)}
    for path in [path for path, module in model.named_modules() if path and id(module) in ids]:
        yield from _along(path, model)


def _along(path: str, module: Any) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name in path.split("."):
        yield module, name, module._modules[name]
        module = module._modules[name]


#: The attributes of a `LayerEncoding` that hold parts.
KINDS_IN_LAYERS = ("query_key_map", "logit_bias", "logit_scale")
