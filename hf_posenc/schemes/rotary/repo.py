"""Context re-positioning (RePo)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from hf_posenc.schemes.rotary.contextual import ContextualPlaces
from hf_posenc.schemes.rotary.rope import RotaryConfig, RotaryMap
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme
from hf_posenc.schemes.validation import SMALLEST_FACTOR


class RepoRotation(ContextualPlaces):
    """A rotation by places that a gated projection of each token predicts."""

    angles_stay = True
    angles_of_own_token = True
    sums_tokens = False

    def __init__(self, config: RepoConfig, context: BuildContext) -> None:
        super().__init__(RotaryMap(config.frequencies(context), config.layout), context)
        width = max(1, context.input_size // 8) if config.width is None else config.width
        self.gate = self.learned("gate", (width, context.input_size), std=config.initial_std)
        self.content = self.learned("content", (width, context.input_size), std=config.initial_std)
        self.places_of_heads = self.learned("places_of_heads", (context.key_heads, width), std=config.initial_std)

    def own_features(self, hidden_states: Tensor) -> Tensor:
        """Returns the places of the tokens, `(batch, key_value_heads, length, 1)` float32."""
        gate = nn.functional.silu(nn.functional.linear(hidden_states, self.gate.float()))
        gated = gate * nn.functional.linear(hidden_states, self.content.float())
        return nn.functional.linear(gated, self.places_of_heads.float()).transpose(1, 2).unsqueeze(-1)


@register_scheme
class RepoConfig(RotaryConfig):
    """RoPE at real-valued positions that each layer predicts from its input (RePo, arXiv:2512.14391, section 3).

    For a token with the layer's input `x`, key head h has the position::

        z_h = w_h . (silu(G x) * C x)

    and queries and keys are rotated by `z_h * theta ** (-2 m / rotary_dim)`. `G` and `C` are `(width, hidden)`, `w` is
    `(key_value_heads, width)`, learned per layer, without biases. Positions in the sequence are not used: the order of
    tokens is known from the causal mask only. The paper therefore uses it in about the last two thirds of the layers,
    with RoPE below them: `patch_model(model, "repo", layers=range(5, 16), elsewhere="rope")`.

    The gated projection follows the official code, which computes one position per attention head. Query heads that
    share a key head also share its position. The option of the official code that mixes the index of the token into
    its position is not implemented. A cache holds rotated keys, as with RoPE. Causal models only.

    Args:
        theta: the base of the frequencies.
        width: width of the gated projection; `None` for one eighth of the layer's input, as in the official code.
        initial_std: standard deviation of all new weights. With 0.02, positions are close to 0 at first, so that an
            untrained scheme hardly differs from 'none'.
        rotary_dim: how many leading dimensions of a head are rotated; `None` as in `RopeConfig`.
        layout: the pairing, as in `RopeConfig`.
    """

    name: ClassVar[str] = "repo"
    per_layer: ClassVar[bool] = True
    part_class = RepoRotation
    causal_only = (
        "repo computes the position of a token from its content alone, so the order of tokens is known only from the "
        "causal mask. This model is bidirectional and would not see their order. Use 'grape_m' or 'rope'."
    )

    theta: float = 10000.0
    width: int | None = option(None, minimum=1, maximum=2**16)
    initial_std: float = option(0.02, minimum=SMALLEST_FACTOR, maximum=100)
    rotary_dim: int | None = None
    layout: str = "auto"
