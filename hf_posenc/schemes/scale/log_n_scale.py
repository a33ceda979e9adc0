"""Log-n scaling of attention."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.scale.visible_keys import VisibleKeysScale
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, option, register_scheme
from hf_posenc.schemes.validation import SMALLEST_FACTOR


class LogNScale(VisibleKeysScale):
    """`log(n) / log(training_length)`, or YaRN's `(1 + yarn_weight * log(n / training_length)) ** 2`."""

    def __init__(self, config: LogNScaleConfig, context: BuildContext) -> None:
        super().__init__(context)
        length = context.max_positions if config.training_length is None else config.training_length
        if length is None or length < 2:
            raise ValueError(
                f"LogNScaleConfig.training_length is {config.training_length}, and the model's config has {length} "
                "positions; expected at least 2 from one of them. Give training_length in tokens."
            )
        self.training_length = length
        self.clamp = config.clamp
        self.yarn_weight = config.yarn_weight

    def forward(self, positions: Positions) -> Tensor:
        """Returns `(batch or 1, 1, length)` in float32."""
        keys = self.visible_keys(positions)
        if self.yarn_weight is None:
            factor = keys.log() / math.log(self.training_length)
        else:
            factor = (1.0 + self.yarn_weight * (keys / self.training_length).clamp(min=1.0).log()).square()
        if self.clamp:
            factor = factor.clamp(min=1.0)
        return factor.unsqueeze(1)


@register_scheme
class LogNScaleConfig(SchemeConfig):
    """Logits that grow with the logarithm of the number of keys, relative to training (J. Su, kexue.fm/archives/8823).

    Su derives that a query must be scaled by the logarithm of the number of keys to keep the entropy of attention
    constant as keys are added. Relative to the training length `L`, this does not change a trained model at that
    length::

        scale(i) = max(1, log(n) / log(L))                     clamp=True
        scale(i) = log(n) / log(L)                             clamp=False
        scale(i) = max(1, 1 + yarn_weight * log(n / L)) ** 2   yarn_weight given

    `n` is the number of keys that the query attends to: its position plus one in a causal model, the number of real
    tokens in a bidirectional model. Nothing is learned.

    The derivation gives the unclamped form, for models trained with it. The clamped form is used in Qwen's released
    code (`use_logn_attn`), which counts keys in the same way. It is the default, because up to the training length it
    does not change a model that was trained without a scale. The last form is the temperature of YaRN
    (arXiv:2309.00071, section 3.4), with the factor `n / L` of each query instead of one for all lengths. All logits of
    a query are scaled, including the bias of another scheme, because the entropy depends on all of them. Qwen scales
    the query, which is equivalent in its models without bias.

    Args:
        training_length: `L`, in tokens; `None` takes the length the stock model was built for.
        clamp: whether queries with fewer than `L` keys have the factor 1.
        yarn_weight: weight of the logarithm in YaRN's form: 0.1 in YaRN's paper and in vLLM's dual chunk attention;
            `None` for the other forms. It needs `clamp`.
    """

    name: ClassVar[str] = "log_n_scale"
    part_class = LogNScale

    training_length: int | None = option(None, minimum=2)
    clamp: bool = option(True)
    yarn_weight: float | None = option(None, minimum=SMALLEST_FACTOR)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.yarn_weight is not None and not self.clamp:
            raise ValueError(
                f"LogNScaleConfig has yarn_weight={self.yarn_weight} and clamp=False, but YaRN's temperature is only "
                "defined for lengths beyond training_length. Omit clamp, or omit yarn_weight for log(n) / log(L)."
            )
