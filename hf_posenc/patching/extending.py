"""`extend_context`: the length of a model and its tokenizer, and the methods by which a rotation reaches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnknownNameError, UnsupportedError, warn_user
from hf_posenc.patching.anatomy.anatomy import VISION, Anatomy, unwrapped
from hf_posenc.patching.anatomy.discovery import spans_of
from hf_posenc.patching.anatomy.short_runs import NotRunnableError, run_briefly
from hf_posenc.patching.inspection import native_scheme
from hf_posenc.patching.patch import patch_model, unpatch_model
from hf_posenc.patching.place.config_entry import at_native_lengths, is_length
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding, scheme_in_part
from hf_posenc.patching.place.lengths import lengths_of, native_length, set_length
from hf_posenc.schemes import (
    ClippedScaling,
    DualChunkConfig,
    DynamicScaling,
    DynamicYarnScaling,
    LinearScaling,
    NativeConfig,
    NtkScaling,
    ReRopeConfig,
    SelfExtendConfig,
    YarnScaling,
    list_schemes,
)
from hf_posenc.schemes.arrangement.native import ONLY_WINDOWS_ROTATE, far_layers
from hf_posenc.schemes.config import SchemeConfig, walk
from hf_posenc.schemes.position_maps.pairwise import FarPositionsConfig
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.scaling import RopeScaling
from hf_posenc.version import REPOSITORY


def _self_extend(trained: int, length: int) -> SchemeConfig:
    window = max(1, trained // 8)
    # The largest distance is about window + length / group. A quarter of the trained length is not used.
    group = ceil(length / max(1, 3 * trained // 4 - window))
    return SelfExtendConfig(NativeConfig(), group=max(2, group), window=window)


#: From the trained length and the new one. Lengths are those of the rotation without any scaling, which they replace.
_SCALINGS: dict[str, Callable[[int, int], RopeScaling]] = {
    "linear": lambda trained, length: LinearScaling(length / trained),
    "ntk": lambda trained, length: NtkScaling(length / trained),
    "yarn": lambda trained, length: YarnScaling(length / trained, trained),
    "dynamic_ntk": lambda trained, _: DynamicScaling(1.0, trained),
    "dynamic_yarn": lambda trained, _: DynamicYarnScaling(trained),
    "clipped": lambda trained, _: ClippedScaling(original_max_positions=trained),
}
#: From the same lengths. They keep the rotation, with its scaling if it has one.
_FAR_PAIRS: dict[str, Callable[[int, int], SchemeConfig]] = {
    "rerope": lambda trained, _: ReRopeConfig(NativeConfig(), window=max(1, trained // 2)),
    "self_extend": _self_extend,
    # Three quarters and an eighth of the trained length, as in the authors' code.
    "dual_chunk": lambda trained, _: DualChunkConfig(
        NativeConfig(), chunk_size=max(3, 3 * trained // 4), local_size=max(1, trained // 8)
    ),
}
#: What is taken without a `method`: the first that the model accepts, in the order of the study of longer texts. Each
#: with the share of the trained length up to which texts are read as before.
_RECOMMENDED = {"rerope": "half of ", "dual_chunk": "three quarters of ", "dynamic_yarn": ""}
_STUDY = f"{REPOSITORY}/blob/main/docs/study/long_context/results.md"

ModelType = TypeVar("ModelType", bound=nn.Module)


def extend_context(
    model: ModelType, tokenizer: Any = None, *, length: int, part: str | None = None, method: str | None = None
) -> ModelType:
    """Sets the context length of a model and its tokenizer. In place.

    A model with its own rotation is patched first, so that it can read texts of this length without training:
    `extend_context(model, tokenizer, length=32768)`. The method is chosen by a study of such methods, and a warning
    says which and why. `method="yarn"` selects YaRN instead. Options follow from the trained length and the new one:

    ================  ============================================================================
    "linear", "ntk"   `LinearScaling` and `NtkScaling` by the factor new length / trained length
    "yarn"            `YarnScaling` by this factor
    "dynamic_ntk"     `DynamicScaling`, whose factor follows the length of the text
    "dynamic_yarn"    `DynamicYarnScaling`, the same for YaRN
    "clipped"         `ClippedScaling` of the pairs that complete no turn within the trained length
    "rerope"          `ReRopeConfig` with a window of half the trained length
    "self_extend"     `SelfExtendConfig` with a window of an eighth of it, and groups large enough for the new length
    "dual_chunk"      `DualChunkConfig` with chunks of three quarters of it, an eighth of it local
    ================  ============================================================================

    Scalings replace a scaling that the model was trained with, as Llama 3.1 was, and use the length before it. The
    other methods keep that scaling. Layers with a sliding or chunked window keep their rotation.

    If the model, or its `part`, is already patched, only its length changes, unless you name a method. A plain rotation
    uses angles that the model was not trained on, and its loss rises soon after its training length: a warning says so.

    The new length is written to the model's config (`max_position_embeddings`, `n_positions`, or another name), to
    `generation_config.max_length` if that was the old length, to `model.position_encoding.report`, and to
    `tokenizer.model_max_length`. It is saved and loaded with the model, and exported with it. `unpatch_model`
    restores the native length in the config; the tokenizer keeps the new one.

    If an error is raised, neither the model nor the tokenizer is changed.

    Args:
        model: a model with its own rotation, a patched model, or a PEFT model around one.
        tokenizer: the model's tokenizer, or a processor that holds it. If you pass none, set its `model_max_length` to
            the same length yourself, because most tokenizers truncate at theirs.
        length: number of tokens, including special tokens. May be shorter than before.
        part: the part whose length is set. By default the one that determines the length of the model: any text part.
            The encoder of Whisper is the part "audio"; its tokens are 20 ms long.
        method: how the rotation reaches the length. By default, the first of "rerope", "dual_chunk" and "dynamic_yarn"
            that a model accepts, if it is not patched.

    Returns:
        The model.

    Raises:
        SequenceLengthError: if the scheme or the architecture cannot encode that many tokens.
        UnknownNameError: for a part that the model does not have, and for an unknown method.
        UnsupportedError: if the part is not patched and has no rotation; with a method, if it has another scheme or no
            rotation; if it reads images.
        ValueError: if the length is not an integer from 1 to 2**31 - 1; if a method would be used for a length that the
            model has anyway.
        TypeError: if the tokenizer has no `model_max_length`.
    """
    target = unwrapped(model)
    name = Anatomy(target).part(part)
    if name == VISION:
        raise UnsupportedError(
            f"The {name} part of {type(target).__name__} reads images, so it has no context length in tokens. The "
            "number of patches follows from the size of an image: pass larger images, with "
            "interpolate_pos_encoding=True if the forward of the model takes it."
        )
    if not is_length(length):
        raise ValueError(
            f"length is {length!r}, of type {type(length).__name__}; expected an int, the number of tokens, from 1 to "
            "2147483647."
        )
    holder = getattr(tokenizer, "tokenizer", tokenizer)
    if holder is not None and not hasattr(holder, "model_max_length"):
        raise TypeError(
            f"{type(tokenizer).__name__} has no model_max_length; expected a transformers tokenizer, or a processor "
            "that holds one."
        )
    before, cut_at = scheme_in_part(current_encoding(target), name), getattr(holder, "model_max_length", None)
    if holder is not None:
        holder.model_max_length = length
    try:
        if method is None and before is not None:
            _warn_if_extrapolating(cast(PositionEncoding, current_encoding(target)), before, target, length, name)
        else:
            reason = _change_rotation(model, method, name, length)
            if reason:
                unset = " No tokenizer was passed: set its model_max_length too, where most tokenizers cut a text."
                warn_user(reason + unset * (holder is None))
        set_length(cast(PositionEncoding, current_encoding(target)), target, length, part)
    except BaseException:
        if holder is not None:
            holder.model_max_length = cut_at
        if scheme_in_part(current_encoding(target), name) != before:
            (unpatch_model if before is None else partial(patch_model, scheme="native"))(model, part=name)
        raise
    return model


def _change_rotation(model: nn.Module, method: str | None, part: str, length: int) -> str:
    """Patches a part by a method, or by the first recommended one that it accepts. Returns what a user should know."""
    if method not in (None, *_SCALINGS, *_FAR_PAIRS):
        hint = f"{method!r} is a scheme: use patch_model, then extend_context without a method." * (
            method in list_schemes()
        )
        raise UnknownNameError("method", str(method), [*_SCALINGS, *_FAR_PAIRS], owner="extend_context", hint=hint)
    target = unwrapped(model)
    anatomy = Anatomy(target)
    native, kind = native_scheme(target, part=part), f"{part} part of this {type(target).__name__}"
    in_force = scheme_in_part(current_encoding(target), part)
    if in_force not in (None, native):
        raise UnsupportedError(
            f"method={method!r} changes the model's own positions, but the {kind} is patched with {in_force.label!r}. "
            "Call unpatch_model first, or leave out the method to set the length only."
        )
    rotations = [scheme for scheme in walk(native) if hasattr(scheme, "scaling")]
    if not rotations:
        raise UnsupportedError(
            f"The methods of extend_context change a rotation by one position for each token, and the positions of the "
            f"{kind} are {native.label!r}. Call patch_model(model, scheme, part={part!r}) first, with 'native' if "
            "they reach this length. To make a learned table longer, use hf_posenc.recipes.swap_scheme(model, "
            f"'learned', part={part!r}, num_positions=..., table_extension='repeat')."
            + (f" This model has the parts {', '.join(map(repr, anatomy.parts))}." if len(anatomy.parts) > 1 else "")
        )
    stacks = anatomy.stacks([part])
    with at_native_lengths(target.config):
        stated, spans = native_length(target, stacks), spans_of(stacks)
    if stated is None:
        raise UnsupportedError(
            f"The config of the {kind} has no length, so the length of its training texts is unknown. Patch it with "
            "your own scaling: patch_model(model, NativeConfig(scaling=YarnScaling(factor=..., "
            "original_max_positions=...)))."
        )
    scalings = [scheme.scaling for scheme in rotations if scheme.scaling is not None]
    original: list[Any] = [getattr(scaling, "original_max_positions", None) for scaling in scalings]
    # The config may state the length before the scaling, which then states both.
    extending = (scaling for scaling in scalings if hasattr(scaling, "original_max_positions"))
    trained = max([stated, *(scaling.made_for(None) or 0 for scaling in extending)])
    unscaled = stated if not original else None if None in original else min(original)
    layers = {attention.layer for stack in stacks for attention in stack.attentions}
    far = far_layers(native, spans) & layers
    if length <= trained or not far:
        reason = f"The rotation of the {kind} reaches {trained} tokens." if length <= trained else ONLY_WINDOWS_ROTATE
        if method is not None:
            raise ValueError(f"{reason} No method is needed for that length. Leave out method={method!r}.")
        patch_model(model, "native", part=part)
        return "" if length <= trained else f"extend_context has only changed the length. {reason}"
    refusals = []
    for name in _RECOMMENDED if method is None else (method,):
        try:
            if name in _FAR_PAIRS:
                patch_model(model, _FAR_PAIRS[name](trained, length), part=part, layers=None if far == layers else far)
            elif unscaled is not None:
                patch_model(model, NativeConfig(scaling=_SCALINGS[name](unscaled, length)), part=part)
            else:
                raise UnsupportedError(
                    f"The rotation of the {kind} has the scaling {scalings[0]}, whose config does not state the length "
                    f"before scaling. {name!r} would replace this scaling, and needs that length. "
                    f"{', '.join(map(repr, _FAR_PAIRS))} keep the scaling."
                )
            with contextlib.suppress(NotRunnableError):
                run_briefly(anatomy, stacks, 3)  # Some refusals come with the first call.
            return _reason(name) if method is None else ""
        except (UnsupportedError, ValueError) as error:
            if method is not None:
                raise
            refusals.append(f"method={name!r}: {error}")
    raise UnsupportedError(f"The {kind} accepts no recommended method. {' '.join(refusals)}")


def _reason(taken: str) -> str:
    """Why a recommended method was taken."""
    order = list(_RECOMMENDED)
    refused = " and ".join(map(repr, order[: order.index(taken)]))
    return (
        f"extend_context chose method={taken!r}, the first in the order of a study of SmolLM2 that this model accepts"
        f"{f' (it does not accept {refused})' if refused else ''}: {_STUDY}. Texts of up to "
        f"{_RECOMMENDED[taken]}the trained length are read as before. In the study, no method was shown to be better "
        "than reading the last 4,096 tokens alone, and few facts further back were found. To choose another one, pass "
        "method=; a model with method='yarn' also runs without hf_posenc."
        + " Past the original length, generate() recomputes the text for every token."
        * (taken == "dynamic_yarn")
    )


def _warn_if_extrapolating(
    encoding: PositionEncoding, config: SchemeConfig, model: PreTrainedModel, length: int, part: str
) -> None:
    """Warns if a rotation meets distances in the new length that it was neither trained nor scaled for."""
    native = lengths_of(encoding, model, part)[0].native
    stacks = Anatomy(model).stacks([part])
    with at_native_lengths(model.config):
        growing = far_layers(config, spans_of(stacks))
    for stack in stacks:
        for attention, layer in zip(stack.attentions, encoding.stacks[stack.name].layers, strict=True):
            rotation = layer.query_key_map
            # Other maps extrapolate differently.
            if attention.layer not in growing or type(rotation) is not RotaryMap:
                continue
            made_for = rotation.length_reach.made_for or native or length
            scheme = config.for_layer(attention.layer, attention.layer_type)
            far = [part for part in walk(scheme) if isinstance(part, FarPositionsConfig)]
            if min([length, *(1 + part.greatest_distance(length) for part in far)]) <= made_for:
                continue
            if far:
                remedy = (
                    f"The options of {far[0].name!r} are those of a shorter text. Call unpatch_model, and then "
                    "extend_context(model, length=..., method=...) for options that follow from the length."
                )
            else:
                trained = native or made_for
                remedy = (
                    "Scalings for longer sequences are YarnScaling, NtkScaling, LinearScaling, DynamicScaling and "
                    "LongRopeScaling, for example RopeConfig(theta=..., scaling=YarnScaling(factor="
                    f"{length / trained:g}, original_max_positions={trained})). For a model with its own rotation, "
                    "extend_context(model, length=..., method='yarn') sets one."
                )
            warn_user(
                f"The rotation of {scheme.label!r} was made for {made_for} tokens. With {length} tokens, the model "
                f"encounters angles that it was not trained on. {remedy}"
            )
            return
