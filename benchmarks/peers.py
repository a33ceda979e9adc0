"""Other implementations of the same attention, by group: torch's kernels with a bias, and modules of other libraries.

Every peer maps `(batch, length, hidden)` to the same shape. Its projections are replaced by copies, as in the reduced
Llama of the schemes. Each is compared with the same code without position, and all are compared with the bare Llama.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import BloomConfig, MptConfig, T5Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.bare import Copied
from benchmarks.machine import DTYPES
from benchmarks.subjects import AttentionCall, Setting, Subject

#: Returns, for a length, a function of the input. Preparations that run once are not timed.
Builder = Callable[[int], Callable[[Tensor], Tensor]]
#: `scaled_dot_product_attention(is_causal=True)` and nothing else.
_SDPA = "sdpa"


def peer_subjects(groups: Sequence[str], setting: Setting) -> tuple[list[Subject], dict[str, str]]:
    """Returns the subjects of some groups of `PEER_GROUPS`, and the reasons why others are missing, by name."""
    subjects: list[Subject] = []
    missing: dict[str, str] = {}
    for group in groups:
        package, name, remedy = _PACKAGES.get(group, ("", "", ""))
        if package and importlib.util.find_spec(package) is None:
            missing[name] = f"not installed: {remedy}"
        elif group == "flash" and setting.dtype == "float32":
            missing[name] = "its kernel takes half precision only: --dtype bfloat16"
        else:
            subjects += PEER_GROUPS[group](setting)
    return subjects, missing


def _peer(name: str, baseline: str, build: Builder, setting: Setting, *modules: nn.Module) -> Subject:
    for module in modules:
        module.to(setting.device, DTYPES[setting.dtype])
    return AttentionCall(name, "peer", setting, baseline, build=build, modules=modules)


def _pair(
    code: str, bias: str, build: Callable[[bool, int], Any], setting: Setting, *modules: nn.Module
) -> list[Subject]:
    """Returns two subjects: the same code without position, and with a bias."""
    without = f"{code} without position"
    return [_peer(name, without, partial(build, name == bias), setting, *modules) for name in (without, bias)]


def _heads(states: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three copies, `(batch, heads, length, head_dim)`."""
    query, key, value = (states.clone().unflatten(-1, (setting.sizes.num_heads, -1)).transpose(1, 2) for _ in range(3))
    return query, key, value


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _sdpa(states: Tensor, setting: Setting, **arguments: Any) -> Tensor:
    return _joined(scaled_dot_product_attention(*_heads(states, setting), **arguments))


def _later(length: int, setting: Setting) -> Tensor:
    """`(length, length)`, true where a key is later than the query."""
    return torch.ones(length, length, dtype=torch.bool, device=setting.device).triu(1)


def _slopes(setting: Setting) -> Tensor:
    """`(heads,)` float32: the increase of BLOOM's bias from one key to the next."""
    return build_alibi_tensor(torch.ones(1, 2, device=setting.device), setting.sizes.num_heads, torch.float32)[:, 0, 1]


def _alibi(length: int, setting: Setting) -> Tensor:
    """The bias in its usual form: `(1, heads, length, length)`."""
    positions = torch.arange(length, device=setting.device)
    distance = positions[None, :] - positions[:, None]
    return (_slopes(setting)[:, None, None] * distance).unsqueeze(0).to(DTYPES[setting.dtype])


def _alibi_mask(length: int, setting: Setting) -> Tensor:
    """The bias, and -inf where a key is later than the query."""
    return _alibi(length, setting).masked_fill(_later(length, setting), float("-inf"))


def _kernel(setting: Setting) -> list[Subject]:
    """The causal flash kernel without position."""
    return [_peer(_SDPA, _SDPA, lambda length: partial(_sdpa, setting=setting, is_causal=True), setting)]


