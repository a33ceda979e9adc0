"""RoPE and p-RoPE: bit equality with transformers, and the algebra of rotations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import CohereConfig, GPTNeoXConfig, LlamaConfig, PhiConfig
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.glm import modeling_glm as glm
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.nanochat import modeling_nanochat as nanochat
from transformers.models.phi import modeling_phi as phi

from hf_posenc.schemes import BuildContext, Positions, PRopeConfig, QueryKeyMap, RopeConfig, SchemeConfig

from .table import positions_of

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


def mapped(part: QueryKeyMap, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    phases = part.phases(positions_of(query.shape[2]))
    return part.map_query(query, phases), part.map_key(key, phases)


def assert_bit_equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for value, expected in zip(ours, theirs, strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [10000.0, 500_000])
def test_half_layout_is_bit_equal_to_llama(dtype, theta):
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    query, key = query_and_key(dtype)
    cos, sin = llama.LlamaRotaryEmbedding(config)(query, torch.arange(LENGTH).unsqueeze(0))
    expected = llama.apply_rotary_pos_emb(query, key, cos, sin)
    assert_bit_equal(mapped(map_of(RopeConfig(theta=theta)), query, key), expected)


def test_interleaved_layout_is_bit_equal_to_cohere():
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    config = CohereConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, rope_parameters=parameters)
    query, key = query_and_key()
    cos, sin = cohere.CohereRotaryEmbedding(config)(query, torch.arange(LENGTH).unsqueeze(0))
    expected = cohere.apply_rotary_pos_emb(query, key, cos, sin)
    assert_bit_equal(mapped(map_of(RopeConfig(layout="interleaved")), query, key), expected)


def test_reversed_half_layout_is_bit_equal_to_nanochat():
    query, key = query_and_key()
    cos, sin = map_of(RopeConfig()).phases(positions_of(LENGTH))
    ours = mapped(map_of(RopeConfig(layout="half_reversed")), query, key)
    assert_bit_equal(ours, nanochat.apply_rotary_pos_emb(query, key, cos, sin))


def test_partial_interleaved_equals_gptj():
    rotary_dim = 16
    query, key = query_and_key()
    sin, cos = gptj.create_sinusoidal_positions(LENGTH, rotary_dim).split(rotary_dim // 2, dim=-1)
    ours = mapped(map_of(RopeConfig(rotary_dim=rotary_dim, layout="interleaved")), query, key)
    for value, x in zip(ours, (query, key), strict=True):
        by_token = x.transpose(1, 2)
        rotated = gptj.apply_rotary_pos_emb(by_token[..., :rotary_dim], sin[None], cos[None])
        expected = torch.cat((rotated, by_token[..., rotary_dim:]), dim=-1).transpose(1, 2)
        assert torch.equal(value, expected)


def test_partial_interleaved_is_bit_equal_to_glm():
    query, key = query_and_key()
    cos, sin = map_of(RopeConfig(partial_rotary_factor=0.5)).phases(positions_of(LENGTH))
    ours = mapped(map_of(RopeConfig(partial_rotary_factor=0.5, layout="interleaved")), query, key)
    assert_bit_equal(ours, glm.apply_rotary_pos_emb(query, key, cos, sin))


@pytest.mark.parametrize(
    ("module", "config_class", "rotary"),
    [(gpt_neox, GPTNeoXConfig, "GPTNeoXRotaryEmbedding"), (phi, PhiConfig, "PhiRotaryEmbedding")],
)
def test_partial_half_is_bit_equal_to_gpt_neox_and_phi(module, config_class, rotary):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = config_class(hidden_size=4 * HEAD_DIM, num_attention_heads=4, rope_parameters=parameters)
    query, key = query_and_key()
    cos, sin = getattr(module, rotary)(config)(query, torch.arange(LENGTH).unsqueeze(0))
    assert cos.shape[-1] == HEAD_DIM // 4
    ours = mapped(map_of(RopeConfig(partial_rotary_factor=0.25)), query, key)
    if module is gpt_neox:
        assert_bit_equal(ours, module.apply_rotary_pos_emb(query, key, cos, sin))
    else:
        for value, x in zip(ours, (query, key), strict=True):
            head, rest = x[..., : HEAD_DIM // 4], x[..., HEAD_DIM // 4 :]
            assert torch.equal(value, torch.cat((module.apply_rotary_pos_emb(head, head, cos, sin)[0], rest), dim=-1))


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


def test_layouts_differ_by_a_permutation_of_dimensions():
    query, key = query_and_key()
    order = torch.cat((torch.arange(0, HEAD_DIM, 2), torch.arange(1, HEAD_DIM, 2)))
    interleaved = mapped(map_of(RopeConfig(layout="interleaved")), query, key)
    half = mapped(map_of(RopeConfig(layout="half")), query[..., order], key[..., order])
    assert_bit_equal(half, tuple(x[..., order] for x in interleaved))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_p_rope_reduces_to_rope_and_to_nothing(layout):
    query, key = query_and_key()
    assert_bit_equal(
        mapped(map_of(PRopeConfig(fraction=1.0, layout=layout)), query, key),
        mapped(map_of(RopeConfig(layout=layout)), query, key),
    )
    assert_bit_equal(mapped(map_of(PRopeConfig(fraction=0.0, layout=layout)), query, key), (query, key))


def test_p_rope_is_not_partial_rope():
    query, key = query_and_key()
    p_rope = mapped(map_of(PRopeConfig(fraction=0.5)), query, key)[0]
    partial = mapped(map_of(RopeConfig(partial_rotary_factor=0.5)), query, key)[0]
    assert (p_rope - partial).abs().max() > 0.1


def test_width_comes_from_the_config_then_the_architecture_then_the_head():
    assert map_of(RopeConfig()).rotary_dim == HEAD_DIM
    assert map_of(RopeConfig(), rotary_dim=8).rotary_dim == 8
    assert map_of(RopeConfig(rotary_dim=16), rotary_dim=8).rotary_dim == 16
    assert map_of(RopeConfig(partial_rotary_factor=0.4), head_dim=20).rotary_dim == 8
    assert map_of(RopeConfig(partial_rotary_factor=0.35), head_dim=20).rotary_dim == 6
    assert map_of(RopeConfig(inverse_frequencies=(1.0, 0.1)), rotary_dim=8).rotary_dim == 4
    assert map_of(PRopeConfig(), rotary_dim=8).rotary_dim == 8


@pytest.mark.parametrize("config", [RopeConfig(), PRopeConfig(), RopeConfig(rotary_dim=34)])
def test_widths_that_do_not_fit_are_refused(config):
    head_dim = 32 if getattr(config, "rotary_dim", None) else 33
    with pytest.raises(ValueError, match=r"would rotate 3[34] .*rotary_dim=32 or less"):
        map_of(config, head_dim)
    with pytest.raises(ValueError, match="leaves no pair"):
        map_of(RopeConfig(partial_rotary_factor=0.05))


def test_phases_are_exact_for_long_sequences_in_low_precision_models():
    ids = torch.arange(60_000, 60_256).unsqueeze(0)
    part = map_of(RopeConfig()).to(torch.bfloat16)
    cos, _ = part.phases(Positions(ids, torch.tensor([[60_256]])))
    assert cos.dtype == torch.float32
    assert cos[0].unique(dim=0).shape[0] == 256
    exact = (ids[0, :, None].double() * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)).cos()
    torch.testing.assert_close(cos[0, :, : HEAD_DIM // 2].double(), exact, rtol=0, atol=1e-2)
