"""Leading a model from one scheme to another by degrees."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching import native_scheme, patch_model
from hf_posenc.patching.find.discovery import find_stacks
from hf_posenc.patching.place.config_entry import attach_entry
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.in_force import current_encoding
from hf_posenc.patching.place.refusals import unwrapped
from hf_posenc.patching.place.requested_scheme import SchemeLike, schedule, scheme_config
from hf_posenc.patching.place.scheme_name import refresh_names
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.schemes import LayeredConfig, ScheduleConfig
from hf_posenc.schemes.arrangement.blended import BlendedConfig, BlendedPart
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.parts import Part

#: The parts of a layer, as `LayerEncoding` names them.
LAYER_PARTS = ("query_key_map", "logit_bias", "logit_scale")


def begin_blend(model: nn.Module, scheme: SchemeLike) -> PositionEncoding:
    """Puts a blend of the scheme in force and a new one into a model, at strength 0: it computes what it did.

    What the scheme in force has learned is taken over, and frozen: it is on its way out.

    Args:
        model: patched or not.
        scheme: the new one, in any form that `patch_model` takes.

    Returns:
        The encoding, in which every part is a `BlendedPart`.

    Raises:
        UnsupportedError: if the model is being led to another scheme already, if no scheme describes its native
            mechanism, or if one of the two schemes cannot act by degrees.
    """
    target = unwrapped(model)
    previous = current_encoding(target)
    if previous is not None and _blends_in(previous.config):
        raise UnsupportedError(
            f"This model is a blend already ({previous.config!r}). Train it to the end and call finish_blend(model), "
            "or take the blend out with unpatch_model."
        )
    old = native_scheme(target) if previous is None else previous.config
    patch_model(target, _blend(old, scheme_config(scheme, {}), target))
    encoding = current_encoding(target)
    assert encoding is not None
    if previous is not None:
        for before, (after, _) in zip(all_parts(previous), paired_parts(encoding), strict=True):
            if before is not None and after is not None:
                after.load_state_dict(before.state_dict())
    for old_part, _ in paired_parts(encoding):
        if old_part is not None:
            old_part.requires_grad_(False)
    return encoding


def blend_strength(model: nn.Module) -> float | None:
    """How far a model has been led to its new scheme, between 0 and 1; `None` for a model without a blend."""
    encoding = current_encoding(unwrapped(model))
    return None if encoding is None else next((blend.strength for blend in _blends_in(encoding.config)), None)


def set_blend_strength(model: nn.Module, strength: float) -> None:
    """Gives the new scheme of a blend its share. The model's config says so too, and with it a checkpoint.

    Raises:
        ValueError: for a strength outside [0, 1].
        UnsupportedError: for a model without a blend.
    """
    encoding = _blend_of(unwrapped(model))
    config = _with_strength(encoding.config, strength)
    for part in blended_parts(encoding):
        part.strength = float(strength)
    encoding.config = config
    attach_entry(encoding.__dict__["model_config"], config.to_dict())
    refresh_names(encoding)


def finish_blend(model: nn.Module) -> None:
    """Leaves a model whose new scheme has all of the strength with that scheme alone.

    Its parameters stay the same objects, so an optimizer goes on training them.

    Raises:
        UnsupportedError: for a model without a blend, or with one whose old scheme still acts.
    """
    target = unwrapped(model)
    encoding = _blend_of(target)
    strength = blend_strength(target)
    if strength != 1:
        raise UnsupportedError(
            f"The strength of the new scheme is {strength}: leaving the old one out now would change what the model "
            "computes. Train to strength 1 first, or call set_blend_strength(model, 1.0) to jump."
        )
    trained = [new for _, new in paired_parts(encoding)]
    patch_model(target, new_scheme(encoding.config))
    plain = current_encoding(target)
    assert plain is not None
    for source, part in zip(trained, all_parts(plain), strict=True):
        if source is not None and part is not None:
            _move_parameters(source, part)


def new_scheme(config: SchemeConfig) -> SchemeConfig:
    """The scheme that a blend, or a schedule of blends, leads to."""
    if isinstance(config, ScheduleConfig):
        return _joined(tuple(new_scheme(layer) for layer in config.layers))
    return config.new if isinstance(config, BlendedConfig) else config


def all_parts(encoding: PositionEncoding) -> Iterator[Part | None]:
    """Every place of a part in a model, in order: what is added in each stack, then map, bias and scale of layers."""
    for stack in encoding.stacks.values():
        assert isinstance(stack, StackEncoding)
        yield stack.additive
        for layer in stack.layers:
            for name in LAYER_PARTS:
                yield getattr(layer, name)


def blended_parts(encoding: PositionEncoding) -> Iterator[BlendedPart[Part]]:
    """The blended ones among them."""
    return (part for part in all_parts(encoding) if isinstance(part, BlendedPart))


def paired_parts(encoding: PositionEncoding) -> Iterator[tuple[Part | None, Part | None]]:
    """For every place the old part and the new one."""
    return ((part.old, part.new) if isinstance(part, BlendedPart) else (None, None) for part in all_parts(encoding))


def _blend_of(target: PreTrainedModel) -> PositionEncoding:
    encoding = current_encoding(target)
    if encoding is None or not _blends_in(encoding.config):
        raise UnsupportedError(
            f"This {type(target).__name__} is not being led from one scheme to another. Begin with "
            "swap_scheme(model, scheme, gradual=True)."
        )
    return encoding


def _blends_in(config: SchemeConfig) -> list[BlendedConfig]:
    layers = config.layers if isinstance(config, ScheduleConfig) else (config,)
    return [layer for layer in layers if isinstance(layer, BlendedConfig)]


def _blend(old: SchemeConfig, new: SchemeConfig, target: PreTrainedModel) -> SchemeConfig:
    """One blend for all layers, or a schedule of blends where either scheme differs between layers."""
    if not isinstance(old, LayeredConfig) and not isinstance(new, LayeredConfig):
        return BlendedConfig(old, new)
    stacks = find_stacks(target)
    schedule(new, stacks, None, None)  # Refuses an arrangement that does not fit these layers.
    types = {attention.layer: attention.layer_type for stack in stacks for attention in stack.attentions}

    def at(config: SchemeConfig, layer: int) -> SchemeConfig:
        return config.for_layer(layer, types.get(layer)) if isinstance(config, LayeredConfig) else config

    return ScheduleConfig(
        layers=tuple(BlendedConfig(at(old, layer), at(new, layer)) for layer in range(max(types) + 1))
    )


def _joined(layers: tuple[SchemeConfig, ...]) -> SchemeConfig:
    return layers[0] if len(set(layers)) == 1 else ScheduleConfig(layers=layers)


def _with_strength(config: SchemeConfig, strength: float) -> SchemeConfig:
    if isinstance(config, ScheduleConfig):
        return dataclasses.replace(config, layers=tuple(_with_strength(layer, strength) for layer in config.layers))
    return dataclasses.replace(config, strength=float(strength)) if isinstance(config, BlendedConfig) else config


def _move_parameters(source: nn.Module, target: nn.Module) -> None:
    """Makes the parameters of one part those of another that was built alike."""
    for name, module in source.named_modules():
        twin = target.get_submodule(name)
        for key, parameter in module._parameters.items():
            twin._parameters[key] = parameter


class GradualSwapCallback(TrainerCallback):
    """Raises the strength of a model's new scheme step by step, and leaves the model with that scheme alone.

    Before optimizer step `n`, counted from 0, the strength becomes `min(1, (n + 1) / steps)`. It follows from the step
    alone, so a resumed run goes on where it was. When the training ends, the old scheme is taken out::

        swap_scheme(model, "alibi", gradual=True)
        Trainer(model, ..., callbacks=[GradualSwapCallback(steps=200)]).train()
        model.save_pretrained(...)  # a model with "alibi"

    A checkpoint written on the way holds the blend at the strength it had, which `from_pretrained` loads as such.

    Args:
        steps: after how many optimizer steps the new scheme stands alone; the training may go on from there.

    Raises:
        ValueError: for less than one step.
    """

    def __init__(self, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(
                f"GradualSwapCallback.steps is {steps!r}; expected a number of optimizer steps, 1 or more."
            )
        self.steps = steps

    def strength(self, step: int) -> float:
        """The strength during an optimizer step, counted from 0."""
        return min(1.0, (step + 1) / self.steps)

    def match_checkpoint(self, model: Any, step: int) -> None:
        """Sets the strength of a checkpoint that was saved after so many steps, before it is loaded."""
        if blend_strength(_unwrapped(model)) is not None:
            set_blend_strength(_unwrapped(model), self.strength(step - 1))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the strength of the last step that was done, so that a first evaluation sees the model it left.

        Raises:
            ValueError: if the training ends before the new scheme stands alone, or may pick a best checkpoint from
                before that.
            UnsupportedError: if the model is no blend.
        """
        if state.max_steps < self.steps:
            raise ValueError(
                f"The new scheme stands alone after {self.steps} steps, and this training ends after "
                f"{state.max_steps}. Give fewer gradual steps, or train longer."
            )
        if args.load_best_model_at_end and (args.eval_delay or 0) < self.steps:
            raise ValueError(
                f"load_best_model_at_end may choose a checkpoint from the first {self.steps} steps, in which the old "
                f"scheme still acts and which is no model of the new one. Set eval_delay={self.steps}, or leave it out."
            )
        set_blend_strength(_unwrapped(kwargs["model"]), self.strength(state.global_step - 1))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the strength of the step about to begin."""
        set_blend_strength(_unwrapped(kwargs["model"]), self.strength(state.global_step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the old scheme out, unless the training was stopped before its share was gone."""
        model = _unwrapped(kwargs["model"])
        strength = blend_strength(model)
        if strength == 1:
            finish_blend(model)
            return
        warnings.warn(
            f"The training stopped after {state.global_step} of {self.steps} gradual steps, so the model stays a blend "
            f"with strength {strength}. Go on training, or jump with set_blend_strength(model, 1.0) and "
            "finish_blend(model).",
            UserWarning,
            stacklevel=2,
        )


def _unwrapped(model: Any) -> Any:
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model)
