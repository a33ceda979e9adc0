"""Selective rotary position embedding (Selective RoPE)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.parts import DeviceConstant
from hf_posenc.schemes.positions import FEW_KEYS, Positions, tokens_at
from hf_posenc.schemes.rotary.contextual import ContextualRotation, unfilled
from hf_posenc.schemes.rotary.rope import RotaryConfig
from hf_posenc.schemes.rotary.rotation_kernel import (
    RotationFactors,
    factors_of_angles,
    factors_of_signed_angles,
    signed_for_both_of_pair,
)
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_WIDTH, SMALLEST_FACTOR
from hf_posenc.schemes.weights import Layers, traced


class SelectiveRotation(ContextualRotation):
    """A rotation by the sum of the angles of all tokens up to each token."""

    no_weight_decay = frozenset({"gate_bias"})
    finds_documents = True
    angles_stay = True

    def __init__(self, config: SelectiveRopeConfig, context: BuildContext) -> None:
        heads, input_size = context.key_heads, context.input_size
        if input_size % heads:
            raise UnsupportedError(
                f"selective_rope scales the share of each key head in the layer's input, but {input_size} numbers "
                f"cannot be divided among {heads} key heads. Use 'grape_m'."
            )
        frequencies = config.frequencies(context)
        count = frequencies.shape[0]
        super().__init__(2 * count, config.layout, context)
        self.num_features = self.num_shared_features = count + config.gate
        self.needs_oldest_keys = config.kernel_size > 1
        self._frequencies = DeviceConstant(frequencies)
        self.down = self.learned("down", (config.rank, input_size), std=config.initial_std)
        self.up = self.learned("up", (heads, count, config.rank), std=config.initial_std)
        # As torch draws a new `Conv1d`.
        bound = config.kernel_size**-0.5
        self.kernel = self.learned("kernel", (heads, count, config.kernel_size), nn.init.uniform_, a=-bound, b=bound)
        self.gate_weight = (
            self.learned("gate_weight", (heads, input_size), std=config.initial_std) if config.gate else None
        )
        self.gate_bias = self.learned("gate_bias", heads, nn.init.zeros_) if config.gate else None

    def own_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the angle of each pair and the gate, `(batch, key_value_heads, length, num_features)` float32."""
        up, heads = self.up, self.num_key_heads
        # The official code scales each head's share of the input to length 1.
        shares = torch.unflatten(hidden_states, -1, (heads, -1))
        lengths = torch.linalg.vector_norm(shares, dim=-1, keepdim=True)
        scaled = (shares / lengths.clamp(min=1e-6)).flatten(-2)
        low = nn.functional.linear(scaled, self.down.float())
        angles = torch.unflatten(nn.functional.linear(low, up.float().flatten(0, 1)), -1, (heads, -1)).transpose(1, 2)
        if self.gate_weight is None or self.gate_bias is None:
            return angles
        gate = nn.functional.linear(scaled, self.gate_weight.float(), self.gate_bias.float()).sigmoid()
        return torch.cat((angles, gate.transpose(1, 2).unsqueeze(-1)), dim=-1)

    def angles(self, features: Tensor, keys: Positions) -> Tensor:
        """Returns the sums, `(batch, key_value_heads, key_len, rotary_dim / 2)` float32."""
        order, back, neighbours = _in_order(keys, self.kernel.shape[-1])
        (taps,) = keys.of_weights(self, "taps", self._taps)
        if order is None or back is None:
            return self._sums(features, neighbours, taps)
        return tokens_at(self._sums(tokens_at(features, order), neighbours, taps), back)

    def factors(
        self, features: Tensor, keys: Positions, dtype: torch.dtype, cached: Tensor | None = None
    ) -> RotationFactors:
        """Multiplies the cached features by weights if there is one new token, and no more precision is needed."""
        if cached is None or features.shape[-2] != 1 or dtype == torch.float64:
            return super().factors(features, keys, dtype, cached)
        count, steps = self.kernel.shape[1:]
        lengths = [cached.shape[-2], 1]
        if self.gate_weight is None:
            of_cached, of_new = keys.remembered(
                f"weights {steps}", lambda: _weights(keys, steps).split(lengths, dim=-1), keys.ids
            )
        else:
            gates = torch.cat((cached[..., count:], features[..., count:]), dim=-2)
            of_cached, of_new = _weights(keys, steps, gates).split(lengths, dim=-1)
            cached, features = cached[..., :count], features[..., :count]
        return self._factors_of_sums(torch.addcmul(of_cached @ cached, of_new, features), keys, dtype)

    def factors_in_slots(self, features: Tensor, keys: Positions, slots: Tensor, dtype: torch.dtype) -> RotationFactors:
        """Multiplies the features of all slots by weights, as `factors` does, if there is one new token."""
        if slots.shape[0] != 1 or dtype == torch.float64:
            return super().factors_in_slots(features, keys, slots, dtype)
        count, steps = self.kernel.shape[1:]

        def filled() -> Positions:
            return dataclasses.replace(keys, ids=keys.ids.masked_fill(unfilled(keys, slots).squeeze(1), -1))

        seen = keys.remembered("filled slots", filled, keys.ids, slots)
        if self.gate_weight is None:
            weights = seen.remembered(f"weights {steps}", lambda: _weights(seen, steps), seen.ids)
        else:
            weights = _weights(seen, steps, features[..., count:])
        return self._factors_of_sums(weights @ features[..., :count], keys, dtype)

    def _factors_of_sums(self, sums: Tensor, keys: Positions, dtype: torch.dtype) -> RotationFactors:
        """The factors of the last token, from its sums `(batch, key_value_heads, steps, rotary_dim / 2)`."""
        (kernel,) = keys.of_weights(self, "kernel", self._signed_kernels)
        angles = (sums.unsqueeze(-2) * kernel).sum(dim=-3)
        if self.layout == "interleaved":
            return factors_of_angles(angles[..., :1, :], self.layout, dtype)
        return factors_of_signed_angles(angles.flatten(-2).unsqueeze(-2), dtype)

    def _taps(self, layers: Layers) -> tuple[Tensor]:
        """The steps of kernels times frequencies, that of the token itself last, `(layers, heads, 1, count, steps)`."""
        kernels = layers.stack([layer.kernel for layer in layers]).float()
        return ((kernels * self._frequencies.on(kernels.device).unsqueeze(-1)).unsqueeze(-3),)

    def _signed_kernels(self, layers: Layers) -> tuple[Tensor]:
        """`(layers, heads, steps, 2, count)` float32: all of `_taps`, with the signs of signed angles."""
        steps = self._taps(layers)[0].squeeze(-3).transpose(-1, -2)
        return (torch.unflatten(signed_for_both_of_pair(steps, self.layout), -1, (2, -1)),)

    def _sums(self, features: Tensor, neighbours: tuple[Tensor | None, ...], taps: Tensor) -> Tensor:
        """`angles` for tokens without padding between them, the `_neighbours` of these, and the `_taps`."""
        count, length = self.kernel.shape[1], features.shape[-2]
        current = features if self.gate_weight is None else features[..., :count]
        earlier = nn.functional.pad(current, (0, 0, len(neighbours), 0)) if neighbours else current
        if not traced() and length <= FEW_KEYS and Tensor not in map(type, neighbours):
            # The fewest operators. For a long text, these products would need much memory.
            combined = (earlier.unfold(-2, taps.shape[-1], 1) * taps).sum(-1)
        else:
            *before, newest = taps.unbind(-1)
            combined = current * newest
            for start, (same, tap) in enumerate(zip(reversed(neighbours), before, strict=True)):
                shifted = earlier.narrow(-2, start, length)
                combined = torch.addcmul(combined, shifted if same is None else shifted * same, tap)
        if self.gate_weight is not None:
            combined = combined * features[..., count:]
        return combined.cumsum(dim=-2)


