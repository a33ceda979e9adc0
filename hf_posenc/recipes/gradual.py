"""Gradual swaps from one scheme to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from hf_posenc.errors import UnsupportedError, warn_user
from hf_posenc.patching.anatomy.anatomy import Stack, unwrapped
from hf_posenc.patching.inspection import native_scheme_of
from hf_posenc.patching.patch import place_scheme, schedule
from hf_posenc.patching.place.config_entry import attach_entry, refresh_names
from hf_posenc.patching.place.encoding import (
    PositionEncoding,
    StackEncoding,
    current_encoding,
    scheme_in_part,
    stacks_in_part,
)
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.schemes import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.arrangement.blended import BlendedConfig
from hf_posenc.schemes.arrangement.cross_attention import CrossAttentionConfig
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.outer_parts import is_blend
from hf_posenc.schemes.refusals import GRADUAL_SWAP
from hf_posenc.schemes.registry import SchemeLike, as_scheme
from hf_posenc.schemes.validation import check_integer


def begin_blend(model: nn.Module, scheme: SchemeLike, *, part: str | None = None) -> PositionEncoding:
    """Patches a model with a blend of its current scheme and a new one, at strength 0: outputs do not change.

    The learned parameters of the current scheme are kept and frozen.

    Args:
        model: patched or not.
        scheme: the new scheme of one part, in any form that `patch_model` accepts.
        part: the part of a composite model that gets it, as in `patch_model`.

    Returns:
        The encoding. Everything that it places in this part of the model is a blend.

    Raises:
        UnsupportedError: if the model already has a blend, if no scheme describes its native mechanism, or if one of
            the two schemes cannot be blended.
    """
    return place_blend(Transaction(model), as_scheme(scheme), part)


def place_blend(transaction: Transaction, scheme: SchemeConfig, part: str | None = None) -> PositionEncoding:
    """`begin_blend` in a transaction, whose anatomy of the model has been used before."""
    previous = transaction.encoding
    if previous is not None and _blends_in(previous.config):
        raise UnsupportedError(
            f"This model is already a blend ({previous.config!r}). Train it to the end and call finish_blend(model), "
            "or remove the blend with unpatch_model."
        )
    part = transaction.anatomy.part(part)
    in_force = scheme_in_part(previous, part)
    placed = [] if previous is None or in_force is None else places_of_parts(stacks_in_part(previous, part))
    old = native_scheme_of(transaction, part) if in_force is None else in_force
    place_scheme(transaction, _blend(old, scheme, transaction.anatomy.stacks([part])), part)
    encoding = transaction.encoding
    assert encoding is not None
    if placed:
        for before, after in zip(placed, places_of_parts(stacks_in_part(encoding, part)), strict=True):
            if before is not None:
                after.old.load_state_dict(before.state_dict())
    freeze_old(encoding)
    return encoding


def blend_strength(model: nn.Module) -> float | None:
    """Returns the strength of the new scheme in a blend, between 0 and 1; `None` for a model without a blend."""
    encoding = current_encoding(unwrapped(model))
    return None if encoding is None else next((blend.strength for blend in _blends_in(encoding.config)), None)


def set_blend_strength(model: nn.Module, strength: float) -> None:
    """Sets the strength of the new scheme in a blend. It is also stored in the model's config, and so in checkpoints.

    Raises:
        ValueError: for a strength outside [0, 1].
        UnsupportedError: for a model without a blend.
    """
    encoding = _blend_of(unwrapped(model))
    config = _with_blends(encoding.config, lambda blend: dataclasses.replace(blend, strength=float(strength)))
    for part in places_of_parts(encoding.stacks):
        if is_blend(part):
            part.strength = float(strength)
    encoding.record.scheme = config
    assert encoding.record.active_config is not None
    attach_entry(encoding.record.active_config.config, config.to_dict())
    refresh_names(encoding, scheme_changed=True)


def finish_blend(model: nn.Module) -> None:
    """Replaces a blend at strength 1 by its new scheme.

    The parameters stay the same objects, so an optimizer continues to train them.

    Raises:
        UnsupportedError: for a model without a blend, or with a strength below 1.
    """
    transaction = Transaction(model)
    encoding = _blend_of(transaction.model)
    if (strength := blend_strength(transaction.model)) != 1:
        raise UnsupportedError(
            f"The strength of the new scheme is {strength}: removing the old scheme now would change the outputs of "
            "the model. Train to strength 1 first, or call set_blend_strength(model, 1.0) to skip the rest."
        )
    whole = encoding.config
    schemes = whole.by_part() if isinstance(whole, PartsConfig) else {transaction.anatomy.main: whole}
    # `begin_blend` refuses a second blend.
    part, config = next((part, scheme) for part, scheme in schemes.items() if _blends_in(scheme))
    blended = places_of_parts(stacks_in_part(encoding, part))
    trained = [place.new if is_blend(place) else None for place in blended]
    place_scheme(transaction, new_scheme(config), part)
    plain = transaction.encoding
    assert plain is not None
    for source, place in zip(trained, places_of_parts(stacks_in_part(plain, part)), strict=True):
        for name, module in [] if source is None else source.named_modules():
            place.get_submodule(name)._parameters.update(module._parameters)


def new_scheme(config: SchemeConfig) -> SchemeConfig:
    """Returns the new scheme of a blend, or of a schedule of blends, in one part of a model."""
    new = _with_blends(config, attrgetter("new"))
    return new.layers[0] if isinstance(new, ScheduleConfig) and len(set(new.layers)) == 1 else new


def freeze_old(encoding: PositionEncoding) -> None:
    """Freezes the parameters of the old scheme in the blends of an encoding."""
    for part in places_of_parts(encoding.stacks):
        if is_blend(part) and part.old is not None:
            part.old.requires_grad_(False)


def places_of_parts(stacks: Mapping[str, StackEncoding]) -> list[Any]:
    """Every place of a part of a scheme in some stacks of a model, in order; `None` for an empty place."""
    places: list[Any] = []
    for stack in stacks.values():
        places.append(stack.additive)
        for layer in stack.layers:
            places += [layer.query_key_map, layer.logit_bias, layer.logit_scale]
    return places


def _blend_of(target: PreTrainedModel) -> PositionEncoding:
    encoding = current_encoding(target)
    if encoding is None or not _blends_in(encoding.config):
        raise UnsupportedError(
            f"This {type(target).__name__} has no blend of two schemes. Begin with swap_scheme(model, scheme, "
            "gradual=True)."
        )
    return encoding


def _blends_in(config: SchemeConfig) -> list[BlendedConfig]:
    if isinstance(config, PartsConfig | ScheduleConfig):
        return [blend for child in config.children().values() for blend in _blends_in(child)]
    return [config] if isinstance(config, BlendedConfig) else []


def _blend(old: SchemeConfig, new: SchemeConfig, stacks: list[Stack]) -> SchemeConfig:
    """Builds one blend for all layers, or a schedule of blends if one of the schemes differs between layers."""
    if not isinstance(old, LayeredConfig) and not isinstance(new, LayeredConfig):
        return BlendedConfig(old, new)
    if isinstance(old, CrossAttentionConfig) or isinstance(new, CrossAttentionConfig):
        raise UnsupportedError(GRADUAL_SWAP.message("it acts in cross-attention, which has no blend", "a scheme"))
    schedule(new, stacks, None, None)  # Raises if an arrangement does not fit these layers.
    types = {attention.layer: attention.layer_type for stack in stacks for attention in stack.attentions}

    places = [(layer, types.get(layer)) for layer in range(max(types) + 1)]
    return ScheduleConfig(layers=tuple(BlendedConfig(old.for_layer(*place), new.for_layer(*place)) for place in places))


def _with_blends(config: SchemeConfig, changed: Callable[[BlendedConfig], SchemeConfig]) -> SchemeConfig:
    """A scheme, a schedule, or the schemes of parts, with another scheme in place of each blend."""
    if isinstance(config, PartsConfig | ScheduleConfig):
        return config.with_children({at: _with_blends(child, changed) for at, child in config.children().items()})
    return changed(config) if isinstance(config, BlendedConfig) else config


class GradualSwapCallback(TrainerCallback):
    """Increases the strength of a model's new scheme at every step, and removes the old scheme at the end.

    Before optimizer step `n`, counted from 0, the strength becomes `min(1, (n + 1) / steps)`. It depends only on the
    step, so a resumed run continues correctly. When the training ends, the old scheme is removed::

        swap_scheme(model, "alibi", gradual=True)
        Trainer(model, ..., callbacks=[GradualSwapCallback(steps=200)]).train()
        model.save_pretrained(...)  # a model with "alibi"

    An intermediate checkpoint contains the blend with its strength, and `from_pretrained` loads it as a blend.

    Args:
        steps: number of optimizer steps after which only the new scheme is active. The training may continue after
            that.

    Raises:
        ValueError: for less than one step.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        check_integer(self, "steps", minimum=1)

    def strength(self, step: int) -> float:
        """Returns the strength during an optimizer step, counted from 0."""
        return min(1.0, (step + 1) / self.steps)

    def match_checkpoint(self, model: Any, step: int) -> None:
        """Sets the strength for a checkpoint saved after `step` steps, before it is loaded."""
        if blend_strength(plain_model(model)) is not None:
            set_blend_strength(plain_model(model), self.strength(step - 1))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets the strength of the last completed step, so that a first evaluation uses the right model.

        Raises:
            ValueError: as `check_training`.
            UnsupportedError: if the model has no blend.
        """
        self.check_training(args, state.max_steps)
        set_blend_strength(plain_model(kwargs["model"]), self.strength(state.global_step - 1))

    def check_training(self, args: TrainingArguments, max_steps: int) -> None:
        """Checks the arguments of a training of `max_steps` optimizer steps.

        Raises:
            ValueError: if the training ends before only the new scheme is active, or may select a best checkpoint from
                before that.
        """
        if max_steps < self.steps:
            raise ValueError(
                f"The gradual swap takes {self.steps} steps, but this training ends after {max_steps}. Use fewer "
                "gradual steps, or train longer."
            )
        if args.load_best_model_at_end and (args.eval_delay or 0) < self.steps:
            raise ValueError(
                f"load_best_model_at_end may choose a checkpoint from the first {self.steps} steps, in which the old "
                f"scheme is still active. Set eval_delay={self.steps}, or omit load_best_model_at_end."
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets the strength of the step that is about to begin."""
        set_blend_strength(plain_model(kwargs["model"]), self.strength(state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Removes the old scheme, unless the training was stopped before strength 1."""
        model = plain_model(kwargs["model"])
        strength = blend_strength(model)
        if strength == 1:
            finish_blend(model)
            return
        warn_user(
            f"The training stopped after {state.global_step} of {self.steps} gradual steps, so the model is still a "
            f"blend with strength {strength}. Continue the training, or skip the rest with set_blend_strength(model, "
            "1.0) and finish_blend(model)."
        )


def plain_model(model: Any) -> Any:
    """Returns the model inside the wrappers of accelerate."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model)
