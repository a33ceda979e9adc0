"""Attention modules of transformers and x-transformers with their own bias, and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import BloomConfig, MptConfig, T5Config
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.bare import Copied
from benchmarks.kernel_peers import Function, peer
from benchmarks.machine import DTYPES
from benchmarks.subjects import Setting, Subject


def bloom(setting: Setting) -> list[Subject]:
    """BLOOM with its ALiBi, and with a zero in its place."""
    sizes = setting.sizes
    config = BloomConfig(hidden_size=sizes.hidden_size, n_head=sizes.num_heads, hidden_dropout=0.0)
    module = BloomAttention(config, layer_idx=0)
    module.query_key_value, module.dense = _PerHead(sizes.num_heads), nn.Identity()

    def builder(with_bias: bool) -> Callable[[int], Function]:
        def build(length: int) -> Function:
            ones = torch.ones(1, length, device=setting.device)
            mask = _causal_mask(length, setting)
            # Its product of queries and keys cannot do without a summand of this shape.
            zeros = mask.new_zeros(sizes.num_heads, 1, length)

            def attend(states: Tensor) -> Tensor:
                alibi = build_alibi_tensor(ones, sizes.num_heads, states.dtype) if with_bias else zeros
                # The residual is part of the module; a zero of no size is not.
                return module(states, states.new_zeros(()), alibi, mask)[0]

            return attend

        return build

    return _pair("BLOOM", "alibi", builder, setting, module)


def mpt(setting: Setting) -> list[Subject]:
    """MPT with its ALiBi, and without a bias."""
    sizes = setting.sizes
    module = MptAttention(MptConfig(d_model=sizes.hidden_size, n_heads=sizes.num_heads))
    module.Wqkv, module.out_proj = Copied(3), nn.Identity()

    def builder(with_bias: bool) -> Callable[[int], Function]:
        def build(length: int) -> Function:
            later = torch.ones(1, 1, length, length, dtype=torch.bool, device=setting.device).triu(1)

            def attend(states: Tensor) -> Tensor:
                bias = None
                if with_bias:
                    bias = build_mpt_alibi_tensor(sizes.num_heads, length, device=setting.device).to(states.dtype)
                return module(states, bias, attention_mask=later)[0]

            return attend

        return build

    return _pair("MPT", "alibi", builder, setting, module)


def t5(setting: Setting) -> list[Subject]:
    """A T5 decoder layer that computes its bias, and one that has none; stock code then adds zeros."""
    sizes = setting.sizes
    config = T5Config(
        d_model=sizes.hidden_size,
        d_kv=sizes.hidden_size // sizes.num_heads,
        num_heads=sizes.num_heads,
        dropout_rate=0.0,
        is_decoder=True,
        attn_implementation="sdpa",
    )

    def module(with_bias: bool) -> nn.Module:
        made = T5Attention(config, has_relative_attention_bias=with_bias, layer_idx=0, is_causal=True)
        made.q, made.k, made.v, made.o = Copied(), Copied(), Copied(), nn.Identity()
        return made.to(setting.device, DTYPES[setting.dtype])

    modules = {with_bias: module(with_bias) for with_bias in (False, True)}

    def builder(with_bias: bool) -> Callable[[int], Function]:
        return lambda length: lambda states: modules[with_bias](states)[0]

    return _pair("T5", "bias computed in each call", builder, setting, *modules.values())


def _pair(
    code: str, scheme: str, builder: Callable[[bool], Callable[[int], Function]], setting: Setting, *modules: nn.Module
) -> list[Subject]:
    without = f"{code} without position"
    return [
        peer(without, without, builder(False), setting, *modules),
        peer(f"{code}, {scheme}", without, builder(True), setting, *modules),
    ]


def _causal_mask(length: int, setting: Setting) -> Tensor:
    """`(1, 1, length, length)`, the smallest finite value where a key is later than the query."""
    dtype = DTYPES[setting.dtype]
    mask = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype, device=setting.device)
    return mask.triu(1)[None, None]


class _PerHead(nn.Module):
    """BLOOM's order of a joint projection: query, key and value of one head side by side."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, states: Tensor) -> Tensor:
        """`(batch, length, hidden)` to `(batch, length, 3 * hidden)`."""
        heads = states.unflatten(-1, (self.num_heads, 1, -1))
        return torch.cat([heads] * 3, dim=-2).flatten(-3)


def x_transformers(setting: Setting) -> list[Subject]:
    """x-transformers with ALiBi, T5 bias, rotation, and nothing. Its package is installed."""
    from benchmarks.x_transformers_peer import x_transformers_calls

    code = "x-transformers"
    calls, modules = x_transformers_calls(setting)
    without = f"{code} without position"
    first = peer(without, without, calls.pop("none"), setting, *modules)
    return [first, *(peer(f"{code}, {name}", without, build, setting, *modules) for name, build in calls.items())]