def _masks(setting: Setting) -> list[Subject]:
    """ALiBi as a dense mask, built in each call as in most code, and built once."""

    def each_call(length: int) -> Any:
        return lambda states: _sdpa(states, setting, attn_mask=_alibi_mask(length, setting))

    def once(length: int) -> Any:
        return partial(_sdpa, setting=setting, attn_mask=_alibi_mask(length, setting))

    return [
        _peer("alibi, mask built in each call", _SDPA, each_call, setting),
        _peer("alibi, mask built once", _SDPA, once, setting),
    ]


def _position_bias(setting: Setting) -> list[Subject]:
    """ALiBi as the `position_bias=` of transformers' own sdpa function, built in each call."""
    module: Any = nn.Module()
    module.is_causal = True

    def attend(states: Tensor) -> Tensor:
        bias = _alibi(states.shape[1], setting)
        return sdpa_attention_forward(module, *_heads(states, setting), None, position_bias=bias)[0].flatten(2)

    return [_peer("alibi, position_bias= of transformers", _SDPA, lambda length: attend, setting)]


def _flex(setting: Setting) -> list[Subject]:
    """ALiBi as a score function of FlexAttention, compiled for every length, and FlexAttention without one."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = _slopes(setting)
    compiled = torch.compile(flex_attention, dynamic=False)

    def score(logit: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return logit + slopes[head] * (key - query)

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def build(with_bias: bool, length: int) -> Any:
        blocks = create_block_mask(causal, None, None, length, length, device=setting.device)
        arguments: dict[str, Any] = {"score_mod": score if with_bias else None, "block_mask": blocks}
        return lambda states: _joined(compiled(*_heads(states, setting), **arguments))

    return _pair("FlexAttention", "alibi, FlexAttention score_mod", build, setting)


def _flash(setting: Setting) -> list[Subject]:
    """The causal kernel of the package flash-attn, without slopes and with them.

    The kernel takes `(batch, length, heads, head_dim)` in half precision, and slopes in float32.
    """
    from flash_attn import flash_attn_func

    def build(with_bias: bool, length: int) -> Any:
        slopes = _slopes(setting) if with_bias else None

        def attend(states: Tensor) -> Tensor:
            query, key, value = (states.clone().unflatten(-1, (setting.sizes.num_heads, -1)) for _ in range(3))
            return flash_attn_func(query, key, value, causal=True, alibi_slopes=slopes).flatten(2)

        return attend

    return _pair("FlashAttention", "alibi, FlashAttention slopes", build, setting)


class _PerHead(nn.Module):
    """The order of BLOOM's joint projection: query, key and value of each head are next to each other."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, states: Tensor) -> Tensor:
        """`(batch, length, hidden)` to `(batch, length, 3 * hidden)`."""
        heads = states.unflatten(-1, (self.num_heads, 1, -1))
        return torch.cat([heads] * 3, dim=-2).flatten(-3)


def _bloom(setting: Setting) -> list[Subject]:
    """BLOOM with its ALiBi, and with zeros instead."""
    sizes, dtype = setting.sizes, DTYPES[setting.dtype]
    module = BloomAttention(
        BloomConfig(hidden_size=sizes.hidden_size, n_head=sizes.num_heads, hidden_dropout=0.0), layer_idx=0
    )
    module.query_key_value, module.dense = _PerHead(sizes.num_heads), nn.Identity()

    def build(with_bias: bool, length: int) -> Any:
        ones = torch.ones(1, length, device=setting.device)
        mask = torch.full((1, 1, length, length), torch.finfo(dtype).min, dtype=dtype, device=setting.device).triu(1)
        # Its product of queries and keys needs a tensor of this shape to add.
        zeros = mask.new_zeros(sizes.num_heads, 1, length)

        def attend(states: Tensor) -> Tensor:
            alibi = build_alibi_tensor(ones, sizes.num_heads, states.dtype) if with_bias else zeros
            # The module adds a residual. A zero scalar costs nothing.
            return module(states, states.new_zeros(()), alibi, mask)[0]

        return attend

    return _pair("BLOOM", "BLOOM, alibi", build, setting, module)


