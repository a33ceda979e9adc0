"""Polar coordinate position embedding (PoPE)."""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DeviceConstant, QueryKeyMap
from hf_posenc.schemes.positions import Positions, softplus
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import check_base, option
from hf_posenc.schemes.weights import Layers, projected


class PopeMap(QueryKeyMap):
    """Turns every dimension of a head into a magnitude with an angle that depends only on position."""

    symmetric = False
    whole_heads = True
    width_factor = 2

    def __init__(self, config: PopeConfig, context: BuildContext) -> None:
        super().__init__()
        head_dim = context.head_dim
        self.rotary_dim = head_dim
        self.theta = config.theta
        # RoPE spreads its frequencies over pairs. PoPE spreads the same range over single dimensions.
        self._inverse_frequencies = DeviceConstant(rope_inverse_frequencies(config.theta, 2 * head_dim))
        uniform = functools.partial(nn.init.uniform_, a=-2 * math.pi, b=0.0)
        start = nn.init.zeros_ if config.initial_delta == "zero" else uniform
        self.delta = self.learned("delta", (context.key_heads, head_dim), start)

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns cosine and sine side by side, of queries and of keys, in float32.

        The first are `(batch or 1, 1, query_len, 2 * head_dim)`, the others `(batch or 1, key_value_heads, query_len, 2
        * head_dim)`.
        """
        ((of_queries, of_keys),) = self.of_layers(Layers([self]), positions)
        return of_queries, of_keys

    @classmethod
    def of_layers(
        cls, layers: Layers, positions: Positions, dtype: torch.dtype | None = None
    ) -> list[tuple[Tensor, ...]]:
        """What `phases` returns for each of several layers, which differ in the phases that are added for keys."""

        def phases_of_keys() -> Tensor:
            deltas = layers.stack([layer.delta for layer in layers])
            return projected(deltas.float(), -2 * math.pi, 0.0)[:, None, :, None, :]

        frequencies = layers[0]._inverse_frequencies.on(positions.ids.device)
        angles = positions.ids[:, None, :, None].float() * frequencies
        of_keys = _waves(angles + positions.kept(layers, "delta", phases_of_keys))
        of_queries = _waves(angles)
        return [(of_queries, of_layer) for of_layer in of_keys.unbind(0)]

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, heads, query_len, head_dim)` -> `(batch, heads, query_len, 2 * head_dim)` of the same dtype."""
        return _polar(query, phases[0])

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        """`(batch, key_value_heads, query_len, head_dim)` -> the same, `2 * head_dim` wide, of the same dtype."""
        return _polar(key, phases[1])


def _waves(angles: Tensor) -> Tensor:
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _polar(x: Tensor, waves: Tensor) -> Tensor:
    magnitude = softplus(x.float())
    if waves.shape[1] not in (1, x.shape[1]):
        # Queries have the phase of their key head, so that logits are relative.
        waves = waves.repeat_interleave(x.shape[1] // waves.shape[1], dim=1)
    return (torch.cat((magnitude, magnitude), dim=-1) * waves).to(x.dtype)


@register_scheme
class PopeConfig(SchemeConfig):
    """Content as magnitudes and position as angles of queries and keys (PoPE, arXiv:2509.10534, section 3, eq. 3 to 8).

    In RoPE the angle between a query and a key mixes content and position. Here every dimension `c` of a head is the
    magnitude of a complex number whose angle depends only on position::

        w[c]     = theta ** (-c / head_dim)                          c = 0 .. head_dim - 1
        query[c] = softplus(q[c]) * exp(i * p * w[c])
        key[c]   = softplus(k[c]) * exp(i * (s * w[c] + delta[c]))
        logit    = sum over c of softplus(q[c]) * softplus(k[c]) * cos((s - p) * w[c] + delta[c])

    for a query at `p` and a key at `s`, before the layer's own `head_dim ** -0.5`. As real numbers, queries and keys
    are twice as wide (`2 * head_dim`: the real parts, then the imaginary ones); values keep their width. The learned
    phase `delta`, `(key_value_heads, head_dim)` in every layer, is clamped to `[-2 pi, 0]` whenever it is used. It
    starts at the edge of that range. With a plain clamp, a phase that leaves the range in the first step would never
    receive a gradient again; here it receives the gradients that lead back. Query heads that share a key head share its
    phases (in the paper there are as many key heads as query heads).

    The whole head is mapped, even if the architecture itself rotates only a part of it. Every content dimension becomes
    positive, so use this scheme to train a model from scratch, not in a model that was trained with another scheme.

    Args:
        theta: the base of the frequencies.
        initial_delta: "zero" (according to the paper, better on sequences longer than in training) or "uniform" in `[-2
            pi, 0]` (slightly better up to the trained length).
    """

    name: ClassVar[str] = "pope"
    per_layer: ClassVar[bool] = True
    part_class = PopeMap

    theta: float = option(10000.0, check_base)
    initial_delta: str = option("zero", choices=("zero", "uniform"))
