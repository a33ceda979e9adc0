"""Ways to give torch's own kernels a bias: masks of `length x length`, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from benchmarks.machine import DTYPES
from benchmarks.subjects import AttentionCall, Setting, Subject

Function = Callable[[Tensor], Tensor]

#: `scaled_dot_product_attention(is_causal=True)` and nothing else.
SDPA = "sdpa"


def peer(name: str, baseline: str, build: Callable[[int], Function], setting: Setting, *modules: nn.Module) -> Subject:
    """An attention call of other code, measured against `baseline`, whose inputs are copied in `build(length)`."""
    return AttentionCall(name, "peer", baseline, build, setting, modules)


def _heads(states: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Three copies, `(batch, heads, length, head_dim)`."""
    shape = (*states.shape[:2], setting.sizes.num_heads, -1)
    query, key, value = (states.clone().view(shape).transpose(1, 2) for _ in range(3))
    return query, key, value


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def alibi_slopes(setting: Setting) -> Tensor:
    """`(heads,)` float32: what BLOOM's bias grows by from one key to the next."""
    return build_alibi_tensor(torch.ones(1, 2, device=setting.device), setting.sizes.num_heads, torch.float32)[:, 0, 1]


def _alibi(length: int, setting: Setting) -> Tensor:
    """The bias as most code has it: `(1, heads, length, length)`."""
    positions = torch.arange(length, device=setting.device)
    distance = positions[None, :] - positions[:, None]
    return (alibi_slopes(setting)[:, None, None] * distance).unsqueeze(0).to(DTYPES[setting.dtype])


def _alibi_mask(length: int, setting: Setting) -> Tensor:
    """The bias, and -inf where a key is later than the query."""
    later = torch.ones(length, length, dtype=torch.bool, device=setting.device).triu(1)
    return _alibi(length, setting).masked_fill(later, float("-inf"))


def kernel(setting: Setting) -> list[Subject]:
    """The causal flash kernel without position."""

    def build(length: int) -> Function:
        return lambda states: _joined(functional.scaled_dot_product_attention(*_heads(states, setting), is_causal=True))

    return [peer(SDPA, SDPA, build, setting)]


def masks(setting: Setting) -> list[Subject]:
    """ALiBi as a dense mask, built in each call as most code does, and built once."""

    def attend(states: Tensor, mask: Tensor) -> Tensor:
        return _joined(functional.scaled_dot_product_attention(*_heads(states, setting), attn_mask=mask))

    def each_call(length: int) -> Function:
        return lambda states: attend(states, _alibi_mask(length, setting))

    def once(length: int) -> Function:
        mask = _alibi_mask(length, setting)
        return lambda states: attend(states, mask)

    return [
        peer("alibi, mask built in each call", SDPA, each_call, setting),
        peer("alibi, mask built once", SDPA, once, setting),
    ]


def position_bias(setting: Setting) -> list[Subject]:
    """ALiBi as the `position_bias=` of transformers' own sdpa function, built in each call."""
    module: Any = nn.Module()
    module.is_causal = True

    def build(length: int) -> Function:
        def attend(states: Tensor) -> Tensor:
            bias = _alibi(length, setting)
            return sdpa_attention_forward(module, *_heads(states, setting), None, position_bias=bias)[0].flatten(2)

        return attend

    return [peer("alibi, position_bias= of transformers", SDPA, build, setting)]


def flex(setting: Setting) -> list[Subject]:
    """ALiBi as a score function of FlexAttention, compiled for every length, and FlexAttention without one."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = alibi_slopes(setting)

    def score(logit: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return logit + slopes[head] * (key - query)

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    compiled = torch.compile(flex_attention, dynamic=False)

    def builder(score_mod: Any) -> Callable[[int], Function]:
        def build(length: int) -> Function:
            blocks = create_block_mask(causal, None, None, length, length, device=setting.device)

            def attend(states: Tensor) -> Tensor:
                return _joined(compiled(*_heads(states, setting), score_mod=score_mod, block_mask=blocks))

            return attend

        return build

    return [
        peer("FlexAttention without position", "FlexAttention without position", builder(None), setting),
        peer("alibi, FlexAttention score_mod", "FlexAttention without position", builder(score), setting),
    ]


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
