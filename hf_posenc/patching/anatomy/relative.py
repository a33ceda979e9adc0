"""Relative mechanisms of audio encoders, recognised by the weights and methods of an attention module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.schemes import ShawConfig, TransformerXLConfig
from hf_posenc.schemes.config import SchemeConfig

#: The method of a Conformer's attention that rotates its input, before queries and keys are projected.
ROTATES_INPUT = "_apply_rotary_embedding"


@dataclass(frozen=True)
class RelativeMechanism:
    """The relative mechanism of one attention module: a bias that depends on the query, or a rotation of its input.

    Args:
        description: its name, for reports.
        scheme: the scheme that computes the same, or `None`.
        weight: the native weights, as the `adopt` of that scheme takes them.
        projection: a linear layer that the bias is proportional to. Zeros in place of its output disable the bias.
            `None` if the module passes the bias on as an argument, which is dropped.
        names: names of the weights and submodules that only the mechanism uses.
        method: the method that rotates the module's input, or `None`.
    """

    description: str
    scheme: SchemeConfig | None
    weight: Tensor | None = None
    projection: nn.Module | None = None
    names: tuple[str, ...] = ()
    method: str | None = None


def find_relative(module: Any) -> RelativeMechanism | None:
    """The relative mechanism of an attention module, or `None` if it has none."""
    if isinstance(getattr(module, "distance_embedding", None), nn.Embedding):
        return _shaw(module)
    if isinstance(getattr(module, "linear_pos", None), nn.Linear) and hasattr(module, "pos_bias_u"):
        weight = _transformer_xl(module.linear_pos.weight, module.pos_bias_u, module.pos_bias_v)
        names = ("linear_pos", "pos_bias_u", "pos_bias_v")
        return RelativeMechanism("Transformer-XL bias", TransformerXLConfig(), weight, None, names)
    if isinstance(getattr(module, "relative_k_proj", None), nn.Linear) and hasattr(module, "bias_u"):
        projection = module.relative_k_proj
        # The module itself adds `bias_u` to its queries, so the scheme adds the rest.
        none = torch.zeros_like(module.bias_u)
        weight = _transformer_xl(projection.weight, none, module.bias_v.detach() - module.bias_u.detach())
        return RelativeMechanism(
            "Transformer-XL bias", TransformerXLConfig(), weight, projection, ("relative_k_proj", "bias_v")
        )
    if getattr(module, "position_embeddings_type", None) == "rotary" and hasattr(module, ROTATES_INPUT):
        return RelativeMechanism("rotation of the input of attention", None, method=ROTATES_INPUT)
    return None


def _shaw(module: Any) -> RelativeMechanism | None:
    ahead = getattr(module, "right_max_position_embeddings", None)
    behind = getattr(module, "left_max_position_embeddings", None)
    if not isinstance(ahead, int) or not isinstance(behind, int):
        return None
    scheme = ShawConfig(max_distance=behind, max_distance_ahead=ahead)
    weight = module.distance_embedding.weight
    return RelativeMechanism("relative keys", scheme, weight, None, ("distance_embedding",))


def _transformer_xl(projection: Tensor, content: Tensor, position: Tensor) -> Tensor:
    """`(heads * head_dim, hidden + 2)`: the projection of sines, then of cosines, and the two biases.

    The architectures interleave sines and cosines.
    """
    columns = [projection[:, 0::2], projection[:, 1::2], content.reshape(-1, 1), position.reshape(-1, 1)]
    return torch.cat([column.detach() for column in columns], dim=1)
