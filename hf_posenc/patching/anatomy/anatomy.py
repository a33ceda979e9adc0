"""Finds the parts of a model and their stacks, in one walk over its modules.

The parts of a model are text, vision, audio and others, each with its own position encoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.entry import REMOTE_CODE
from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.patching.anatomy.architectures import Architecture, architecture_of
from hf_posenc.patching.anatomy.discovery import (
    CROSS_ATTENTION,
    WIDTHS,
    attentions_of,
    first_int,
    position_tables,
    read_attentions,
)
from hf_posenc.patching.anatomy.rotary_functions import number_of_axes, returns_tables
from hf_posenc.patching.anatomy.sites import AddedModule, AttentionLayer, NamedModule, PositionTable
from hf_posenc.patching.forwards import forward_parameters, is_of_transformers, parameters_of, written_in

if TYPE_CHECKING:
    from hf_posenc.patching.layouts.layout import Layout

TEXT = "text"
CONNECTOR = "connector"
VISION = "vision"
#: Names of parts for the modalities of transformers' `input_modalities`.
_MODALITIES = {"image": VISION, "video": VISION, "audio": "audio", "time": "time series", "text": TEXT}
#: Arguments of a forward that show what it reads. Token ids take precedence, because the decoder of a speech model has
#: the modality of the whole model.
_ARGUMENTS = {
    "input_ids": TEXT,
    "pixel_values": VISION,
    "pixel_values_videos": VISION,
    "grid_thw": VISION,
    "input_features": "audio",
    "input_values": "audio",
    "past_values": "time series",
}
#: Keys of sub-configs that do not name a modality.
_NEUTRAL = frozenset(("encoder", "decoder", "model"))


#: The kinds of tokens that a stack may have, which are in `patching/layouts`.
_KINDS: list[type[Layout]] = []


def register_layouts(*kinds: type[Layout]) -> None:
    """Registers kinds of tokens. The first one that recognises a model is taken."""
    _KINDS.extend(kinds)


def layout_of(module: PreTrainedModel) -> type[Layout]:
    """The kind of tokens of a stack, or of a part of a model. With `input_ids`, it is a kind that takes tokens."""
    reads_ids = "input_ids" in forward_parameters(type(module))
    return next(kind for kind in _KINDS if (kind.takes_tokens or not reads_ids) and kind.recognises(module))


def natural_order(path: str) -> list[tuple[int, Any]]:
    """A sort key that puts "layers.10" after "layers.9"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in path.split(".")]


