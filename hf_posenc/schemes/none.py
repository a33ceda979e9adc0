"""The scheme without position encoding (NoPE)."""

from __future__ import annotations

from typing import ClassVar

from hf_posenc.schemes.scheme import SchemeConfig, register_scheme


@register_scheme
class NoneConfig(SchemeConfig):
    """No position encoding (NoPE, arXiv:2203.16634, arXiv:2305.19466).

    A causal model can still distinguish positions through its mask. A bidirectional model becomes
    permutation-equivariant: it ignores word order.
    """

    name: ClassVar[str] = "none"
    has_parts: ClassVar[bool] = False
