"""A one-line summary of a patched folder: its scheme, its length, disagreements, and engines that can run it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_posenc.export.carriers import proposal
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.targets import find_target
from hf_posenc.installation import install_command
from hf_posenc.patching.inspection import Inspection, engine_problem, unsupported_kind
from hf_posenc.patching.place.lengths import context_length
from hf_posenc.schemes.refusals import VLLM


def summary(model: PreTrainedModel, inspection: Inspection, tokenizer: Any) -> str:
    """Returns the line for a patched model.

    Args:
        model: the model.
        inspection: what `inspect_model` found in it.
        tokenizer: its tokenizer, or `None` if it has none.
    """
    length = context_length(model)
    reach = "" if length is None else f" for {length} tokens"
    differences = _differences(model, inspection, tokenizer, length)
    agreement = "; ".join(differences) or (
        "config and generation config agree, and there is no tokenizer"
        if tokenizer is None
        else "config, generation config and tokenizer agree"
    )
    return f"in force: {ModelParts(model).label}{reach}; {agreement}; {'; '.join(_engines(model))}"


def _differences(model: PreTrainedModel, inspection: Inspection, tokenizer: Any, length: int | None) -> list[str]:
    found = [inspection.disagreement] if inspection.disagreement else []
    if length is None:
        return found
    generated = getattr(getattr(model, "generation_config", None), "max_length", None)
    if generated is not None and generated > length:
        found.append(f"generation_config.max_length is {generated}")
    known = getattr(getattr(tokenizer, "tokenizer", tokenizer), "model_max_length", None)
    if known is not None and known < length:
        found.append(f"the tokenizer cuts texts at {known} tokens: set its model_max_length, or use extend_context")
    return found


def _engines(model: PreTrainedModel) -> list[str]:
    kind = unsupported_kind(model.config)
    problem = f"{kind}, which the plug-in does not support" if kind else engine_problem(model, VLLM)
    lines = [f"vLLM does not run it ({problem})" if problem else "vLLM runs it with the plug-in"]
    if model.device.type == "meta":
        return lines
    target = find_target("gguf")
    if target.missing_packages():
        return [*lines, f"whether llama.cpp runs an export is known after {install_command('gguf')}"]
    carrier = proposal(target, ModelParts(model))
    return [*lines, f"llama.cpp runs an export to gguf ({carrier})" if carrier else "llama.cpp does not run it"]
