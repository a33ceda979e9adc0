"""Whether an inference engine can run a patched model with the plug-in: the facts, without the engine."""

from __future__ import annotations

from typing import Any

from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding, parts_named
from hf_posenc.schemes.needs import Environment

#: Fields with which configs state the number of experts in a layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def unsupported_kind(config: Any) -> str:
    """What kind of model the plug-ins do not support, as a subject of a sentence; empty for one that they do."""
    try:
        is_composite = config.get_text_config() is not config
    except ValueError:  # It has several configs of text.
        is_composite = True
    if is_composite:
        return f"A {config.model_type!r} model has several parts, such as for images or sound"
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        return f"This {config.model_type!r} model is a mixture of experts"
    return ""


def patched_sites(encoding: PositionEncoding) -> list[AttentionSite]:
    """The patched attention layers."""
    return [site for site in encoding.record.journal.forwards() if isinstance(site, AttentionSite)]


def engine_problem(model: Any, engine: Environment) -> str:
    """Why an engine cannot run the scheme of a patched model, as a clause about the scheme; empty if it can.

    Args:
        model: a patched model.
        engine: one of `hf_posenc.schemes.refusals.ENGINES`.
    """
    encoding = current_encoding(model)
    assert encoding is not None
    return _model_problem(encoding) or next(stack.problems[engine.name] for stack in encoding.stacks.values())


def _model_problem(encoding: PositionEncoding) -> str:
    sites = patched_sites(encoding)
    if parts_named(encoding.config) is not None:
        return "the plug-in runs models of text alone, and this model has parts for images or sound"
    if len(encoding.stacks) != 1 or not all(site.encoding.causal for site in sites):
        return "the plug-in runs decoders that generate text, and this model has an encoder"
    for site in sites:
        if not isinstance(site, InterfaceAttention):
            return (
                f"{type(site.module).__name__} computes its scores without the attention interface of transformers, "
                "which the engine needs to call its kernels"
            )
    return ""
