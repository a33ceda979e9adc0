"""The forget gate of the Forgetting Transformer (FoX)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.constants import DeviceConstant
from hf_posenc.schemes.limits import LARGEST_LENGTH
from hf_posenc.schemes.parts import DistanceBias, SchemeParts, SeparableBias
from hf_posenc.schemes.positions import AttentionPairs
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.validation import check_choice, check_number, check_numbers


def minus_log_sigmoid(logits: Tensor) -> Tensor:
    """`-log(sigmoid(logits))`, of any shape.

    On a CPU, torch's `logsigmoid` wakes all threads for any number of logits, 0.2 ms in every layer of a decoding step.
    """
    return nn.functional.softplus(-logits)


class ForgetGateBias(SeparableBias):
    """The sum of the logarithms of all forget gates after a key, up to the query.

    Args:
        num_heads: number of query heads.
        hidden_size: width of what the layer projects its queries and keys from.
        initial_bias: what the logits of all gates start at.
        initializer_range: standard deviation of new weights.
    """

    num_features = 1
    reads_positions = False
    no_weight_decay = frozenset({"bias"})

    def __init__(self, num_heads: int, hidden_size: int, initial_bias: float, initializer_range: float) -> None:
        super().__init__()
        self.initial_bias = initial_bias
        self.initializer_range = initializer_range
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weights from N(0, initializer_range) and sets the biases."""
        nn.init.normal_(self.weight, std=self.initializer_range)
        nn.init.constant_(self.bias, self.initial_bias)

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """`(batch, heads, length, 1)` float32: minus the logarithm of each token's forget gate."""
        logits = nn.functional.linear(hidden_states.float(), self.weight.float(), self.bias.float())
        return minus_log_sigmoid(logits).transpose(1, 2).unsqueeze(-1)

    def key_terms(self, pairs: AttentionPairs) -> Tensor:
        """Returns `(batch, heads, key_len)` in float32: minus the sum of all log gates up to each key's own.

        Raises:
            ValueError: without the features of the keys.
        """
        if pairs.key_features is None:
            raise ValueError(
                "forget_gate sums what key_features computed from every token's hidden state, but this layer gives "
                "none. Use ForgetGateConfig(gate='bias_only'), which reads no tokens."
            )
        # What stands before both tokens cancels in the difference; padding between them must not make them forget.
        decays = pairs.key_features.squeeze(-1)
        if pairs.keys.may_hold_padding:
            decays = decays.masked_fill(pairs.keys.padding, 0.0)
        return decays.cumsum(dim=-1)


class ConstantForgetGateBias(DistanceBias):
    """The same with one gate per head: linear in the distance.

    Args:
        initial_biases: what the logit of each head's gate starts at.
    """

    no_weight_decay = frozenset({"bias"})

    def __init__(self, initial_biases: Tensor) -> None:
        super().__init__()
        self._initial_biases = DeviceConstant(initial_biases)
        self.bias = nn.Parameter(torch.empty(initial_biases.shape[0]))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the biases."""
        self.bias.copy_(self._initial_biases.on(self.bias.device))

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32; 0 for later keys."""
        slopes = self.slopes_behind(distance.device)
        return distance.clamp(max=0).float() * slopes.view(-1, *(1 for _ in distance.shape))

    def slopes_behind(self, device: torch.device) -> Tensor:
        """`(heads,)` float32: minus the logarithm of each gate."""
        return minus_log_sigmoid(self.bias.float())


@register_scheme
@dataclass(frozen=True)
class ForgetGateConfig(SchemeConfig):
    """Every token makes all later ones forget what came before it (FoX, arXiv:2503.02130, section 3).

    For query i and key j, with `x_t` the hidden state that token t is projected from::

        f_t        = sigmoid(w_h . x_t + b_h)
        bias(i, j) = log f_(j+1) + log f_(j+2) + ... + log f_i        for j <= i

    `w` is `(heads, hidden)` and `b` is `(heads,)`, learned per layer. Summed in float32, as in the official code. A
    cache keeps `-log f` of each token beside its key. CABLE (arXiv:2503.08067) is the same with `-softplus(w . x)` for
    the logarithm, that is, with the sign of `w` and `b` turned.

    "bias_only" has `f = sigmoid(b_h)` for all tokens: ALiBi with the learned slope `-log f`, and no bias at all as `b`
    grows. It follows positions rather than tokens in between.

    The paper trains without any other position encoding; compose it with RoPE for its variant with both. Causal models
    only.

    Args:
        gate: "content" or "bias_only".
        initial_bias: what `b` starts at; the official code has 0, so that gates start near one half.
        decay_times: of "bias_only": `(shortest, longest)` time in tokens after which a head has forgotten all but 1/e,
            spread evenly in the logarithm over the heads, in place of `initial_bias` (the paper's fixed and
            data-independent gates).
    """

    name: ClassVar[str] = "forget_gate"
    per_layer: ClassVar[bool] = True

    gate: str = "content"
    initial_bias: float = 0.0
    decay_times: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_choice(self, "gate", ("content", "bias_only"))
        check_number(self, "initial_bias")
        if self.decay_times is None:
            return
        check_numbers(self, "decay_times", minimum=0.1, maximum=LARGEST_LENGTH)
        if len(self.decay_times) != 2 or self.decay_times[0] > self.decay_times[1]:
            raise ValueError(
                f"ForgetGateConfig.decay_times is {self.decay_times!r}; expected two times, the shortest first and the "
                "longest last."
            )
        if self.gate != "bias_only" or self.initial_bias != 0:
            raise ValueError(
                f"ForgetGateConfig.decay_times is {self.decay_times!r}, which sets the biases of gates that nothing "
                f"else changes, but gate is {self.gate!r} and initial_bias is {self.initial_bias!r}. Use it with "
                "gate='bias_only' and without initial_bias."
            )

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit bias.

        Raises:
            UnsupportedError: in a bidirectional model.
        """
        if not context.causal:
            raise UnsupportedError(
                "forget_gate sums the gates of the tokens between an earlier key and the query, which says nothing "
                "about the later keys that this bidirectional model attends to. Use 'alibi' or 'grape'."
            )
        if self.gate == "content":
            input_size = context.layer_input_size or context.hidden_size
            return SchemeParts(
                logit_bias=ForgetGateBias(context.num_heads, input_size, self.initial_bias, context.initializer_range)
            )
        return SchemeParts(logit_bias=ConstantForgetGateBias(self._initial_biases(context.num_heads)))

    def _initial_biases(self, num_heads: int) -> Tensor:
        """`(heads,)` float32."""
        if self.decay_times is None:
            return torch.full((num_heads,), float(self.initial_bias), dtype=torch.float32, device="cpu")
        first, last = (torch.tensor(time, dtype=torch.float64, device="cpu").log() for time in self.decay_times)
        shares = torch.linspace(0.0, 1.0, num_heads, dtype=torch.float64, device="cpu")
        times = (first + (last - first) * shares).exp()
        # sigmoid(b) = exp(-1 / time)
        return -torch.log(torch.expm1(1.0 / times)).float()
