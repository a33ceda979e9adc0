"""Verbs for models and schemes. Each turns the command line into one library call and prints the result."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_posenc
from hf_posenc.checkpoint.atomic_folder import refuse_used_folder
from hf_posenc.cli.catalogue import parse_layers
from hf_posenc.errors import PositionEncodingError, UsageError
from hf_posenc.export.targets import TARGETS, find_target
from hf_posenc.loading import load_model, load_processor, load_tokenizer, load_with_adapters
from hf_posenc.report.tables import format_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posenc.patching.inspection import Inspection

#: The targets of `export`, for its help.
TARGET_HELP = "; ".join(f"{target.name}: {target.summary}" for target in TARGETS) + " (default: stock)"


def inspect(options: argparse.Namespace) -> int:
    """Prints where a model uses positions and, for a patched model, a one-line summary."""
    model = load_model(options.model, config_only=options.config_only)
    inspection = hf_posenc.inspect_model(model)
    print(inspection)
    if inspection.in_force is not None:
        print(_summary(model, inspection, _loaded_processor(options.model, model)[0]))
    return 0


def _summary(model: PreTrainedModel, inspection: Inspection, tokenizer: Any) -> str:
    """Returns a line on a patched model: its scheme, its length, disagreements, and engines that can run it.

    Args:
        model: the model.
        inspection: what `inspect_model` found in it.
        tokenizer: its tokenizer, or `None` if it has none.
    """
    from hf_posenc.export.layers import ModelParts
    from hf_posenc.patching.place.lengths import context_length

    length = context_length(model)
    reach = "" if length is None else f" for {length} tokens"
    differences = _differences(model, inspection, tokenizer, length)
    agreed = "config, generation config and tokenizer agree"
    if tokenizer is None:
        agreed = "config and generation config agree, and there is no tokenizer"
    agreement = "; ".join(differences) or agreed
    return f"in force: {ModelParts(model).label}{reach}; {agreement}; {'; '.join(_engines(model))}"


def _differences(model: PreTrainedModel, inspection: Inspection, tokenizer: Any, length: int | None) -> list[str]:
    differences = [inspection.disagreement] if inspection.disagreement else []
    if length is None:
        return differences
    generated = getattr(getattr(model, "generation_config", None), "max_length", None)
    if generated is not None and generated > length:
        differences.append(f"generation_config.max_length is {generated}")
    known = getattr(getattr(tokenizer, "tokenizer", tokenizer), "model_max_length", None)
    if known is not None and known < length:
        differences.append(
            f"the tokenizer cuts texts at {known} tokens: set its model_max_length, or use extend_context"
        )
    return differences


def _engines(model: PreTrainedModel) -> list[str]:
    from hf_posenc.export.carriers import proposal
    from hf_posenc.export.layers import ModelParts
    from hf_posenc.installation import install_command
    from hf_posenc.patching.inspection import engine_problem, unsupported_kind
    from hf_posenc.schemes.refusals import VLLM

    kind = unsupported_kind(model.config)
    problem = f"{kind}, which the plug-in does not support" if kind else engine_problem(model, VLLM)
    lines = [f"vLLM does not run it ({problem})" if problem else "vLLM runs it with the plug-in"]
    if model.device.type == "meta":
        return lines
    target = find_target("gguf")
    if target.missing_packages():
        return [*lines, f"to find out whether llama.cpp runs an export, run: {install_command('gguf')}"]
    carrier = proposal(target, ModelParts(model))
    return [*lines, f"llama.cpp runs an export to gguf ({carrier})" if carrier else "llama.cpp does not run it"]


def patch(options: argparse.Namespace) -> int:
    """Replaces the position encoding of a checkpoint."""
    from hf_posenc.schemes.registry import parse_scheme

    output = _free_folder(options.output, options.overwrite)
    config = parse_scheme(options.scheme, options.option)
    layers = None if options.layers is None else parse_layers(options.layers)
    if layers is not None and options.table_extension is not None:
        raise UsageError("--table-extension is for a table, which is added before the first layer. Omit --layers.")
    elsewhere = None if options.elsewhere is None else parse_scheme(options.elsewhere)
    cross = options.cross_attention is not None and parse_scheme(options.cross_attention)
    places: dict[str, Any] = {"layers": layers, "elsewhere": elsewhere, "cross_attention": cross}

    from hf_posenc.patching.anatomy.anatomy import Anatomy
    from hf_posenc.patching.place.encoding import scheme_in_part
    from hf_posenc.patching.place.lengths import context_length
    from hf_posenc.recipes import swap_scheme

    model = load_model(options.model)
    part = Anatomy(model).part(options.part)
    in_force = scheme_in_part(getattr(model, "position_encoding", None), part)
    if in_force is not None and not options.replace:
        raise UsageError(
            f"{options.model} already has the position encoding {in_force.label}, which its weights were trained with, "
            f"and {config.name} would replace it. To keep it in a form that needs no hf_posenc, run: "
            f"hf-posenc export {shlex.quote(options.model)} --output DIR. To replace it anyway, add --replace."
        )
    before = context_length(model)
    try:
        if options.table_extension is not None:
            swap_scheme(model, config, part=part, table_extension=options.table_extension, **places)
        else:
            hf_posenc.patch_model(model, config, part=part, **places)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(model.position_encoding.report)
    processor, kind, missing = _processor(options.model, model, before)
    done: Any = f"Saved the model{'' if processor is None else f' and its {kind}'} in {output}"
    with _writing(output, missing):
        if options.stock:
            done = hf_posenc.export_model(model, output, tokenizer=processor, overwrite=options.overwrite)
        else:
            model.save_pretrained(output)
            if processor is not None:
                processor.save_pretrained(output)
    print(done)
    return 0


def export(options: argparse.Namespace) -> int:
    """Writes a checkpoint in a form that needs no `hf_posenc`."""
    from hf_posenc.schemes.registry import parse_options

    output = _free_folder(options.output, options.overwrite)
    given = parse_options(options.option)
    if options.merge_adapters:
        model, base = load_with_adapters(options.model)
    else:
        model, base = load_model(options.model), options.model
        if getattr(model, "position_encoding", None) is None and options.to == "stock":
            raise UsageError(f"{options.model} is not patched: it already is a plain transformers checkpoint.")
    processor, _, missing = _processor(base, model)
    with _writing(output, missing):
        report = hf_posenc.export_model(
            model, output, to=options.to, tokenizer=processor, overwrite=options.overwrite,
            merge_adapters=options.merge_adapters, approximate=options.approximate,
            push_to_hub=options.push_to_hub or False, **given,
        )  # fmt: skip
    print(report)
    return 0


def _free_folder(named: str, overwrite: bool) -> Path:
    if not named:
        raise UsageError("--output is empty. Give a folder, or . for the current one.")
    output = Path(named)
    try:
        refuse_used_folder(output, overwrite)
    except FileExistsError as error:
        raise UsageError(f"--output: {error}") from error
    return output


@contextlib.contextmanager
def _writing(output: Path, missing: str) -> Iterator[None]:
    """Turns an error while writing a folder into a one-line message, and then says what the folder lacks, if any."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # Errors of requests to the hub are OSErrors without a number.
        raise UsageError(f"{output} cannot be written: {error}") from error
    if missing:
        print(missing, file=sys.stderr)