def _in_order(keys: Positions, steps: int) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """The order of tokens with padding last, the order back, and `_neighbours` in it; layers share them.

    Tokens on both sides of padding are neighbours. The orders are `(batch or 1, key_len)`, or `None` without padding.
    """

    def find() -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        if not keys.may_hold_padding:
            return None, None, _neighbours(keys.ids, steps)
        padding = keys.padding.squeeze(1)
        # Not a stable sort, which ONNX does not have.
        real = (~padding).cumsum(dim=-1)
        back = torch.where(padding, real[:, -1:] + padding.cumsum(dim=-1), real) - 1
        order = back.argsort(dim=-1)
        return order, back, _neighbours(keys.ids.gather(-1, order), steps)

    return keys.remembered(f"order and neighbours {steps}", find, keys.ids)


def _neighbours(ids: Tensor, steps: int) -> tuple[Tensor | None, ...]:
    """1 where the token 1, 2, ... before a token is of the same packed document, else 0.

    Returns:
        `steps - 1` of `(batch or 1, 1, key_len, 1)` float32, or of `None` if it is known that there is one document.
    """
    # A document begins where positions do not increase.
    begins = nn.functional.pad(ids[:, 1:] <= ids[:, :-1], (1, 0))
    if ids.is_cpu and not traced() and not bool(begins.any()):
        return (None,) * (steps - 1)
    documents = nn.functional.pad(begins.cumsum(dim=-1), (steps - 1, 0), value=-1)
    windows = documents.unfold(-1, steps, 1)
    same = windows[..., :-1] == windows[..., -1:]
    return same.flip(-1).float().movedim(-1, 0).unsqueeze(2).unsqueeze(-1).unbind(0)


