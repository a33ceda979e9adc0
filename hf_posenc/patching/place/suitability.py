"""What a scheme must not be placed in, and what is no scheme at all."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitScale,
    PairwiseBias,
    QueryKeyMap,
    SchemeParts,
)

_KINDS: dict[str, tuple[type, ...]] = {
    "additive": (AdditiveEncoding,),
    "query_key_map": (QueryKeyMap,),
    "logit_bias": (DistanceBias, PairwiseBias),
    "logit_scale": (LogitScale,),
}


def check_parts(config: SchemeConfig, parts: Any) -> None:
    """Requires what `SchemeConfig.build` promises.

    Raises:
        TypeError: for anything but `SchemeParts` whose parts are of their kinds.
    """
    owner = f"{type(config).__name__}.build"
    if not isinstance(parts, SchemeParts):
        raise TypeError(f"{owner} returned {type(parts).__name__}; expected SchemeParts(...).")
    for name, kinds in _KINDS.items():
        part = getattr(parts, name)
        if part is not None and not isinstance(part, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{owner} returned a {type(part).__name__} as {name}; expected a subclass of {expected}.")


def refuse_unsuited(module: nn.Module, parts: SchemeParts) -> None:
    """Refuses parts that would act in the wrong place of one attention module.

    Raises:
        UnsupportedError: with the reason.
    """
    if parts.query_key_map is not None and parts.query_key_map.mapped_again and hasattr(module, "kv_lora_rank"):
        raise UnsupportedError(
            f"{type(module).__name__} (multi-head latent attention) rotates the end of its heads, and this scheme "
            "rotates far pairs once more, at the front of whole heads. Use a RoPE scaling, or position_scale."
        )
    replaces = isinstance(parts.logit_bias, PairwiseBias) and parts.logit_bias.replaces_logits
    if replaces and getattr(module, "attn_logit_softcapping", None):
        raise UnsupportedError(
            f"{type(module).__name__} caps its logits (attn_logit_softcapping={module.attn_logit_softcapping}) before "
            "a bias is added, and this scheme corrects them by one. Use a RoPE scaling, or position_scale."
        )
