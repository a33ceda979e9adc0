"""Putting a built encoding into a model and taking it out: the transaction behind `patch_model`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.architectures import architecture_of
from hf_posenc.patching.attention_site import AttentionSite
from hf_posenc.patching.config_entry import attach_entry, detach_entry
from hf_posenc.patching.discovery import find_stacks
from hf_posenc.patching.encoding import PositionEncoding, StackEncoding, parameter_count, place_like
from hf_posenc.patching.install import install_stack
from hf_posenc.patching.recomputation import forget_recomputation
from hf_posenc.patching.report import PatchReport
from hf_posenc.patching.scheme_name import mark_names
from hf_posenc.patching.sites import Stack
from hf_posenc.schemes.config import SchemeConfig

ATTRIBUTE = "position_encoding"


def encodings(model: nn.Module) -> list[PositionEncoding]:
    """Every encoding in a model; more than one where parts of it were patched on their own."""
    return [module for module in model.modules() if isinstance(module, PositionEncoding)]


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
                "unpatch_model on it first; a scheme belongs to a whole model."
            )
    return found[0] if found else None


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, out of the PEFT model around it.

    Raises:
        TypeError: for anything else.
    """
    base: Any = getattr(model, "get_base_model", None)
    inner = model if base is None else base()
    if isinstance(inner, PreTrainedModel):
        _refuse_part(inner)
        _refuse_other_modalities(inner)
    else:
        raise TypeError(
            f"Expected a transformers PreTrainedModel, got {type(inner).__name__}. Patch the model before it is "
            "wrapped (DistributedDataParallel, torch.compile), or pass what the wrapper holds."
        )
    return inner


def _refuse_other_modalities(model: PreTrainedModel) -> None:
    """Refuses what is not text: positions of pixels and frames are not those of tokens."""
    if model.main_input_name != "input_ids":
        raise UnsupportedError(
            f"{type(model).__name__} takes {model.main_input_name}, not input_ids: the schemes here place text tokens."
        )
    parts = [name for name in ("vision_config", "audio_config") if getattr(model.config, name, None) is not None]
    if parts:
        raise UnsupportedError(
            f"{type(model).__name__} joins several modalities ({', '.join(parts)}), whose tokens have positions on "
            "more than one axis. Patch a text-only model."
        )


def _refuse_part(model: PreTrainedModel) -> None:
    """Refuses encoders and decoders that cannot be saved on their own: transformers does not export them."""
    import transformers

    name = type(model).__name__
    if type(model).__module__.startswith("transformers.models.") and not hasattr(transformers, name):
        raise UnsupportedError(
            f"{name} is a part of a model and is saved with it; a scheme in the part alone would be lost there. Patch "
            "the whole model (`layers=` and `elsewhere=` choose layers)."
        )


def build_encoding(config: SchemeConfig, model: PreTrainedModel, stacks: list[Stack]) -> PositionEncoding:
    """Builds the parts of a scheme for every stack, on the model's device and in its dtype; places nothing yet."""
    architecture = architecture_of(model.config)
    built = {stack.name: StackEncoding(config, stack, architecture.pairing) for stack in stacks}
    encoding = PositionEncoding(config, built)
    place_like(encoding, model)
    for stack in stacks:
        built[stack.name].runtime.time_major = architecture.time_major
        built[stack.name].runtime.channels_first = architecture.channels_first
    return encoding


def install(encoding: PositionEncoding, model: PreTrainedModel) -> None:
    """Puts everything in place; whatever it does is in the encoding's journal and hooks."""
    stacks = find_stacks(model)
    architecture = architecture_of(model.config)
    reports = []
    for stack in stacks:
        placed = encoding.stacks[stack.name]
        assert isinstance(placed, StackEncoding)
        adopted = [] if encoding.report else placed.adopt(stack, architecture.native_bias_table)
        report = install_stack(stack, placed, architecture, encoding.journal, encoding.hooks)
        report.adopted = adopted
        reports.append(report)
    encoding.report = PatchReport(encoding.config.name, type(model).__name__, parameter_count(encoding), reports)
    base = model.base_model
    base.add_module(ATTRIBUTE, encoding)
    encoding.__dict__["holder"] = base
    if base is not model:
        encoding.journal.set(model, ATTRIBUTE, encoding)
    attach_entry(model.config, encoding.config.to_dict())
    encoding.__dict__["model_config"] = model.config
    mark_names(model, encoding)
    _disable_unsafe_cache(encoding, model)
    encoding.train(model.training)


def uninstall(encoding: PositionEncoding) -> None:
    """Takes everything back that `install` did."""
    for stack in encoding.stacks.values():
        assert isinstance(stack, StackEncoding)
        stack.runtime.slots.restore()
    for hook in encoding.hooks:
        hook.remove()
    encoding.hooks.clear()
    encoding.journal.undo()
    holder = encoding.__dict__.pop("holder", None)
    if holder is not None:
        holder._modules.pop(ATTRIBUTE, None)
        forget_recomputation(holder)
    config = encoding.__dict__.pop("model_config", None)
    if config is not None:
        detach_entry(config)


def is_length_dependent(encoding: PositionEncoding) -> bool:
    """Whether some part encodes a token by more than a growing cache keeps; only causal stacks ever grow."""
    stacks = [stack for stack in encoding.stacks.values() if isinstance(stack, StackEncoding)]
    growing = [stack for stack in stacks if any(layer.causal for layer in stack.layers)]
    flags = ("length_dependent", "needs_whole_sequence")
    return any(getattr(module, flag, False) for stack in growing for module in stack.modules() for flag in flags)


def _disable_unsafe_cache(encoding: PositionEncoding, model: PreTrainedModel) -> None:
    generation_config = getattr(model, "generation_config", None)
    if generation_config is None or not is_length_dependent(encoding):
        return
    encoding.journal.set(generation_config, "use_cache", False)


def runs_a_scheme(model: nn.Module) -> bool:
    """Whether any attention layer of a model, or of a part it shares with another model, carries a scheme."""
    return any(
        isinstance(module.__dict__.get(place), AttentionSite)
        for module in model.modules()
        for place in ("forward", "_old_forward")
    )
