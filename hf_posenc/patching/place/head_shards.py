"""Tensor parallelism: determines the heads of a layer in this process, and restricts the scheme to these heads.

Every process holds all parameters of a scheme, so that checkpoints are the same as those of a single process. Only the
values computed from them are split, by the parts in `hf_posenc.patching.call.split_parts`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.split_parts import HeadShard, split_part
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.schemes.parts import Part

#: Styles of a plan with which every process has all heads of a projection.
_GATHERED = ("colwise_gather_output", "colwise_rep")
#: Styles of a plan with which a module sees only some of the tokens.
_SEQUENCE = ("sequence_parallel",)


def split_heads(encoding: PositionEncoding, model: nn.Module) -> None:
    """Restricts the patched attention layers of a model to the heads that this process computes.

    Args:
        encoding: the encoding in force.
        model: a model loaded by transformers, with or without a plan for tensor parallelism.

    Raises:
        UnsupportedError: on every process, if the heads of a process are unknown, or tokens are split as well.
    """
    mesh = _mesh(model)
    if mesh is None:
        return
    plan = getattr(model, "tp_plan", None) or {}
    paths = {id(module): path for path, module in model.named_modules()}
    placed = [site for site in encoding.record.journal.forwards() if isinstance(site, AttentionSite)]
    sites = [site for site in placed if site.encoding.shard is None]
    _refuse_split_sequences(plan, encoding)
    known: dict[int, Part] = {}
    for site in sites:
        shard = _shard(site, paths[id(site.module)], plan, mesh)
        if shard is not None:
            site.encoding = _split(site.encoding, shard, known)
    _broadcast_parameters(encoding, mesh)


def _mesh(model: nn.Module) -> Any:
    """The processes that share the heads of a layer; `None` without tensor parallelism."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    manager = getattr(model, "_mesh_manager", None)
    if manager is not None:
        return manager.get_mesh("tp")
    mesh: Any = model._device_mesh
    return mesh if mesh.ndim == 1 else mesh["tp"]


@torch.no_grad()
def _broadcast_parameters(encoding: PositionEncoding, mesh: Any) -> None:
    """Copies the parameters of the first process to all others, because each has initialised its own."""
    group = mesh.get_group()
    for parameter in encoding.parameters():
        if parameter.device.type != "meta" and not hasattr(parameter, "device_mesh"):
            torch.distributed.broadcast(parameter.data, group_src=0, group=group)


def _refuse_split_sequences(plan: dict[str, str], encoding: PositionEncoding) -> None:
    rules = [name for name, style in plan.items() if style in _SEQUENCE]
    if rules:
        raise UnsupportedError(
            f"The tensor-parallel plan of this model splits sequences between processes ({rules[0]!r}: "
            f"{plan[rules[0]]!r}), so a layer sees only some of the tokens and their positions are unknown. "
            f"{encoding.config.name!r} needs all tokens: remove the sequence-parallel rules from the plan."
        )


def _shard(site: AttentionSite, path: str, plan: dict[str, str], mesh: Any) -> HeadShard | None:
    """The heads of one module in this process, if they divide by the number of processes; `None` if it has all."""
    styles = {
        name: plan.get(re.sub(r"\d+", "*", f"{path}.{name}"), "")
        for name, child in site.module.named_modules()
        if "_is_hooked" in child.__dict__ and name
    }
    split = [name for name, style in styles.items() if "colwise" in style and style not in _GATHERED]
    if not split:
        return None
    heads, key_heads = site.encoding.num_heads, site.encoding.num_key_value_heads
    keys = [name for name, child in site.module.named_children() if name[0] == "k" and hasattr(child, "in_features")]
    shared_keys = bool(keys) and not set(keys) & set(split)
    kind = type(site.module).__name__
    if shared_keys and key_heads > 1:
        raise UnsupportedError(
            f"The tensor-parallel plan splits the queries of {kind} across {mesh.size()} processes and keeps all "
            f"{key_heads} key heads in each of them, so it is unknown which key head a query head reads. Split "
            f"{keys[0]!r} and the values as well (style 'colwise')."
        )
    for count, what in ((heads, "query"), (mesh.size() if shared_keys else key_heads, "key")):
        if count % mesh.size():
            raise UnsupportedError(
                f"{kind} has {count} {what} {'head' if count == 1 else 'heads'}, which {mesh.size()} processes cannot "
                "share evenly under this tensor-parallel plan. Use a number of processes that divides them."
            )
    return HeadShard(mesh, shared_keys)


def _split(encoding: LayerEncoding, shard: HeadShard, known: dict[int, Part]) -> LayerEncoding:
    """The layer restricted to the heads of this process. Parts that layers share remain shared."""

    def own(part: Any) -> Any:
        if part is None:
            return None
        if id(part) not in known:
            known[id(part)] = split_part(part, shard)
        return known[id(part)]

    return dataclasses.replace(
        encoding,
        query_key_map=own(encoding.query_key_map),
        logit_bias=own(encoding.logit_bias),
        logit_scale=own(encoding.logit_scale),
        num_heads=encoding.num_heads // shard.size,
        shard=shard,
        num_key_value_heads=1 if shard.shared_keys else encoding.num_key_value_heads // shard.size,
        num_cached_heads=None,
    )
