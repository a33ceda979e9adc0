"""Tensor parallelism: schemes that need all heads of a layer in one process are refused where they are split."""

from __future__ import annotations

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.attention_site import AttentionSite
from hf_posenc.patching.encoding import PositionEncoding
from hf_posenc.patching.layer_call import LayerEncoding


def refuse_split_heads(encoding: PositionEncoding, model: nn.Module) -> None:
    """Refuses parts that differ between heads in a model whose attention is split over processes.

    Args:
        encoding: what is in force.
        model: a model that transformers has loaded, with or without a `tp_plan`.

    Raises:
        UnsupportedError: with the part, on every process.
    """
    processes = getattr(model, "_tp_size", None) or 1
    if processes == 1:
        return
    for module in model.modules():
        site = module.__dict__.get("forward")
        if not isinstance(site, AttentionSite) or not any("_is_hooked" in child.__dict__ for child in module.modules()):
            continue
        reason = _needs_all_heads(site.encoding)
        if reason:
            raise UnsupportedError(
                f"Tensor parallelism has split the {site.encoding.num_heads} heads of {type(module).__name__} over "
                f"{processes} processes, and the scheme {encoding.config.name!r} needs all of them in each: {reason}. "
                "Load the model without tp_plan (`distributed_config`), with a device_map or sharded by FSDP. Schemes "
                "that treat all heads alike (none, rope, sinusoidal) run under it."
            )


def _needs_all_heads(layer: LayerEncoding) -> str:
    if layer.logit_bias is not None:
        return f"its {type(layer.logit_bias).__name__} has numbers of its own for each head"
    if layer.query_key_map is not None and layer.query_key_map.whole_heads:
        return f"its {type(layer.query_key_map).__name__} maps all heads at once"
    return ""
