"""Other ways to the same attention: masks of `length x length`, and the code of other libraries.

Every peer maps `(batch, length, hidden)` to the same shape; its projections are replaced by copies, as in the reduced
Llama that the schemes run in. Each is measured against the same code without position, and all against the bare Llama.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BloomConfig, MptConfig, T5Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.bare import Copied
from benchmarks.machine import DTYPES
from benchmarks.subjects import AttentionCall, Setting, Subject

Function = Callable[[Tensor], Tensor]

PEER = "peer"
#: `scaled_dot_product_attention(is_causal=True)` and nothing else.
SDPA = "sdpa"


def peer_subjects(groups: Sequence[str], setting: Setting) -> tuple[list[Subject], dict[str, str]]:
    """The subjects of some groups of `PEER_GROUPS`, and the reasons why others are missing, by name."""
    subjects: list[Subject] = []
    missing: dict[str, str] = {}
    for group in groups:
        if group == "x_transformers" and importlib.util.find_spec(group) is None:
            missing["x-transformers"] = "not installed: pip install -c constraints.txt -e '.[bench]'"
            continue
        subjects += PEER_GROUPS[group](setting)
    return subjects, missing


def peer_names(group: str, setting: Setting) -> list[str]:
    """The subjects of one of `PEER_GROUPS`; none where its package is not installed."""
    return [subject.name for subject in peer_subjects([group], setting)[0]]


def _subject(name: str, baseline: str, build: Callable[[int], Function], setting: Setting, *modules: nn.Module) -> Any:
    return AttentionCall(name, PEER, baseline, build, setting, modules)


def _heads(states: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Three copies, `(batch, heads, length, head_dim)`."""
    shape = (*states.shape[:2], setting.sizes.num_heads, -1)
    query, key, value = (states.clone().view(shape).transpose(1, 2) for _ in range(3))
    return query, key, value


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _slopes(setting: Setting) -> Tensor:
    """`(heads,)` float32: what BLOOM's bias grows by from one key to the next."""
    return build_alibi_tensor(torch.ones(1, 2, device=setting.device), setting.sizes.num_heads, torch.float32)[:, 0, 1]


def _alibi(length: int, setting: Setting) -> Tensor:
    """The bias as most code has it: `(1, heads, length, length)`."""
    positions = torch.arange(length, device=setting.device)
    distance = positions[None, :] - positions[:, None]
    return (_slopes(setting)[:, None, None] * distance).unsqueeze(0).to(DTYPES[setting.dtype])


def _alibi_mask(length: int, setting: Setting) -> Tensor:
    """The bias, and -inf where a key is later than the query."""
    later = torch.ones(length, length, dtype=torch.bool, device=setting.device).triu(1)
    return _alibi(length, setting).masked_fill(later, float("-inf"))


def _kernel(setting: Setting) -> list[Subject]:
    def build(length: int) -> Function:
        return lambda states: _joined(functional.scaled_dot_product_attention(*_heads(states, setting), is_causal=True))

    return [_subject(SDPA, SDPA, build, setting)]


def _masks(setting: Setting) -> list[Subject]:
    def attend(states: Tensor, mask: Tensor) -> Tensor:
        return _joined(functional.scaled_dot_product_attention(*_heads(states, setting), attn_mask=mask))

    def each_call(length: int) -> Function:
        return lambda states: attend(states, _alibi_mask(length, setting))

    def once(length: int) -> Function:
        mask = _alibi_mask(length, setting)
        return lambda states: attend(states, mask)

    return [
        _subject("alibi, mask built in each call", SDPA, each_call, setting),
        _subject("alibi, mask built once", SDPA, once, setting),
    ]


def _position_bias(setting: Setting) -> list[Subject]:
    module: Any = nn.Module()
    module.is_causal = True

    def build(length: int) -> Function:
        def attend(states: Tensor) -> Tensor:
            bias = _alibi(length, setting)
            return sdpa_attention_forward(module, *_heads(states, setting), None, position_bias=bias)[0].flatten(2)

        return attend

    return [_subject("alibi, position_bias= of transformers", SDPA, build, setting)]


def _flex(setting: Setting) -> list[Subject]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = _slopes(setting)

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
        _subject("FlexAttention without position", "FlexAttention without position", builder(None), setting),
        _subject("alibi, FlexAttention score_mod", "FlexAttention without position", builder(score), setting),
    ]


def _bloom(setting: Setting) -> list[Subject]:
    sizes = setting.sizes
    config = BloomConfig(hidden_size=sizes.hidden_size, n_head=sizes.num_heads, hidden_dropout=0.0)
    module = BloomAttention(config, layer_idx=0)
    module.query_key_value, module.dense = _PerHead(sizes.num_heads), nn.Identity()

    def builder(with_bias: bool) -> Callable[[int], Function]:
        def build(length: int) -> Function:
            ones = torch.ones(1, length, device=setting.device)
            mask = _causal_mask(length, setting)

            def attend(states: Tensor) -> Tensor:
                if with_bias:
                    alibi = build_alibi_tensor(ones, sizes.num_heads, states.dtype)
                else:
                    alibi = states.new_zeros(1, 1, 1)
                # The residual is part of the module; a zero of no size is not.
                return module(states, states.new_zeros(()), alibi, mask)[0]

            return attend

        return build

    return _pair("BLOOM", "alibi", builder, setting, module)


def _mpt(setting: Setting) -> list[Subject]:
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


def _t5(setting: Setting) -> list[Subject]:
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
        _subject(without, without, builder(False), setting, *modules),
        _subject(f"{code}, {scheme}", without, builder(True), setting, *modules),
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


def _x_transformers(setting: Setting) -> list[Subject]:
    from benchmarks.x_transformers_peer import x_transformers_calls

    code = "x-transformers"
    calls, modules = x_transformers_calls(setting)
    without = f"{code} without position"
    first = _subject(without, without, calls.pop("none"), setting, *modules)
    return [first, *(_subject(f"{code}, {name}", without, build, setting, *modules) for name, build in calls.items())]


PEER_GROUPS: dict[str, Callable[[Setting], list[Subject]]] = {
    "kernel": _kernel,
    "mask": _masks,
    "position_bias": _position_bias,
    "bloom": _bloom,
    "mpt": _mpt,
    "t5": _t5,
    "x_transformers": _x_transformers,
    "flex": _flex,
}
