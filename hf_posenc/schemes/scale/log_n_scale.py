"""Log-n scaling of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.parts import LogitScale, SchemeParts
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.registry import register_scheme
from hf_posenc.schemes.scale.visible_keys import visible_keys
from hf_posenc.schemes.validation import check_boolean, check_integer


class LogNScale(LogitScale):
    """`log(n) / log(training_length)`.

    Args:
        training_length: number of keys at which the factor is 1.
        clamp: whether fewer keys have the factor 1 too.
        causal: whether queries see only keys at or before their own position.
    """

    def __init__(self, training_length: int, clamp: bool, causal: bool) -> None:
        super().__init__()
        self.training_length = training_length
        self.clamp = clamp
        self.causal = causal
        self.length_dependent = not causal

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, 1, length)` in float32."""
        factor = visible_keys(positions, self.causal).log() / math.log(self.training_length)
        if self.clamp:
            factor = factor.clamp(min=1.0)
        return factor.unsqueeze(1)


@register_scheme
@dataclass(frozen=True)
class LogNScaleConfig(SchemeConfig):
    """Logits that grow with the logarithm of the number of keys, relative to training (J. Su, kexue.fm/archives/8823).

    Su derives from the wish that the entropy of attention stay the same as keys are added that a query must be scaled
    by the logarithm of their number; measured in units of the training length `L` this leaves a trained model alone::

        scale(i) = max(1, log(n) / log(L))      clamp=True
        scale(i) = log(n) / log(L)              clamp=False

    `n` is the number of keys that the query chooses between: its position plus one in a causal model, the number of
    real tokens in a bidirectional one. Nothing is learned.

    The derivation gives the unclamped form, for models trained with it. The clamped form is that of Qwen's released
    code (`use_logn_attn`), which counts keys as here; it is the default, because it leaves a model that was trained
    without any scale as it is, up to its training length. All logits of a query are scaled, also what a bias of
    another scheme added, since entropy is a property of all of them. Qwen scales the query, which is the same in its
    models without bias.

    Args:
        training_length: `L`, in tokens; `None` takes the length the stock model was built for.
        clamp: keeps queries with fewer than `L` keys as they are.
    """

    name: ClassVar[str] = "log_n_scale"

    training_length: int | None = None
    clamp: bool = True

    def __post_init__(self) -> None:
        check_integer(self, "training_length", minimum=2, optional=True)
        check_boolean(self, "clamp")

    def build(self, context: BuildContext) -> SchemeParts:
        """Builds a logit scale.

        Raises:
            ValueError: if neither the config nor the model says how long training sequences were.
        """
        length = context.max_positions if self.training_length is None else self.training_length
        if length is None or length < 2:
            raise ValueError(
                f"LogNScaleConfig.training_length is {self.training_length}, and the model says that it was built for "
                f"{length} positions; expected at least 2 from either. Give training_length in tokens."
            )
        return SchemeParts(logit_scale=LogNScale(length, self.clamp, context.causal))