def _weights(keys: Positions, steps: int, gates: Tensor | None = None) -> Tensor:
    """The factor of each token in the sum up to the last token, at each step of the kernel.

    Args:
        keys: the positions of all tokens.
        steps: number of tokens that the kernel combines.
        gates: `(batch, key_value_heads, key_len, 1)`, or `None`.

    Returns:
        `(batch or 1, key_value_heads or 1, steps, key_len)` float32.
    """
    order, back, neighbours = _in_order(keys, steps)
    if gates is None and order is None and Tensor not in map(type, neighbours):
        length = keys.ids.shape[-1]
        return torch.ones(1, 1, steps, length, device=keys.ids.device).tril(length - steps)
    real = (keys.ids >= 0).float()[:, None, :, None]
    rows = [real if gates is None else real * gates]
    if gates is not None and order is not None:
        gates = tokens_at(gates, order)
    for distance, same in enumerate(neighbours, start=1):
        reads = torch.ones_like(real) if same is None else same
        reads = reads if gates is None else reads * gates
        # A token is read by the token that is `distance` after it.
        is_read = nn.functional.pad(reads, (0, 0, 0, distance))[..., distance:, :]
        rows.append(is_read if back is None else tokens_at(is_read, back))
    return torch.cat(rows[::-1], dim=-1).transpose(-2, -1)


@register_scheme
class SelectiveRopeConfig(RotaryConfig):
    """RoPE with angles that are computed from the tokens and summed over them (Selective RoPE, arXiv:2511.17388,
    section 4).

    With `x_t` the layer's input at token t, key head h rotates its pair `m` by::

        a_t      = U_h D normalize(x_t)                                      rotary_dim / 2 angles
        c_t      = K_0 * a_t + K_1 * a_(t-1) + ... + K_3 * a_(t-3)           a convolution for each angle
        angle_t  = theta ** (-2 m / rotary_dim) * sum over s <= t of g_s c_s

    `D`, `(rank, hidden)`, `U`, `(key_value_heads, rotary_dim / 2, rank)`, and the convolution are learned per layer.
    `g` is 1, or with `gate` the sigmoid of a linear function of `x`, one number per key head. `normalize` scales the
    share of each key head in the input to length 1. The rotation depends on the order of tokens and not on position
    ids. Equal angles of all tokens give RoPE.

    A cache holds rotated keys, with `a` and `g` of each token in additional channels of its key: for every key head
    half as many numbers as it has rotated dimensions, each in one channel in float32 and in three in 16 bits. Caches of
    sliding windows drop tokens that the convolution needs, so they are refused. Causal models only.

    The low rank, the convolution, and the frequencies follow the official code for language models. Its options for
    another parametrisation, an additive constant, and trained temperatures are not implemented.

    Args:
        theta: the base of the frequencies; 500,000 in the official configuration.
        rank: width between the two projections.
        kernel_size: number of tokens that the convolution combines; 1 for no convolution.
        gate: whether every token has a gate.
        initial_std: standard deviation of new projections. With 0.02, angles are close to 0 at first, so that an
            untrained scheme hardly differs from 'none'.
        rotary_dim: how many leading dimensions of a head are rotated; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "selective_rope"
    per_layer: ClassVar[bool] = True
    part_class = SelectiveRotation
    causal_only = (
        "selective_rope sums the angles of earlier tokens, and its convolution reads earlier tokens only. This "
        "model is bidirectional. Use 'grape_m' or 'rope'."
    )

    theta: float = 500000.0
    rank: int = option(32, minimum=1, maximum=LARGEST_WIDTH)
    kernel_size: int = option(4, minimum=1, maximum=64)
    gate: bool = option(False)
    initial_std: float = option(0.02, minimum=SMALLEST_FACTOR, maximum=100)
    rotary_dim: int | None = None
    layout: str = "auto"
