"""`extend_context`: the length of a model and its tokenizer, and the methods by which a rotation reaches it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnknownNameError, UnsupportedError, warn_user
from hf_posenc.patching.anatomy.anatomy import VISION, Anatomy, find_stacks, unwrapped
from hf_posenc.patching.inspection import native_scheme
from hf_posenc.patching.patch import patch_model, unpatch_model
from hf_posenc.patching.place.config_entry import is_length
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
)
from hf_posenc.schemes.config import SchemeConfig, walk
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.scaling import RopeScaling

#: (trained length, new length) -> the scheme.
Method = Callable[[int, int], SchemeConfig]


def _scaled(scaling: RopeScaling) -> SchemeConfig:
    return NativeConfig(scaling=scaling)


def _self_extend(trained: int, length: int) -> SchemeConfig:
    window = max(1, trained // 8)
    # The largest distance is about window + length / group. A quarter of the trained length is not used.
    group = ceil(length / max(1, 3 * trained // 4 - window))
    return SelfExtendConfig(NativeConfig(), group=max(2, group), window=window)


#: Their lengths are those of the rotation without any scaling, which they replace.
_SCALINGS: dict[str, Method] = {
    "linear": lambda trained, length: _scaled(LinearScaling(length / trained)),
    "ntk": lambda trained, length: _scaled(NtkScaling(length / trained)),
    "yarn": lambda trained, length: _scaled(YarnScaling(length / trained, trained)),
    "dynamic_ntk": lambda trained, _: _scaled(DynamicScaling(1.0, trained)),
    "dynamic_yarn": lambda trained, _: _scaled(DynamicYarnScaling(trained)),
    "clipped": lambda trained, _: _scaled(ClippedScaling(original_max_positions=trained)),
}
#: They keep the rotation, with its scaling if it has one.
_FAR_PAIRS: dict[str, Method] = {
    "rerope": lambda trained, _: ReRopeConfig(NativeConfig(), window=max(1, trained // 2)),
    "self_extend": _self_extend,
    # Three quarters and an eighth of the trained length, as in the authors' code.
    "dual_chunk": lambda trained, _: DualChunkConfig(
        NativeConfig(), chunk_size=max(2, 3 * trained // 4), local_size=max(1, trained // 8)
    ),
}

ModelType = TypeVar("ModelType", bound=nn.Module)


def extend_context(
    model: ModelType, tokenizer: Any = None, *, length: int, part: str | None = None, method: str | None = None
) -> ModelType:
    """Sets the context length of a patched model and its tokenizer. In place.

    With a `method`, a model with its own rotation is patched first, so that it can read texts of this length without
    training: `extend_context(model, tokenizer, length=32768, method="yarn")`. Options follow from the length that the
    model was trained on and the new one:

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

    Scalings replace a scaling that the model was trained with, as Llama 3.1 was, and count from the length before it.
    The others keep it.

    The config of a model that was patched with a scheme for longer sequences still contains the length of the stock
    architecture, at which tokenizers, sentence-transformers and serving engines truncate texts. This function writes
    the new length to the model's config (`max_position_embeddings`, `n_positions`, or another name), to
    `generation_config.max_length` if that was the old length, to `model.position_encoding.report`, and to
    `tokenizer.model_max_length`. `save_pretrained` saves these values, `from_pretrained` restores them, and
    `export_model` writes them too. `unpatch_model` restores the native length in the config; the tokenizer is
    not part of the model and keeps the new length.

    Whether the model makes good use of the new positions is another question, because only the formula of the scheme is
    known to support them. A rotation without a scaling uses angles that the model was not trained on, and its loss
    rises soon after its training length. A warning then names the scalings for longer sequences.

    If an error is raised, neither the model nor the tokenizer is changed.

    Args:
        model: a patched model, or a PEFT model around one.
        tokenizer: the model's tokenizer, or a processor that holds it. If you pass none, set its `model_max_length` to
            the same length yourself, because most tokenizers truncate at theirs.
        length: number of tokens, including special tokens. May be shorter than before.
        part: the part whose length it is. By default the one whose length is that of the model: the text part, if there
            is one. The encoder of Whisper is the part "audio"; its tokens are 20 ms long.
        method: how the rotation of an unpatched model reaches the length. By default nothing but the length changes.

    Returns:
        The model.

    Raises:
        SequenceLengthError: if the scheme or the architecture cannot encode that many tokens.
        UnknownNameError: for a part that the model does not have, and for an unknown method.
        UnsupportedError: without a method, if the model is not patched or the part has its native positions; with one,
            if the part has another scheme, or no rotation; if the part reads images.
        ValueError: if the length is not an integer from 1 to 2**31 - 1; with a method, if the model has it anyway.
        TypeError: if the tokenizer has no `model_max_length`.
    """
    target = unwrapped(model)
    encoding = current_encoding(target)
    if encoding is None and method is None:
        raise UnsupportedError(
            f"This {type(target).__name__} is not patched, so its length is that of the stock architecture and cannot "
            f"be changed. {_patch_first(target, part)}"
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
    was_patched = encoding is not None
    if method is not None:
        patch_model(model, _scheme_of(method, target, part, length), part=part)
        encoding = current_encoding(target)
    assert encoding is not None
    try:
        _refuse_other_parts(encoding, target, part)
        set_length(encoding, target, length, part)
    except BaseException:
        if method is not None:
            (patch_model(model, "native", part=part) if was_patched else unpatch_model(model))
        raise
    if holder is not None:
        holder.model_max_length = length
    if method is None:
        _warn_if_extrapolating(encoding, target, length, part)
    return model


def _scheme_of(method: str, model: PreTrainedModel, part: str | None, length: int) -> SchemeConfig:
    """The rotation of a model, changed by a method so that it reaches a length."""
    if method not in _SCALINGS | _FAR_PAIRS:
        raise UnknownNameError("method", method, [*_SCALINGS, *_FAR_PAIRS], owner="extend_context")
    native, name, kind = native_scheme(model, part=part), Anatomy(model).part(part), type(model).__name__
    in_force = scheme_in_part(current_encoding(model), name)
    if in_force not in (None, native):
        raise UnsupportedError(
            f"method={method!r} changes the model's own positions, but this {kind} is patched with "
            f"{in_force.label!r}. Call unpatch_model first, or leave out the method to set the length only."
        )
    rotations = [one for one in walk(native) if hasattr(one, "scaling")]
    if not rotations:
        raise UnsupportedError(
            f"method={method!r} changes a rotation, but the positions of this {kind} are {native.label!r}. For "
            "a longer table use hf_posenc.recipes.swap_scheme(model, 'learned', num_positions=..., "
            "table_extension='repeat')."
        )
    stated = native_length(model, [stack for stack in find_stacks(model) if stack.part == name])
    scalings = [one.scaling for one in rotations] if method in _SCALINGS else []
    original = [getattr(scaling, "original_max_positions", None) for scaling in scalings]
    trained = min((each for each in original if each is not None), default=stated)
    if trained is None or stated is None:
        raise UnsupportedError(
            f"The config of this {kind} states no length, so it is unknown how long the texts were that it was trained "
            "on. Patch it with a scaling of your own: patch_model(model, NativeConfig(scaling=YarnScaling(factor=..., "
            "original_max_positions=...)))."
        )
    if length <= stated:
        raise ValueError(
            f"This {kind} reads {stated} tokens anyway. A method is for a length beyond that; got {length}."
        )
    return (_SCALINGS | _FAR_PAIRS)[method](trained, length)


def _patch_first(target: PreTrainedModel, part: str | None) -> str:
    anatomy = Anatomy(target)
    if len(anatomy.parts) == 1:
        return 'Call patch_model(model, scheme) first, or name a method for a model with a rotation: method="yarn".'
    return (
        f"Call patch_model(model, scheme, part={anatomy.part(part)!r}) first, and pass the same part= here. This model "
        f"has the parts {', '.join(map(repr, anatomy.parts))}."
    )


def _refuse_other_parts(encoding: PositionEncoding, target: PreTrainedModel, part: str | None) -> None:
    """Refuses a part on whose context length the scheme has no effect."""
    main = Anatomy(target).part(part)
    if main == VISION:
        raise UnsupportedError(
            f"The {main} part of {type(target).__name__} reads images, so it has no context length in tokens. The "
            "number of patches follows from the size of an image: pass larger images, with "
            "interpolate_pos_encoding=True if the forward of the model takes it."
        )
    patched = list(dict.fromkeys(stack.part for stack in encoding.stacks.values()))
    if part is None and main not in patched:
        raise UnsupportedError(
            f"The context length of this {type(target).__name__} is that of its {main} part, which has its native "
            f"positions (patched: {', '.join(patched)}). Call patch_model(model, scheme) for the {main} part first."
        )


def _warn_if_extrapolating(encoding: PositionEncoding, model: PreTrainedModel, length: int, part: str | None) -> None:
    """Warns if a plain rotation is used beyond the length that it was trained or scaled for."""
    lengths, _ = lengths_of(encoding, model, part)
    native = lengths.native
    # Other maps, and maps with a bias that corrects distant pairs, extrapolate differently.
    stacks = [name for name, stack in encoding.stacks.items() if part in (None, stack.part)]
    plain = [part for part in encoding.parts(stacks) if type(part) is RotaryMap and not part.mapped_again]
    known = max((part.length_reach.made_for or native or length for part in plain), default=length)
    if known < length:
        warn_user(
            f"The rotation of {encoding.config.label!r} was made for {known} tokens. With {length} tokens, the "
            "model encounters angles that it was not trained on. Scalings for longer sequences are YarnScaling, "
            "NtkScaling, LinearScaling, DynamicScaling and LongRopeScaling, for example RopeConfig(theta=..., "
            f"scaling=YarnScaling(factor={length / (native or known):g}, original_max_positions={native or known})). "
            "For a model with its own rotation, extend_context(model, length=..., method='yarn') sets one."
        )