@dataclass(eq=False)
class Stack:
    """A `PreTrainedModel`, and the modules that belong to it and to no `PreTrainedModel` inside it.

    Args:
        path: path below the model; empty for the model itself.
        module: the `PreTrainedModel`.
        members: path and module of everything that belongs to it, in the order of definition. A module that is used at
            several places is listed at each of them.
        part: the part of the model that it belongs to, such as "text".
        name: its name among the stacks of the model: "encoder", "decoder", "model" or its path.
        attentions: its self-attention layers, in order; empty until they are read.
    """

    path: str
    module: Any
    members: list[tuple[str, nn.Module]] = field(default_factory=list)
    part: str = ""
    name: str = ""
    attentions: list[AttentionLayer] = field(default_factory=list)

    def read(self) -> None:
        """Reads its attention layers and what its tokens are.

        Raises:
            UnsupportedError: if its architecture is not supported, or for attention that a scheme would bypass.
        """
        self.architecture.refuse(self.module)
        self.attentions = read_attentions(self)
        self.layout  # noqa: B018 - found before a scheme is placed, which hides native mechanisms

    @property
    def config(self) -> Any:
        """The stack's own config."""
        return self.module.config

    @cached_property
    def kind(self) -> type[Layout]:
        """The kind of its tokens."""
        return layout_of(self.module)

    @cached_property
    def architecture(self) -> Architecture:
        """The declaration of its architecture."""
        return architecture_of(self.module)

    def select(self, wanted: Callable[[str, nn.Module], Any]) -> list[tuple[str, nn.Module]]:
        """The members that `wanted` accepts, in the order in which layers are counted."""
        chosen = [(path, module) for path, module in self.members if wanted(path, module)]
        return sorted(chosen, key=lambda item: natural_order(item[0]))

    def in_definition_order(self) -> list[tuple[str, nn.Module]]:
        """The stack itself, then its members, each module once."""
        first: dict[int, tuple[str, nn.Module]] = {id(self.module): ("", self.module)}
        for path, module in self.members:
            first.setdefault(id(module), (path, module))
        return list(first.values())

    @cached_property
    def computing_attention(self) -> list[tuple[str, nn.Module, str | None]]:
        """Path and module of everything that computes attention, and why it is left alone; `None` if it is patched."""
        return attentions_of(self)

    @cached_property
    def self_attentions(self) -> list[tuple[str, nn.Module]]:
        """Path and module of every self-attention layer that a scheme acts in."""
        return [(path, module) for path, module, reason in self.computing_attention if reason is None]

    @cached_property
    def cross_attentions(self) -> list[tuple[str, nn.Module]]:
        """Path and module of every cross-attention layer."""
        return [(path, module) for path, module, reason in self.computing_attention if reason == CROSS_ATTENTION]

    @cached_property
    def skipped(self) -> list[tuple[str, str]]:
        """Path of everything that computes attention and is left alone, with the reason."""
        return [(path, reason) for path, _, reason in self.computing_attention if reason is not None]

    @cached_property
    def layout(self) -> Layout:
        """What its tokens are."""
        return self.kind.find(self)

    @cached_property
    def tables(self) -> list[PositionTable]:
        """The modules that are tables with a row for each position. Tables over a grid are those of the layout."""
        return [] if self.kind.has_axes else position_tables(self)

    @cached_property
    def rotaries(self) -> list[NamedModule]:
        """Its rotary modules, each once."""
        tables = {id(table.module) for table in self.tables}
        named = self.select(lambda path, module: "Rotary" in type(module).__name__ and id(module) not in tables)
        known = {
            id(module): NamedModule(path, module)
            for path, module in reversed(named)
            if "position_ids" in parameters_of(type(module).forward) or returns_tables(module)
        }
        return list(known.values())[::-1]

    @cached_property
    def has_other_code(self) -> bool:
        """Whether one of its modules runs code from outside transformers, which may be in its decorators."""
        forwards = {type(module).forward for module in self.module.modules()}
        names = {written_in(code) for code in {*forwards, *map(inspect.unwrap, forwards)}}
        return not all(map(is_of_transformers, names))

    @property
    def reads_axes(self) -> bool:
        """Whether one of its rotary modules reads positions on several axes."""
        return any(number_of_axes(rotary.module, None) > 1 for rotary in self.rotaries)

    @cached_property
    def first_layer(self) -> nn.Module | None:
        """The module whose input is the embedded sequence, `layers.0`; `None` if layers are not in a list.

        A stage that projects pixels to patches, or is a list itself, contains layers and is not a layer.
        """
        parts, projection = self.self_attentions[0][0].split("."), self.layout.projection
        for index, part in enumerate(parts):
            if part.isdigit():
                first = next(iter(self.module.get_submodule(".".join(parts[:index])).children()), None)
                stage = first is not None and any(module is projection for module in first.modules())
                if not isinstance(first, nn.ModuleList) and not stage:
                    return first
        return None

    @cached_property
    def hidden_size(self) -> int:
        """Width of the hidden states that the first layer receives."""
        table, projection = self.layout.table(self), self.layout.projection
        shown = None if projection is None else int(projection.out_channels)
        return (shown or first_int(self.config, WIDTHS)) if table is None else table.shape[1]

    @cached_property
    def causal(self) -> bool:
        """Whether its attention is causal."""
        return all(attention.causal for attention in self.attentions)

    @cached_property
    def sparse(self) -> bool:
        """Whether some of its attention never computes the logits of all pairs of tokens."""
        return any(attention.sparse for attention in self.attentions)

    @cached_property
    def mechanism(self) -> str | None:
        """Name of a native mechanism in its attention that a patch silences, other than a rotation; or `None`."""
        relative = (attention.relative for attention in self.attentions if attention.relative is not None)
        return self.architecture.mechanism or next((bias.description for bias in relative), None)

    def layers(self) -> list[int]:
        """Indices of the layers that hold attention."""
        return sorted({attention.layer for attention in self.attentions})


def name_parts(model: PreTrainedModel, stacks: Sequence[Stack]) -> None:
    """Writes the name of its part to every `PreTrainedModel` in a model.

    A part is named after the key of its sub-config (`vision_config` -> "vision"), or after what its forward reads if
    the key says nothing about it (the encoder of Whisper). In nested composites, an ambiguous
    name gets the names of outer parts as a prefix ("talker.text"). Attention that belongs to no part of a composite,
    but connects two of them, is the part "connector".
    """
    paths = reversed([*config_paths(model.config)][1:])  # The first path of a config counts.
    keys = {config: tuple(name.removesuffix("_config") for name in path.split(".")) for config, path in paths}
    keys_of_stacks = [_key_of(stack.path, stack.module, model, keys) for stack in stacks]
    for stack, key in zip(stacks, keys_of_stacks, strict=True):
        stack.part = _shortest_name(key, set(keys_of_stacks))


