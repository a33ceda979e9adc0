"""RoPE and p-RoPE: bit equality with transformers, and the algebra of rotations."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from hf_posenc.schemes import BuildContext, Positions, PRopeConfig, QueryKeyMap, RopeConfig, SchemeConfig

LENGTH, HEAD_DIM = 130, 32


def map_of(config: SchemeConfig, head_dim: int = HEAD_DIM, rotary_dim: int | None = None) -> QueryKeyMap:
    part = config.build(BuildContext(4 * head_dim, 4, head_dim, rotary_dim=rotary_dim)).query_key_map
    assert part is not None
    return part


def query_and_key(dtype: torch.dtype = torch.float32, head_dim: int = HEAD_DIM) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, 4, LENGTH, head_dim, generator=generator).to(dtype),
        torch.randn(2, 2, LENGTH, head_dim, generator=generator).to(dtype),
    )


# Angles are float32: their rounding alone moves a logit by about 1e-7 of the largest position.
@given(
    first=st.integers(0, 500),
    second=st.integers(0, 500),
    shift=st.integers(1, 500),
    layout=st.sampled_from(["half", "half_reversed", "interleaved"]),
    scheme=st.sampled_from([RopeConfig, PRopeConfig]),
)
@settings(max_examples=50, deadline=None)
def test_logits_depend_on_distance_only_and_norms_are_kept(first, second, shift, layout, scheme):
    part = map_of(scheme(layout=layout))

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return part.map_query(x, part.phases(Positions(torch.tensor([[position]]), torch.tensor([[position + 1]]))))

    query, key = query_and_key()
    query, key = query[:1, :1, :1], key[:1, :1, :1]
    near = (at(query, first) * at(key, second)).sum()
    far = (at(query, first + shift) * at(key, second + shift)).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=1e-3)
    torch.testing.assert_close(at(query, first).norm(), query.norm(), rtol=1e-5, atol=0)


def test_width_comes_from_the_config_then_the_architecture_then_the_head():
    assert map_of(RopeConfig()).rotary_dim == HEAD_DIM
    assert map_of(RopeConfig(), rotary_dim=8).rotary_dim == 8
    assert map_of(RopeConfig(rotary_dim=16), rotary_dim=8).rotary_dim == 16
    assert map_of(RopeConfig(partial_rotary_factor=0.4), head_dim=20).rotary_dim == 8
    assert map_of(RopeConfig(partial_rotary_factor=0.35), head_dim=20).rotary_dim == 6
    assert map_of(RopeConfig(inverse_frequencies=(1.0, 0.1)), rotary_dim=8).rotary_dim == 4
    assert map_of(PRopeConfig(), rotary_dim=8).rotary_dim == 8


def test_phases_are_exact_for_long_sequences_in_low_precision_models():
    ids = torch.arange(60_000, 60_256).unsqueeze(0)
    part = map_of(RopeConfig()).to(torch.bfloat16)
    cos, _ = part.phases(Positions(ids, torch.tensor([[60_256]])))
    assert cos.dtype == torch.float32
    assert cos[0].unique(dim=0).shape[0] == 256
    exact = (ids[0, :, None].double() * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)).cos()
    torch.testing.assert_close(cos[0, :, : HEAD_DIM // 2].double(), exact, rtol=0, atol=1e-2)
