"""FlashAttention with ALiBi's slopes, which its kernel takes by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.kernel_peers import Function, alibi_slopes, peer
from benchmarks.subjects import Setting, Subject


def flash(setting: Setting) -> list[Subject]:
    """The causal kernel of the package flash-attn, without slopes and with them. Its package is installed.

    The kernel takes `(batch, length, heads, head_dim)` in half precision, and slopes in float32.
    """
    from flash_attn import flash_attn_func

    def builder(slopes: Tensor | None) -> Callable[[int], Function]:
        def build(length: int) -> Function:
            def attend(states: Tensor) -> Tensor:
                shape = (*states.shape[:2], setting.sizes.num_heads, -1)
                query, key, value = (states.clone().view(shape) for _ in range(3))
                return flash_attn_func(query, key, value, causal=True, alibi_slopes=slopes).flatten(2)

            return attend

        return build

    without = "FlashAttention without position"
    return [
        peer(without, without, builder(None), setting),
        peer("alibi, FlashAttention slopes", without, builder(alibi_slopes(setting)), setting),
    ]