def config_paths(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[int, str]]:
    """The identity and the path of a config and of those inside it: "text_config", "thinker_config.text_config"."""
    yield id(config), path
    for name, value in config.__dict__.items():
        if isinstance(value, PreTrainedConfig):
            yield from config_paths(value, f"{path}.{name}".lstrip("."))


def _key_of(
    path: str, module: PreTrainedModel, model: PreTrainedModel, keys: dict[int, tuple[str, ...]]
) -> tuple[str, ...]:
    """The name of the part of one module, with the names of the parts around it."""
    names = path.split(".") if path else []
    for above in (".".join(names[:count]) for count in range(len(names), -1, -1)):
        key = keys.get(id(getattr(model.get_submodule(above), "config", None)))
        if key is not None:
            named = tuple(name for name in key if name not in _NEUTRAL)
            return named or (_modality_of(module),)
    composite = any(key[-1] == TEXT for key in keys.values())
    return (CONNECTOR if composite and module.config is model.config else _modality_of(module),)


def _shortest_name(key: tuple[str, ...], known: set[tuple[str, ...]]) -> str:
    """The shortest ending of a key that no other part shares."""
    others = known - {key}
    counts = (count for count in range(1, len(key)) if all(other[-count:] != key[-count:] for other in others))
    return ".".join(key[-next(counts, len(key)) :])


def reads_frames(model: Any) -> bool:
    """Whether a model inside this one reads the pixels of a video, and makes one token of each frame."""
    names = forward_parameters(type(model))
    return "pixel_values_videos" in names and "input_ids" not in names and bool(type(model.config).sub_configs)


def _modality_of(module: nn.Module) -> str:
    """The modality that a module reads, according to its forward or else to its class."""
    if reads_frames(module):
        return "video"
    parameters = forward_parameters(type(module))
    for name, part in _ARGUMENTS.items():
        if name in parameters:
            return part
    stated = getattr(module, "input_modalities", TEXT)
    modalities = [stated] if isinstance(stated, str) else list(stated)
    return next((_MODALITIES.get(modality, modality) for modality in modalities if modality != TEXT), TEXT)


def modules_by_stack(model: nn.Module) -> list[Stack]:
    """Every `PreTrainedModel` in a model with the modules that belong to it, in one walk."""
    stacks: dict[int, Stack] = {}
    pending: list[tuple[str, str, Any, Any]] = [("", "", model, None)]
    while pending:
        path, below, module, owner = pending.pop()
        if isinstance(module, AddedModule) or id(module) in stacks:
            continue
        if isinstance(module, PreTrainedModel) and not (
            owner is not None
            and type(module.config) is type(owner.module.config)
            and owner.kind.includes(module, owner.module)
        ):
            owner, below = Stack(path, module), ""
            stacks[id(module)] = owner
        elif owner is not None:
            owner.members.append((below, module))
        for name, child in reversed([*module.named_children()]):
            pending.append((f"{path}.{name}" if path else name, f"{below}.{name}" if below else name, child, owner))
    return list(stacks.values())


