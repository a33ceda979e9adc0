"""Putting a built encoding into a model and taking it out: the transaction behind `patch_model`."""

from __future__ import annotations

import inspect
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.placed_forward import forward_on_instance
from hf_posenc.patching.call.recomputation import forget_recomputation
from hf_posenc.patching.call.table_site import table_origin
from hf_posenc.patching.find.architectures import architecture_of
from hf_posenc.patching.find.discovery import find_stacks
from hf_posenc.patching.find.fingerprint import samples
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.place.config_entry import attach_entry, detach_entry
from hf_posenc.patching.place.continuous_batching import CheckedContinuousBatching
from hf_posenc.patching.place.encoding import (
    PositionEncoding,
    StackEncoding,
    is_length_dependent,
    parameter_count,
    place_like,
)
from hf_posenc.patching.place.generation import check_generation
from hf_posenc.patching.place.head_shards import split_heads
from hf_posenc.patching.place.install import install_stack
from hf_posenc.patching.place.lengths import settle_lengths
from hf_posenc.patching.place.recomputed_queries import refuse_recomputed_queries
from hf_posenc.patching.place.report import PatchReport
from hf_posenc.patching.place.scheme_name import mark_names
from hf_posenc.schemes.config import SchemeConfig

ATTRIBUTE = "position_encoding"


def encodings(model: nn.Module) -> list[PositionEncoding]:
    """Every encoding in a model; more than one where parts of it were patched on their own.

    Raises:
        UnsupportedError: for an encoding of another copy of this package, whose classes are not those of this one.
    """
    return [module for module in model.modules() if _is_encoding(module, model)]


def _is_encoding(module: nn.Module, model: nn.Module) -> TypeGuard[PositionEncoding]:
    if isinstance(module, PositionEncoding):
        return True
    name = (PositionEncoding.__module__, PositionEncoding.__qualname__)
    if any((kind.__module__, kind.__qualname__) == name for kind in type(module).__mro__):
        package = __name__.partition(".")[0]
        raise UnsupportedError(
            f"This {type(model).__name__} was patched by another copy of {package}: the package has been imported "
            "again in this process, after its modules were removed from sys.modules (test plugins and notebooks do "
            "so), and the new copy cannot undo or save what the old one did. Load the model again and patch it anew, "
            f"or restart the process. Keep {package} out of what is reloaded."
        )
    return False


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
        UnsupportedError: for a model that no scheme can be placed in.
    """
    base: Any = getattr(model, "get_base_model", None)
    inner = model if base is None else base()
    if isinstance(inner, PreTrainedModel):
        _refuse_other_modalities(inner)
        _refuse_part(inner)
        refuse_recomputed_queries(inner)
    else:
        raise TypeError(
            f"Expected a transformers PreTrainedModel, got {type(inner).__name__}. Patch the model before it is "
            "wrapped (DistributedDataParallel, torch.compile), or pass what the wrapper holds."
        )
    return inner


def _refuse_other_modalities(model: PreTrainedModel) -> None:
    """Refuses what is not text: positions of pixels and frames are not those of tokens."""
    name = type(model).__name__
    takes = _other_input(model)
    if takes:
        raise UnsupportedError(
            f"{name} takes {takes}, not input_ids: the schemes here place text tokens. Patch a text-only model."
        )
    parts = _other_modalities(model.config)
    if parts:
        raise UnsupportedError(
            f"{name} joins several modalities ({', '.join(parts)}), whose tokens have positions on more than one axis. "
            "Patch a text-only model."
        )


def _other_input(model: PreTrainedModel) -> str:
    """What a model takes in place of token ids; empty for a model of text."""
    if model.main_input_name != "input_ids":
        return str(model.main_input_name)
    names = [list(inspect.signature(type(one).forward).parameters) for one in (model, model.base_model)]
    return "" if any("input_ids" in own for own in names) else names[0][1]


def _other_modalities(config: Any) -> list[str]:
    """Names of the configs of parts that are not text."""
    return [
        name for name in ("vision_config", "audio_config", "speech_config") if getattr(config, name, None) is not None
    ]


def _refuse_part(model: PreTrainedModel) -> None:
    """Refuses encoders and decoders that cannot be saved on their own: transformers does not export them."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    name, config = type(model).__name__, model.config
    if not type(model).__module__.startswith("transformers.models.") or hasattr(transformers, name):
        return
    lost = f"{name} is a part of a model and is saved with it; a scheme in the part alone would be lost there. "
    whole: Any = MODEL_MAPPING.get(type(config), None)
    if getattr(whole, "main_input_name", "") == "input_ids" and not _other_modalities(config):
        raise UnsupportedError(f"{lost}Patch the whole model (`layers=` and `elsewhere=` choose layers).")
    takes = getattr(whole, "main_input_name", "input_ids")
    owner = "it joins several modalities" if takes == "input_ids" else f"it takes {takes}"
    raise UnsupportedError(
        f"{lost}The whole cannot be patched either ({owner}): the schemes here place text tokens. Patch a text-only "
        "model."
    )