def _mpt(setting: Setting) -> list[Subject]:
    """MPT with its ALiBi, and without a bias."""
    sizes = setting.sizes
    module = MptAttention(MptConfig(d_model=sizes.hidden_size, n_heads=sizes.num_heads))
    module.Wqkv, module.out_proj = Copied(3), nn.Identity()

    def build(with_bias: bool, length: int) -> Any:
        later = _later(length, setting)[None, None]

        def attend(states: Tensor) -> Tensor:
            bias = None
            if with_bias:
                bias = build_mpt_alibi_tensor(sizes.num_heads, length, device=setting.device).to(states.dtype)
            return module(states, bias, attention_mask=later)[0]

        return attend

    return _pair("MPT", "MPT, alibi", build, setting, module)


def _t5(setting: Setting) -> list[Subject]:
    """A T5 decoder layer that computes its bias, and one without a bias, in which stock code adds zeros."""
    sizes = setting.sizes
    config = T5Config(
        d_model=sizes.hidden_size, d_kv=sizes.hidden_size // sizes.num_heads, num_heads=sizes.num_heads,
        dropout_rate=0.0, is_decoder=True, attn_implementation="sdpa",
    )  # fmt: skip
    modules = [
        T5Attention(config, has_relative_attention_bias=biased, layer_idx=0, is_causal=True) for biased in (0, 1)
    ]
    for module in modules:
        module.q, module.k, module.v, module.o = Copied(), Copied(), Copied(), nn.Identity()

    def build(with_bias: bool, length: int) -> Any:
        return lambda states: modules[with_bias](states)[0]

    return _pair("T5", "T5, bias computed in each call", build, setting, *modules)


def _x_transformers(setting: Setting) -> list[Subject]:
    """x-transformers with ALiBi, with a T5 bias, with a rotation, and without position."""
    from x_transformers.x_transformers import AlibiPositionalBias, Attention, RelativePositionBias, RotaryEmbedding

    sizes = setting.sizes
    head_dim = sizes.hidden_size // sizes.num_heads
    attention = Attention(dim=sizes.hidden_size, heads=sizes.num_heads, dim_head=head_dim, causal=True, flash=True)
    attention.to_q, attention.to_k, attention.to_v, attention.to_out = Copied(), Copied(), Copied(), nn.Identity()
    alibi = AlibiPositionalBias(heads=sizes.num_heads)
    # Its decoder gives the table the scale sqrt(head_dim).
    relative = RelativePositionBias(scale=head_dim**0.5, causal=True, heads=sizes.num_heads)
    rotary = RotaryEmbedding(head_dim)

    def build(positions: Callable[[int], dict[str, Any]], length: int) -> Any:
        def attend(states: Tensor) -> Tensor:
            result = attention(states, **positions(length))
            return result[0] if isinstance(result, tuple) else result

        return attend

    without = "x-transformers without position"
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        without: lambda length: {},
        "x-transformers, alibi (bias kept between calls)": lambda length: {"rel_pos": alibi},
        "x-transformers, T5 bias": lambda length: {"rel_pos": relative},
        "x-transformers, rotary": lambda length: {"rotary_pos_emb": rotary.forward_from_seq_len(length)},
    }
    modules = (attention, alibi, relative, rotary)
    return [_peer(name, without, partial(build, positions), setting, *modules) for name, positions in kinds.items()]


PEER_GROUPS: dict[str, Callable[[Setting], list[Subject]]] = {
    "kernel": _kernel, "mask": _masks, "position_bias": _position_bias, "bloom": _bloom, "mpt": _mpt, "t5": _t5,
    "x_transformers": _x_transformers, "flex": _flex, "flash": _flash,
}  # fmt: skip
#: The package that a group needs, the name of the group, and what to do if the package is missing.
_PACKAGES = {
    "x_transformers": ("x_transformers", "x-transformers", "pip install -c constraints.txt -e '.[bench]'"),
    "flash": ("flash_attn", "FlashAttention", "it needs a GPU and pip install flash-attn"),
}
