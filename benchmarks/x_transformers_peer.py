"""The attention of the library x-transformers, with its own positions and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from x_transformers.x_transformers import AlibiPositionalBias, Attention, RelativePositionBias, RotaryEmbedding

from benchmarks.bare import Copied
from benchmarks.machine import DTYPES
from benchmarks.subjects import Setting


def x_transformers_calls(
    setting: Setting,
) -> tuple[dict[str, Callable[[int], Callable[[Tensor], Tensor]]], tuple[nn.Module, ...]]:
    """From a length to an attention call, by the kind of positions, and all modules. "none" is the one without."""
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

    def with_positions(positions: Callable[[int], dict[str, Any]]) -> Callable[[int], Callable[[Tensor], Tensor]]:
        return lambda length: lambda states: _output(attention(states, **positions(length)))

    return {
        "none": with_positions(lambda length: {}),
        "alibi (bias kept between calls)": with_positions(lambda length: {"rel_pos": alibi}),
        "T5 bias": with_positions(lambda length: {"rel_pos": relative}),
        "rotary": with_positions(lambda length: {"rotary_pos_emb": rotary.forward_from_seq_len(length)}),
    }, modules


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
