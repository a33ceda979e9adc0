"""Contextual multiplicative group representational position encoding (GRAPE-M)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DeviceConstant
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary.contextual import ContextualPlaces, unfilled
from hf_posenc.schemes.rotary.learned_frequencies import LearnedFrequenciesMap
from hf_posenc.schemes.rotary.rope import RotaryConfig
from hf_posenc.schemes.rotary.rotation_kernel import RotationFactors
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_LENGTH, SMALLEST_FACTOR

#: The official code initialises its gates with the inverse of softplus at 1e-3, and then applies a sigmoid to them.
_INITIAL_BIAS = math.log(math.expm1(1e-3))


class GrapeMRotation(ContextualPlaces):
    """A rotation by the sum of the increments of all earlier tokens."""

    no_weight_decay = frozenset({"bias"})
    angles_stay = True

    def __init__(self, config: GrapeMConfig, context: BuildContext) -> None:
        super().__init__(LearnedFrequenciesMap(config.frequencies(context), config.layout), context)
        # A tensor, because torch makes one of a number in each call.
        self._gate_scale = DeviceConstant(torch.tensor(config.gate_scale, dtype=torch.float32, device="cpu"))
        heads = context.key_heads if config.per_head else 1
        self.weight = self.learned("weight", (heads, context.input_size), nn.init.zeros_)
        self.bias = self.learned("bias", heads, nn.init.constant_, val=config.initial_bias)

    def own_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the increments of the tokens, `(batch, key_value_heads or 1, length, 1)` float32."""
        logits = nn.functional.linear(hidden_states, self.weight.float(), self.bias.float())
        gates = (logits / self._gate_scale.on(logits.device)).sigmoid()
        return gates.unsqueeze(1) if gates.shape[-1] == 1 else gates.transpose(1, 2).unsqueeze(-1)

    def places(self, contributions: Tensor, keys: Positions) -> Tensor:
        """Returns the sums of the increments of earlier tokens."""
        # Padding between two tokens must not move them apart.
        if keys.may_hold_padding:
            contributions = contributions.masked_fill(keys.padding.unsqueeze(-1), 0.0)
        return contributions.cumsum(dim=-2) - contributions

    def factors(
        self, features: Tensor, keys: Positions, dtype: torch.dtype, cached: Tensor | None = None
    ) -> RotationFactors:
        """Adds up all cached increments at once if there is one new token."""
        if cached is None or features.shape[-2] != 1 or keys.may_hold_padding:
            return super().factors(features, keys, dtype, cached)
        return self.factors_at(cached.sum(dim=-2, keepdim=True), keys, dtype)

    def factors_in_slots(self, features: Tensor, keys: Positions, slots: Tensor, dtype: torch.dtype) -> RotationFactors:
        """Adds up the increments before a single new token."""
        if slots.shape[0] != 1:
            return super().factors_in_slots(features, keys, slots, dtype)
        increments = features.masked_fill(unfilled(keys, slots).unsqueeze(-1), 0.0)
        newest = increments.index_select(-2, slots)
        return self.factors_at(increments.sum(dim=-2, keepdim=True) - newest, keys, dtype)


@register_scheme
class GrapeMConfig(RotaryConfig):
    """RoPE in which every token moves the following ones on by an increment that depends on its content (contextual
    GRAPE-M, arXiv:2512.07805, section 3).

    With `x_t` the layer's input at token t, the token is rotated by the angles `Phi_t * frequency[m]`, where::

        omega_t = sigmoid((w . x_t + b) / gate_scale)
        Phi_t   = omega_0 + omega_1 + ... + omega_(t-1)

    `w`, `(1, hidden)`, `b` and the frequencies, `(rotary_dim / 2,)`, are learned per layer; the frequencies start as
    RoPE's. The rotation depends on the order of tokens and not on position ids. If all increments are 1, it is RoPE.

    The sigmoid, its scale, and the initial values follow the official code: `w` is zero and `b` is -6.9, so that all
    increments start at 0.39.

    Args:
        theta: the base of the initial frequencies.
        per_head: whether every key head has its own increments. Query heads use those of their key head.
        gate_scale: divisor of the logits of the increments.
        initial_bias: the initial value of `b`.
        rotary_dim: how many leading dimensions of a head are rotated; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`. The official code has the pairing "half_reversed".
    """

    name: ClassVar[str] = "grape_m"
    per_layer: ClassVar[bool] = True
    part_class = GrapeMRotation

    theta: float = 10000.0
    per_head: bool = option(False)
    gate_scale: float = option(16.0, minimum=SMALLEST_FACTOR, maximum=LARGEST_LENGTH)
    initial_bias: float = option(_INITIAL_BIAS)
    rotary_dim: int | None = None
    layout: str = "auto"
