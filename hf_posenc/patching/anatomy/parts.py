"""The parts of a model: text, vision, audio and others, each with a position encoding of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.errors import UnknownNameError
from hf_posenc.patching.anatomy.forward_code import forward_parameters

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import StackModules

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
#: Arguments that hold features and not tokens, so that their shape does not show the number of tokens.
FEATURES = ("input_features", "input_values", "past_values", "patch_input", "audio_mel", "spectrogram", "latents")
#: The config attribute with the number of tokens that the table of an encoder of features has.
SOURCE_LENGTH = "max_source_positions"
#: Keys of sub-configs that do not name a modality.
_NEUTRAL = frozenset(("encoder", "decoder", "model"))


def name_parts(model: PreTrainedModel, stacks: Sequence[StackModules]) -> None:
    """Writes the name of its part to every `PreTrainedModel` in a model.

    A part is named after the key of its sub-config (`vision_config` -> "vision"), or after what its forward reads if
    the key says nothing about it (the encoder of Whisper). In nested composites the names of outer parts precede it
    where it would otherwise be ambiguous ("talker.text"). Attention that belongs to no part of a composite, but
    connects two of them, is the part "connector".
    """
    keys = _config_keys(model.config)
    own = [_key_of(stack.path, stack.module, model, keys) for stack in stacks]
    for stack, key in zip(stacks, own, strict=True):
        stack.part = _shortest_name(key, set(own))


def default_part(model: PreTrainedModel, parts: list[str]) -> str:
    """The part that is patched if none is named: the text part, or else the only one, or the one of the main input."""
    if TEXT in parts:
        return TEXT
    texts = sorted((part for part in parts if part.endswith(f".{TEXT}")), key=len)
    if texts:
        return texts[0]
    main = _modality_of(model)
    return main if main in parts else parts[0]


def check_part(part: Any, parts: list[str], model: PreTrainedModel) -> str:
    """Checks the name of a part.

    Raises:
        UnknownNameError: if the model has no such part; the message lists its parts.
    """
    if part not in parts:
        raise UnknownNameError("part", str(part), parts, owner=type(model).__name__)
    return str(part)


def _config_keys(config: PreTrainedConfig) -> dict[int, tuple[str, ...]]:
    """The keys that lead to every sub-config, by the id of the sub-config."""
    found: dict[int, tuple[str, ...]] = {}

    def visit(outer: Any, keys: tuple[str, ...]) -> None:
        for name, inner in outer.__dict__.items():
            if isinstance(inner, PreTrainedConfig) and id(inner) not in found:
                found[id(inner)] = (*keys, name.removesuffix("_config"))
                visit(inner, found[id(inner)])

    visit(config, ())
    return found


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
    """The last names of a key that no other part shares."""
    for count in range(1, len(key)):
        own = key[-count:]
        if not any(other != key and other[-count:] == own for other in known):
            return ".".join(own)
    return ".".join(key)


def _modality_of(module: nn.Module) -> str:
    """What a module reads, according to its forward or else to its class."""
    parameters = forward_parameters(type(module))
    for name, part in _ARGUMENTS.items():
        if name in parameters:
            return part
    stated = getattr(module, "input_modalities", TEXT)
    modalities = [stated] if isinstance(stated, str) else list(stated)
    return next((_MODALITIES.get(one, one) for one in modalities if one != TEXT), TEXT)


def inner_part(module: nn.Module, config: Any) -> str | None:
    """The part of a stack that a module belongs to, if its config is not that of the stack, but one inside it."""
    own = getattr(module, "config", None)
    names = (name for name, inner in config.__dict__.items() if isinstance(inner, PreTrainedConfig) and inner is own)
    name = next(names, None)
    return None if name is None else name.removesuffix("_config")
