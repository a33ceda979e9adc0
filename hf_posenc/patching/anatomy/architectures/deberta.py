"""Declarations for the architectures with disentangled attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.architectures.declaration import Architecture
from hf_posenc.patching.anatomy.architectures.silencers import no_bias
from hf_posenc.patching.anatomy.offloading import onload_weights
from hf_posenc.patching.anatomy.sites import AttentionLayer, Stack
from hf_posenc.schemes import ComposedConfig, DisentangledConfig, LearnedConfig
from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.place.journal import Journal

_REPLACEABLE = "Any scheme can replace it, and unpatch_model restores it."
#: Submodules of an attention module that only its disentangled attention uses.
_PROJECTIONS = ("pos_proj", "pos_q_proj", "pos_key_proj", "pos_query_proj")


def _is_first_version(module: Any) -> bool:
    """Whether a module is that of DeBERTa, and not that of DeBERTa-v2 or SEW-D."""
    return hasattr(module, "disentangled_att_bias")


def _silence(stack: Stack, patches: Journal) -> None:
    for attention in stack.attentions:
        first = _is_first_version(attention.module)
        patches.replace(attention.module, "disentangled_att_bias" if first else "disentangled_attention_bias", no_bias)
        _freeze(attention.module, _PROJECTIONS, patches)
    for encoder in stack.module.modules():
        if hasattr(encoder, "get_rel_embedding"):
            _freeze(encoder, ("rel_embeddings", "LayerNorm"), patches)


def _freeze(owner: nn.Module, names: tuple[str, ...], patches: Journal) -> None:
    for unused in filter(None, (getattr(owner, name, None) for name in names)):
        patches.freeze_all(unused)


def _terms(module: Any) -> list[str]:
    """The terms that an attention module computes: "c2p" and "p2c"."""
    return [term for term in ("c2p", "p2c") if module.relative_attention and term in module.pos_att_type]


def _logit_terms(module: Any) -> int:
    """The number of terms by which an attention module divides its logits, whether it computes them or not."""
    if _is_first_version(module):
        return 1 + len(module.pos_att_type)  # Unknown entries count too.
    return 1 + sum(term in module.pos_att_type for term in ("c2p", "p2c"))


def _refusal(module: Any) -> str | None:
    """Why no scheme computes the same as an attention module with terms, or `None`."""
    if getattr(module, "talking_head", False):
        return "mixes the logits of all heads after the bias is added (talking_head=True), which no scheme does."
    if _logit_terms(module) != 1 + len(_terms(module)):
        return (
            f"divides its logits by sqrt({_logit_terms(module)} head_dim), although it sums {1 + len(_terms(module))} "
            f"products, because its pos_att_type is {list(module.pos_att_type)}. No scheme describes this."
        )
    try:
        _config(module)
    except ValueError as error:
        return f"has buckets that no scheme describes: {error}"
    return None


def _config(module: Any) -> DisentangledConfig:
    buckets = getattr(module, "position_buckets", -1)
    return DisentangledConfig(
        terms="|".join(_terms(module)),
        max_distance=module.max_relative_positions,
        buckets=buckets if buckets > 0 else None,
    )


def _native(stack: Stack) -> SchemeConfig | None:
    module = stack.attentions[0].module
    if not _terms(module):
        return None
    refusal = _refusal(module)
    if refusal is not None:
        raise UnsupportedError(
            f"The disentangled attention of this {type(stack.module).__name__} {refusal} {_REPLACEABLE}"
        )
    scheme = _config(module)
    if not stack.tables:
        return scheme
    table, offset = stack.tables[0], stack.tables[0].origin
    return ComposedConfig(parts=(LearnedConfig(num_positions=table.weight.shape[0] - offset, offset=offset), scheme))


def _sew_native(stack: Stack) -> SchemeConfig | None:
    raise UnsupportedError(
        f"{type(stack.module).__name__} computes positions with a convolution over neighbouring embeddings, besides "
        "disentangled attention. They depend on the content of the sequence, so no scheme of this library describes "
        "them. 'disentangled' can be trained in their place, as any other scheme, and unpatch_model restores the "
        "native mechanisms."
    )


@torch.no_grad()
def _tables(stack: Stack, attention: AttentionLayer) -> Tensor | None:
    """`(terms, heads, rows, head_dim)` float32: the projected vectors of the keys, then those of the queries."""
    module = attention.module
    if not _terms(module) or _refusal(module) is not None:
        return None
    shared = getattr(module, "share_att_key", False)
    names = {"c2p": "pos_proj", "p2c": "pos_q_proj"}
    if not _is_first_version(module):
        names = {"c2p": "key_proj", "p2c": "query_proj"} if shared else {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
    encoder = stack.module.encoder
    with onload_weights(encoder.rel_embeddings):
        embeddings = encoder.get_rel_embedding()
    # The modules are called, and not multiplied with, because their weights may be elsewhere, quantized or adapted.
    projected = [getattr(module, names[term])(embeddings) for term in _terms(module)]
    return torch.stack([each.unflatten(-1, (attention.num_heads, -1)).transpose(0, 1).float() for each in projected])


#: The declarations by the model types that they are for.
DISENTANGLED: dict[tuple[str, ...], Architecture] = {
    ("deberta", "deberta-v2"): Architecture(
        mechanism="disentangled attention",
        silence=_silence,
        native=_native,
        bias_table=_tables,
        logit_terms=_logit_terms,
    ),
    ("sew-d",): Architecture(
        mechanism="disentangled attention", silence=_silence, native=_sew_native, logit_terms=_logit_terms
    ),
}