def build_encoding(config: SchemeConfig, model: PreTrainedModel, stacks: list[Stack]) -> PositionEncoding:
    """Builds the parts of a scheme for every stack, on the model's device and in its dtype; places nothing yet."""
    architecture = architecture_of(model.config)
    built = {stack.name: StackEncoding(config, stack, architecture.pairing) for stack in stacks}
    encoding = PositionEncoding(config, built)
    place_like(encoding, model)
    for stack in stacks:
        built[stack.name].runtime.slots.rows_before = max(
            (table_origin(table.module) for table in stack.tables), default=0
        )
        built[stack.name].runtime.time_major = architecture.time_major
        built[stack.name].runtime.channels_first = architecture.channels_first
    return encoding


def without_weights(config: SchemeConfig, model: PreTrainedModel, stacks: list[Stack]) -> PositionEncoding:
    """What `build_encoding` would build, with parameters that have names and shapes but no memory.

    Raises:
        RuntimeError: for a scheme of somebody's own that reads its parameters while it is built.
    """
    pairing = architecture_of(model.config).pairing
    meta = torch.device("meta")
    return PositionEncoding(config, {stack.name: StackEncoding(config, stack, pairing, meta) for stack in stacks})


def install(encoding: PositionEncoding, model: PreTrainedModel) -> None:
    """Puts everything in place; whatever it does is in the encoding's journal.

    The model says that it is patched before anything acts, and until nothing does any more.
    """
    stacks = find_stacks(model)
    architecture = architecture_of(model.config)
    base = model.base_model
    encoding.__dict__["holder"] = base
    base.add_module(ATTRIBUTE, encoding)
    encoding.__dict__["model_config"] = model.config
    attach_entry(model.config, encoding.config.to_dict())
    if base is not model:
        encoding.journal.set(model, ATTRIBUTE, encoding)
    before = {} if encoding.report is None else {report.name: report.adopted for report in encoding.report.stacks}
    reports = []
    for stack in stacks:
        placed = encoding.stacks[stack.name]
        assert isinstance(placed, StackEncoding)
        first = encoding.report is None
        adopted = placed.adopt(stack, architecture.native_bias_table) if first else before[stack.name]
        report = install_stack(stack, placed, architecture, encoding.journal)
        report.adopted = adopted
        reports.append(report)
    encoding.report = PatchReport(encoding.config.name, type(model).__name__, parameter_count(encoding), reports)
    split_heads(encoding, model)
    settle_lengths(encoding, model, stacks)
    encoding.base_weights = encoding.base_weights or samples(model, read_offloaded=False)
    mark_names(model, encoding)
    _disable_unsafe_cache(encoding, model)
    check_generation(encoding, model)
    CheckedContinuousBatching.place(encoding, model)
    encoding.train(model.training)


def uninstall(encoding: PositionEncoding) -> None:
    """Takes everything back that `install` did. One that was interrupted is finished by another one."""
    for stack in encoding.stacks.values():
        assert isinstance(stack, StackEncoding)
        stack.runtime.slots.restore()
        stack.runtime.watch = stack.runtime.pages = stack.runtime.replicas = None
    encoding.journal.undo()
    holder, config = encoding.__dict__.get("holder"), encoding.__dict__.get("model_config")
    if config is not None:
        detach_entry(config)
    if holder is not None:
        forget_recomputation(holder)
        holder._modules.pop(ATTRIBUTE, None)
    encoding.__dict__.pop("model_config", None)
    encoding.__dict__.pop("holder", None)


def _disable_unsafe_cache(encoding: PositionEncoding, model: PreTrainedModel) -> None:
    generation_config = getattr(model, "generation_config", None)
    if generation_config is None or not is_length_dependent(encoding):
        return
    encoding.journal.set(generation_config, "use_cache", False)


def runs_a_scheme(model: nn.Module) -> bool:
    """Whether any attention layer of a model, or of a part it shares with another model, carries a scheme."""
    placed = [site for encoding in encodings(model) for site in encoding.journal.forwards()]
    shared = [forward_on_instance(module) for module in model.modules()]
    return any(isinstance(forward, AttentionSite) for forward in (*placed, *shared))


def refuse_missing_sites(model: nn.Module) -> None:
    """Refuses to save a model that runs its stock positions in some of its modules.

    Raises:
        UnsupportedError: naming the first of them.
    """
    for encoding in encodings(model):
        for stack in encoding.stacks.values():
            assert isinstance(stack, StackEncoding)
            problem = "" if stack.runtime.watch is None else stack.runtime.watch.problem()
            if problem:
                raise UnsupportedError(f"This {type(model).__name__} is not saved: {problem}")
