"""Attention modules of transformers and x-transformers with their own bias, and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    from x_transformers.x_transformers import AlibiPositionalBias, Attention, RelativePositionBias, RotaryEmbedding

    sizes = setting.sizes
    head_dim = sizes.hidden_size // sizes.num_heads
    attention = Attention(dim=sizes.hidden_size, heads=sizes.num_heads, dim_head=head_dim, causal=True, flash=True)
    attention.to_q, attention.to_k, attention.to_v, attention.to_out = Copied(), Copied(), Copied(), nn.Identity()
    alibi = AlibiPositionalBias(heads=sizes.num_heads)
    # Its decoder gives the table the scale sqrt(head_dim).
    relative = RelativePositionBias(scale=head_dim**0.5, causal=True, heads=sizes.num_heads)
    rotary = RotaryEmbedding(head_dim)
    modules = (attention, alibi, relative, rotary)
    for module in modules:
        module.to(setting.device, DTYPES[setting.dtype])

    def builder(positions: Callable[[int], dict[str, Any]]) -> Callable[[int], Function]:
        def build(length: int) -> Function:
            def attend(states: Tensor) -> Tensor:
                result = attention(states, **positions(length))
                return result[0] if isinstance(result, tuple) else result

            return attend

        return build

    without = "x-transformers without position"
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        without: lambda length: {},
        "x-transformers, alibi (bias kept between calls)": lambda length: {"rel_pos": alibi},
        "x-transformers, T5 bias": lambda length: {"rel_pos": relative},
        "x-transformers, rotary": lambda length: {"rotary_pos_emb": rotary.forward_from_seq_len(length)},
    }
    return [peer(name, without, builder(positions), setting, *modules) for name, positions in kinds.items()]
