"""`extend_context`: changing the context length of a patched model."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError, warn_user
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.anatomy.parts import VISION
from hf_posenc.patching.place.config_entry import is_length
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding, named_part
from hf_posenc.patching.place.lengths import lengths_of, set_length
from hf_posenc.patching.place.model_checks import unwrapped
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.rotary.rope import RotaryMap

ModelType = TypeVar("ModelType", bound=nn.Module)


def extend_context(model: ModelType, tokenizer: Any = None, *, length: int, part: str | None = None) -> ModelType:
    """Sets the context length of a patched model and its tokenizer. In place.

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

    Returns:
        The model.

    Raises:
        SequenceLengthError: if the scheme or the architecture cannot encode that many tokens.
        UnknownNameError: for a part that the model does not have.
        UnsupportedError: if the model is not patched, if the part reads images, or if it has its native positions.
        ValueError: if the length is not an integer from 1 to 2**31 - 1.
        TypeError: if the tokenizer has no `model_max_length`.
    """
    target = unwrapped(model)
    encoding = current_encoding(target)
    if encoding is None:
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
    _refuse_other_parts(encoding, target, part)
    set_length(encoding, target, length, part)
    if holder is not None:
        holder.model_max_length = length
    _warn_if_extrapolating(encoding, target, length, part)
    return model


def context_length(model: Any) -> int | None:
    """The length of a patched model in tokens; `None` if it has none, or is not patched."""
    encoding = current_encoding(unwrapped(model))
    return None if encoding is None or encoding.lengths is None else encoding.lengths.current


def update_tokenizer_length(tokenizer: Any, model: Any, before: int | None = None) -> None:
    """Gives a tokenizer the length of a patched model, if it still has the native one or that of the scheme before.

    A scheme that was made for longer sequences, such as a scaled rotation, changes the length of the model alone. For
    tools that save a model together with its tokenizer. In place.

    Args:
        tokenizer: of the model, or a processor that holds one; without a length, as of images or sound, or `None`, it
            stays as it is.
        model: patched or not.
        before: the `context_length` of the model before it got its scheme.
    """
    encoding, length = current_encoding(unwrapped(model)), context_length(model)
    if encoding is None or encoding.lengths is None or length is None:
        return
    holder = getattr(tokenizer, "tokenizer", tokenizer)
    known = {encoding.lengths.native, before} - {None}
    if getattr(holder, "model_max_length", None) in known:
        holder.model_max_length = length


def _patch_first(target: PreTrainedModel, part: str | None) -> str:
    anatomy = Anatomy(target)
    if len(anatomy.parts) == 1:
        return (
            'Call patch_model(model, scheme) first. patch_model(model, "native") keeps the encoding of a rotary model.'
        )
    return (
        f"Call patch_model(model, scheme, part={anatomy.part(part)!r}) first, and pass the same part= here. This model "
        f"has the parts {', '.join(map(repr, anatomy.parts))}."
    )


def _refuse_other_parts(encoding: PositionEncoding, target: PreTrainedModel, part: str | None) -> None:
    """Refuses a part on whose context length the scheme has no effect."""
    main = named_part(target, part)
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
            f"The rotation of {scheme_label(encoding.config)!r} was made for {known} tokens. With {length} tokens, the "
            "model encounters angles that it was not trained on. Scalings for longer sequences are YarnScaling, "
            "NtkScaling, LinearScaling, DynamicScaling and LongRopeScaling, for example RopeConfig(theta=..., "
            f"scaling=YarnScaling(factor={length / (native or known):g}, original_max_positions={native or known}))."
        )
