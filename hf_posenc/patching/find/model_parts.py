"""The parts of a model: text, vision, audio and others, each with a position encoding of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.errors import UnknownNameError
from hf_posenc.patching.find.forward_code import forward_parameters

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
#: Keys of sub-configs that do not name a modality.
_NEUTRAL = frozenset(("encoder", "decoder", "model"))
#: Modalities whose tokens are patches on a grid.
_PIXELS = frozenset({"image", "video"})


@dataclass(frozen=True)
class PartOwner:
    """A `PreTrainedModel` inside a model, and the part it belongs to.

    Args:
        path: path below the model; empty for the model itself.
        module: the `PreTrainedModel`.
        part: the name of its part.
    """

    path: str
    module: Any
    part: str


def part_owners(model: PreTrainedModel) -> Iterator[PartOwner]:
    """Every `PreTrainedModel` in a model with the name of its part.

    A part is named after the key of its sub-config (`vision_config` -> "vision"), or after what its forward reads if
    the key says nothing about it (the encoder of Whisper). In nested composites the names of outer parts precede it
    where it would otherwise be ambiguous ("talker.text"). Attention that belongs to no part of a composite, but
    connects two of them, is the part "connector".
    """
    keys = _config_keys(model.config)
    found = []
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            found.append((path, module, _key_of(path, module, model, keys)))
    known = {key for _, _, key in found}
    for path, module, key in found:
        yield PartOwner(path, module, _shortest_name(key, known))


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


def reads_pixels(model: Any) -> bool:
    """Whether the only input of a `PreTrainedModel` is images or videos, so that its tokens are patches on a grid."""
    if any(name.endswith("input_ids") for name in forward_parameters(type(model))):
        return False  # The text part of a model may inherit the modalities of the whole.
    modalities = model.input_modalities
    found = {modalities} if isinstance(modalities, str) else set(modalities)
    return found <= _PIXELS or takes_pixels(model)


def reads_spectrogram(config: Any) -> bool:
    """Whether a model cuts a spectrogram into patches, so that frequencies are rows and times are columns (AST)."""
    return all(hasattr(config, name) for name in ("num_mel_bins", "max_length", "frequency_stride", "time_stride"))


def takes_pixels(model: Any) -> bool:
    """Whether an argument of the model's forward holds images, videos, or patches and the sizes of their grids."""
    return pixel_argument(model) is not None


def pixel_argument(model: Any) -> str | None:
    """The argument that holds images, videos or patches."""
    names = list(forward_parameters(type(model)))
    for name in names:
        if name.startswith("pixel_values"):
            return name
    return names[1] if any(name in names for name in ("grid_thw", "spatial_shapes", "image_grid_thw")) else None


def reads_features(stack: nn.Module) -> bool:
    """Whether a stack reads features: its forward has an argument for them, and none for token ids."""
    parameters = forward_parameters(type(stack))
    if "input_ids" in parameters:
        return False
    # The audio encoder of Phi-4 calls its frames `hidden_states`, of a width that its config states.
    frames = "hidden_states" in parameters and isinstance(getattr(stack.config, "input_size", None), int)
    return frames or any(name in parameters for name in FEATURES)