class Anatomy:
    """The parts and the stacks of a model as it is now.

    Raises:
        UnsupportedError: if it has no attention layers, or its architecture is not supported.

    Attributes:
        model: the model.
        verified: names of the parts that short runs have confirmed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        architecture_of(model).refuse(model)
        walked = modules_by_stack(model)
        name_parts(model, walked)
        self._stacks = [stack for stack in walked if stack.self_attentions]
        if not self._stacks:
            kinds = sorted({type(module).__name__ for module in model.modules()})
            raise UnsupportedError(
                f"{type(model).__name__} has no module that is known as softmax self-attention (classes: "
                f"{', '.join(kinds[:12])}), so it cannot be patched. If one of them computes attention, add it to "
                "`attention_classes` with hf_posenc.register_architecture."
            )
        for stack, name in zip(self._stacks, _names(self._stacks, model), strict=True):
            stack.name = name
        self.verified: set[str] = set()

    @cached_property
    def parts(self) -> list[str]:
        """The names of its parts that have self-attention."""
        return list(dict.fromkeys(stack.part for stack in self._stacks))

    @cached_property
    def main(self) -> str:
        """The part that is patched if none is named: the text part, or the only one, or that of the main input."""
        texts = sorted((part for part in self.parts if f".{part}".endswith(f".{TEXT}")), key=len)
        if texts:
            return texts[0]
        main = _modality_of(self.model)
        return main if main in self.parts else self.parts[0]

    def part(self, name: str | None) -> str:
        """The name of a part; `None` stands for the one that is patched by default."""
        if name is not None and name not in self.parts:
            stacks = {stack.path: stack.part for stack in self._stacks}
            remedy = ""
            if name in stacks:
                remedy = f"{name!r} is a stack of the part {stacks[name]!r}, whose stacks share a scheme."
            raise UnknownNameError("part", str(name), self.parts, owner=type(self.model).__name__, remedy=remedy)
        return self.main if name is None else str(name)

    def stacks(self, parts: Collection[str] | None = None) -> list[Stack]:
        """The stacks of some parts, with their attention layers, tables and rotary modules. Each is read once.

        Args:
            parts: names of parts; by default the one that is patched if none is named.

        Raises:
            UnsupportedError: if the architecture of a stack is not supported.
            UnknownNameError: for a part that the model does not have.
        """
        wanted = [self.main] if parts is None else [self.part(name) for name in parts]
        stacks = [stack for stack in self._stacks if stack.part in wanted]
        for stack in stacks:
            if not stack.attentions:
                stack.read()
        return stacks

    @cached_property
    def is_runnable(self) -> bool:
        """Whether the model can be run: it is not on the meta device, or accelerate loads its weights."""
        hooked = any("_hf_hook" in module.__dict__ for module in self.model.modules())
        return hooked or not any(parameter.device.type == "meta" for parameter in self.model.parameters())


def _names(stacks: list[Stack], model: PreTrainedModel) -> list[str]:
    """The names of the stacks of a model, by their paths below the base model.

    Classes with another head, or with one stack less, have the same names, because they load the same checkpoints.
    """
    base = "" if model.base_model is model else model.base_model_prefix
    names = [_name(stack.path, base) for stack in stacks]
    short = ["decoder" if "decoder" in name else "encoder" if "encoder" in name else name for name in names]
    return names if len(set(short)) < len(short) else short


def _name(path: str, base: str) -> str:
    if path == base:
        return "model"
    return path.removeprefix(f"{base}.").replace(".", "_") or "head"


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, without a PEFT model around it.

    Raises:
        TypeError: for anything else.
        UnsupportedError: if no scheme can be placed in the model.
    """
    base: Any = getattr(model, "get_base_model", None)
    inner = model if base is None else base()
    if not isinstance(inner, PreTrainedModel):
        given = f"the class {inner.__name__}" if isinstance(inner, type) else type(inner).__name__
        named = inner.named_modules() if isinstance(inner, nn.Module) else ()
        inside = next((each for each in named if isinstance(each[1], PreTrainedModel)), None)
        if inside is not None:
            advice = f"Pass the {type(inside[1]).__name__} inside it: model.get_submodule({inside[0]!r})."
        elif isinstance(inner, str | type):
            advice = "Load the model first, for example with AutoModel.from_pretrained."
        elif type(inner).__module__.startswith(("torch.nn.modules", "transformers.models")):
            advice = "Pass the whole model that contains it."
        else:
            advice = "Pass the transformers model itself, for example pipeline.model or trainer.model."
            if isinstance(inner, nn.Module):
                advice = (
                    "It contains no model of a class that is derived from PreTrainedModel; others are not supported."
                )
        raise TypeError(f"Expected a transformers PreTrainedModel, got {given}. {advice}")
    if is_part(inner):
        raise UnsupportedError(
            f"{type(inner).__name__} is a part of a model and is saved with it, so a scheme in this part alone would "
            "be lost. Patch the whole model (the options `layers` and `elsewhere` choose layers; in a model "
            "of several modalities, `part` chooses the part)."
        )
    _refuse_recomputed_queries(inner)
    return inner


def is_part(model: PreTrainedModel) -> bool:
    """Whether a model cannot be saved separately: an encoder or a decoder that transformers does not export."""
    name = type(model).__name__
    return type(model).__module__.startswith("transformers.models.") and not hasattr(transformers, name)


def refuse_remote_code(model: PreTrainedModel) -> None:
    """Refuses a model that was exported to "remote_code": its file has replaced the positions of the stock class."""
    if (parts := getattr(model.config, REMOTE_CODE, None)) is not None:
        raise UnsupportedError(
            f"This {type(model).__name__} runs the code of an export, with the positions {parts['scheme']!r}. They "
            "cannot be changed or exported again. Load the checkpoint that was exported, or the stock model, and patch "
            "that."
        )


def _refuse_recomputed_queries(model: nn.Module) -> None:
    """Refuses a model with adaption prompts whose queries are rotated."""
    for module in model.modules():
        kind = type(module)
        if (kind.__module__, kind.__name__) == ("peft.tuners.adaption_prompt.layer", "AdaptedAttention"):
            raise UnsupportedError(
                "PEFT's adaption prompts (Llama-Adapter) compute the queries of a layer a second time and rotate them "
                f"with the phases of the stock model, so the scheme of this {type(model).__name__} cannot be changed "
                "now. Patch the model before they are added, or remove them (delete_adapter of the PeftModel, for each "
                "adapter) and patch the model inside (peft_model.base_model.model)."
            )
