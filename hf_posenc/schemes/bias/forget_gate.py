"""The forget gate of the Forgetting Transformer (FoX)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DistanceBias, LogitBias, SeparableBias
from hf_posenc.schemes.positions import AttentionPairs, softplus
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import LARGEST_LENGTH, check_numbers, option
from hf_posenc.schemes.weights import copied_


class ForgetGateBias(SeparableBias):
    """The sum of the logarithms of all forget gates after a key, up to the query."""

    num_features = 1
    reads_positions = False
    sums_tokens = True
    no_weight_decay = frozenset({"bias"})

    def __init__(self, config: ForgetGateConfig, context: BuildContext) -> None:
        super().__init__()
        shape = (context.num_heads, context.input_size)
        self.weight = self.learned("weight", shape, std=context.initializer_range)
        self.bias = self.learned("bias", context.num_heads, nn.init.constant_, val=config.initial_bias)

    def key_features(self, hidden_states: Tensor) -> Tensor:
        """Returns minus the logarithm of each token's forget gate, `(batch, heads, length, 1)` float32."""
        logits = nn.functional.linear(hidden_states.float(), self.weight.float(), self.bias.float())
        return softplus(-logits).transpose(1, 2).unsqueeze(-1)

    def key_terms(self, pairs: AttentionPairs) -> Tensor:
        """Returns minus the sum of the log gates up to and including each key's, `(batch, heads, key_len)` float32.

        Raises:
            ValueError: if the features of the keys are missing.
        """
        if pairs.key_features is None:
            raise ValueError(
                "forget_gate computes its gates from hidden states, but this layer does not provide them. Use "
                "ForgetGateConfig(gate='bias_only'), which does not need them."
            )
        # Gates before both tokens cancel in the difference. Padding between the tokens must not count as forgetting.
        decays = pairs.key_features.squeeze(-1)
        if pairs.keys.may_hold_padding:
            decays = decays.masked_fill(pairs.keys.padding, 0.0)
        return decays.cumsum(dim=-1)


class ConstantForgetGateBias(DistanceBias):
    """A forget gate with one constant gate per head. It is linear in the distance."""

    no_weight_decay = frozenset({"bias"})

    def __init__(self, config: ForgetGateConfig, context: BuildContext) -> None:
        super().__init__()
        initial = config.initial_biases(context.num_heads)
        self.bias = self.learned("bias", context.num_heads, copied_, values=initial)

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32; 0 for later keys."""
        slopes = self.slopes_behind(distance.device)
        return distance.clamp(max=0).float() * slopes.view(-1, *(1 for _ in distance.shape))

    def slopes_behind(self, device: torch.device) -> Tensor:
        """`(heads,)` float32: minus the logarithm of each gate."""
        return softplus(-self.bias.float())


@register_scheme
class ForgetGateConfig(SchemeConfig):
    """Forget gates of tokens reduce attention to earlier tokens (FoX, arXiv:2503.02130, section 3).

    For query i and key j, with `x_t` the layer's input at token t::

        f_t        = sigmoid(w_h . x_t + b_h)
        bias(i, j) = log f_(j+1) + log f_(j+2) + ... + log f_i        for j <= i

    `w` is `(heads, hidden)` and `b` is `(heads,)`, learned per layer. The sum is computed in float32, as in the
    official code. A cache stores `-log f` of each token with its key. CABLE (arXiv:2503.08067) is equivalent: it uses
    `-softplus(w . x)` for the logarithm, which reverses the sign of `w` and `b`.

    "bias_only" uses `f = sigmoid(b_h)` for all tokens. This is ALiBi with the learned slope `-log f`; the bias vanishes
    as `b` grows. It depends on positions, not on the tokens in between.

    The paper trains without another position encoding. For its variant with RoPE, compose both. Causal models only.

    Args:
        gate: "content" or "bias_only".
        initial_bias: the initial value of `b`. The official code uses 0, so that gates start near one half.
        decay_times: for "bias_only", instead of `initial_bias`: the `(shortest, longest)` time in tokens after which
            the product of a head's gates is 1/e, spaced logarithmically over the heads (the paper's fixed and
            data-independent gates).
    """

    name: ClassVar[str] = "forget_gate"
    per_layer: ClassVar[bool] = True
    causal_only = (
        "forget_gate sums the gates of the tokens between an earlier key and the query. This is not defined "
        "for later keys, but this model is bidirectional and attends to them. Use 'alibi' or 'grape'."
    )

    gate: str = option("content", choices=("content", "bias_only"))
    initial_bias: float = option(0.0)
    decay_times: tuple[float, float] | None = option(None, check_numbers, minimum=0.1, maximum=LARGEST_LENGTH)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_times is None:
            return
        if len(self.decay_times) != 2 or self.decay_times[0] > self.decay_times[1]:
            raise ValueError(
                f"ForgetGateConfig.decay_times is {self.decay_times!r}; expected two times, the shortest first and the "
                "longest last."
            )
        if self.gate != "bias_only" or self.initial_bias != 0:
            raise ValueError(
                f"ForgetGateConfig.decay_times is {self.decay_times!r}, but gate is {self.gate!r} and initial_bias is "
                f"{self.initial_bias!r}. Use decay_times only with gate='bias_only' and without initial_bias."
            )

    @property
    def part_class(self) -> type[LogitBias]:  # type: ignore[override]
        """The bias of the gates."""
        return ForgetGateBias if self.gate == "content" else ConstantForgetGateBias

    def initial_biases(self, num_heads: int) -> Tensor:
        """The initial logit of each head's constant gate, `(heads,)` float32."""
        if self.decay_times is None:
            return torch.full((num_heads,), float(self.initial_bias), dtype=torch.float32, device="cpu")
        first, last = (torch.tensor(time, dtype=torch.float64, device="cpu").log() for time in self.decay_times)
        shares = torch.linspace(0.0, 1.0, num_heads, dtype=torch.float64, device="cpu")
        times = (first + (last - first) * shares).exp()
        # sigmoid(b) = exp(-1 / time)
        return -torch.log(torch.expm1(1.0 / times)).float()
