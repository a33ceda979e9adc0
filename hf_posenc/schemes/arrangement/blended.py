"""Interpolation between two schemes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hf_posenc.schemes.arrangement.schedule import nested_scheme
from hf_posenc.schemes.needs import needs_of
from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.outer_parts import ChainedMap, CombinedScale, SummedEncoding, sum_of_biases
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.refusals import GRADUAL_SWAP
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.scheme import OuterConfig, SchemeConfig, option, register_scheme


@register_scheme
class BlendedConfig(OuterConfig):
    """Interpolates between an old and a new scheme, to move a pretrained model gradually from one to the other.

    With `s` for `strength`, each kind of part is interpolated separately::

        added vectors   (1 - s) * old(p) + s * new(p)
        rotations       first old((1 - s) * p), then new(s * p)
        biases          (1 - s) * old(i, j) + s * new(i, j)
        logit scales    (1 - s) * old(i) + s * new(i)

    so that 0 is the old scheme and 1 the new one. Missing parts count as zero vectors, no rotation, a bias of 0 and a
    scale of 1. The angles of two rotations that pair the same dimensions are added, which gives one rotation with
    interpolated frequencies. The positions of a rotation without a counterpart are interpolated (arXiv:2306.15595)
    until all are equal.

    `hf_posenc.recipes.swap_scheme(model, ..., gradual=True)` creates one from the current scheme of a model, and
    `GradualSwapCallback` raises the strength during training.

    Args:
        old: the scheme at strength 0.
        new: the scheme at strength 1.
        strength: between 0 and 1.

    Raises:
        ValueError: for a layered config instead of a scheme (blend the schemes inside its layers), or a strength
            outside [0, 1].
    """

    name: ClassVar[str] = "blended"
    combinator: ClassVar[bool] = True
    merges_children: ClassVar[bool] = True
    shares_children: ClassVar[bool] = False

    old: SchemeConfig = option(RopeConfig, nested_scheme)
    new: SchemeConfig = option(NoneConfig, nested_scheme)
    strength: float = option(0.0, minimum=0, maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, config in self.children().items():
            if isinstance(config, BlendedConfig):
                raise ValueError(f"BlendedConfig.{name} is a blend itself; only two schemes can be blended.")

    def merge(self, built: Sequence[SchemeParts]) -> SchemeParts:
        """Interpolates the parts of the two schemes.

        Raises:
            UnsupportedError: if a rotation of one of them does not support scaled positions.
        """
        old, new = built
        for (name, config), parts in zip(self.children().items(), built, strict=True):
            GRADUAL_SWAP.refuse(needs_of(parts), f"BlendedConfig.{name}, which is {config.name!r}")
        strength = float(self.strength)

        def blended(kind: Any, name: str) -> Any:
            both = {"old": getattr(old, name), "new": getattr(new, name)}
            return kind(both, strength=strength) if any(part is not None for part in both.values()) else None

        return SchemeParts(
            additive=blended(SummedEncoding, "additive"),
            query_key_map=blended(ChainedMap, "query_key_map"),
            logit_bias=blended(sum_of_biases, "logit_bias"),
            logit_scale=blended(CombinedScale, "logit_scale"),
        )
