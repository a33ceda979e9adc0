"""Schemes for the order of tokens in stacks whose tokens are patches of images."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hf_posenc.schemes.parts import AdditiveEncoding, LogitScale, QueryKeyMap

#: What to do about it, for messages.
TWO_DIMENSIONAL = (
    "For rows and columns use 'rope_nd', 'swin', axes=2 (sinusoidal, alibi, t5), or grid=(rows, columns) (learned); "
    "for videos axes=3 or a grid of three sizes."
)


def order_readers(parts: Iterable[nn.Module]) -> list[str]:
    """What those parts of a scheme do that read positions but no coordinates, for messages that name the scheme."""
    return sorted({_effect(part) for part in parts if reads_order_only(part)})


def _effect(part: nn.Module) -> str:
    if isinstance(part, AdditiveEncoding):
        return "the added vectors"
    if isinstance(part, QueryKeyMap):
        return "the rotation"
    return "the logit scale" if isinstance(part, LogitScale) else "the bias"


def reads_order_only(part: nn.Module) -> bool:
    """Whether a part reads positions but no part of it reads coordinates."""
    if not getattr(part, "reads_positions", True):
        return False
    return not any(getattr(module, "reads_coordinates", False) for module in part.modules())