def _processor(name: str, model: Any, before: int | None = None) -> tuple[Any, str, str]:
    """Loads the tokenizer of a text model, or the processor of a model for images or sound.

    It gets the length of the model if it had the native length or the length `before`. Returns it, the word for it
    and, if it could not be loaded, a line for the user with the reason.
    """
    from hf_posenc.patching.place.lengths import update_tokenizer_length

    processor, kind, problem = _loaded_processor(name, model)
    update_tokenizer_length(processor, model, before)
    return processor, kind, problem and f"The model is saved without a {kind}: {problem}"


def _loaded_processor(name: str, model: Any) -> tuple[Any, str, str]:
    """Returns the tokenizer or processor, the word for it, and the reason if it could not be loaded."""
    from hf_posenc.export.models import other_modalities
    from hf_posenc.patching.anatomy.anatomy import unwrapped

    load, kind = (load_processor, "processor") if other_modalities(unwrapped(model)) else (load_tokenizer, "tokenizer")
    try:
        return load(name), kind, ""
    except UsageError as error:
        return None, kind, str(error)


def plot(options: argparse.Namespace) -> int:
    """Writes the figures of a scheme and prints their paths; `--list` prints which kinds apply."""
    from hf_posenc.schemes.registry import parse_scheme

    config = parse_scheme(options.scheme, options.option)
    output = _free_folder(options.output, overwrite=True)
    try:
        from hf_posenc.plots.schemes import applicable_kinds, plot_scheme, subject_of

        if options.list:
            rows = [[kind.name, kind.summary] for kind in applicable_kinds(subject_of(config))]
            print(format_table(["kind", "what it shows"], rows))
            return 0
        kinds = None if options.kind is None else [name for word in options.kind for name in word.split(",") if name]
        for path in plot_scheme(config, output, kinds, dark=options.dark):
            print(path)
    except PositionEncodingError:
        raise
    except ValueError as error:
        raise UsageError(f"Scheme {config.name!r}: {error}") from error
    return 0
