"""Biases on queries, keys and hidden states against transformers and their authors' code, and reduced to others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import Wav2Vec2BertConfig, Wav2Vec2ConformerConfig, XLNetConfig, XLNetModel
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)

from hf_posenc.schemes import AttentionPairs, BuildContext, Positions, SchemeConfig, SchemeParts
from hf_posenc.schemes.bias.cope import CopeConfig
from hf_posenc.schemes.bias.forget_gate import ForgetGateConfig
from hf_posenc.schemes.bias.grape import GrapeConfig
from hf_posenc.schemes.bias.low_rank_relative import LowRankRelativeConfig
from hf_posenc.schemes.bias.relative_tables import sinusoidal_vectors, turn_frequencies
from hf_posenc.schemes.bias.shaw import ShawConfig
from hf_posenc.schemes.bias.transformer_xl import TransformerXLConfig
from hf_posenc.schemes.bias.wavelet import WaveletConfig
from hf_posenc.schemes.logits import pairwise_bias, positional_logits

HIDDEN, HEADS, HEAD_DIM, LENGTH = 24, 3, 8, 12


def build(config: SchemeConfig, causal: bool = True, heads: int = HEADS, head_dim: int = HEAD_DIM) -> SchemeParts:
    torch.manual_seed(0)
    return config.build(BuildContext(heads * head_dim, heads, head_dim, causal=causal))


def counted(length: int = LENGTH) -> Positions:
    return Positions(torch.arange(length).unsqueeze(0), torch.tensor([[length]]))


def pairs_of(query: Tensor, key: Tensor, scaling: float = HEAD_DIM**-0.5) -> AttentionPairs:
    return AttentionPairs(query, key, torch.arange(query.shape[2]), counted(key.shape[2]), scaling)


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def redraw(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)


def causal_mask(logits: Tensor) -> Tensor:
    return logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


@pytest.mark.parametrize(("kind", "clamp_length"), [("uni", None), ("bi", None), ("uni", 5), ("bi", 5)])
def test_transformer_xl_equals_xlnet(kind, clamp_length):
    torch.manual_seed(1)
    model = XLNetModel(
        XLNetConfig(
            vocab_size=8,
            d_model=HIDDEN,
            n_layer=1,
            n_head=HEADS,
            d_inner=8,
            attn_type=kind,
            clamp_len=clamp_length or -1,
        )
    ).eval()
    stock = model.layer[0].rel_attn
    redraw(stock)
    parts = build(TransformerXLConfig(clamp_length=clamp_length), causal=kind == "uni")
    bias = parts.logit_bias
    with torch.no_grad():
        bias.content_bias.copy_(stock.r_w_bias)
        bias.position_bias.copy_(stock.r_r_bias)
        bias.position_projection.copy_(stock.r.reshape(HIDDEN, -1).transpose(0, 1))
    hidden = torch.randn(2, LENGTH, HIDDEN)
    tokens_first = hidden.transpose(0, 1)
    mask = torch.ones(LENGTH, LENGTH).triu(1)[:, :, None, None].expand(-1, -1, 2, 1) if kind == "uni" else None
    sinusoids = model.relative_positional_encoding(LENGTH, LENGTH, bsz=2)
    probabilities = stock(tokens_first, None, mask, None, sinusoids, None, output_attentions=True)[-1]

    query = torch.einsum("bid,dhe->bhie", hidden, stock.q)
    key = torch.einsum("bid,dhe->bhie", hidden, stock.k)
    logits = positional_logits(parts, query, key, counted())
    logits = causal_mask(logits) if kind == "uni" else logits
    # Logits reach 40, where float32 resolves 4e-6, and probabilities take over their error.
    torch.testing.assert_close(logits.softmax(-1), probabilities.permute(2, 3, 0, 1), rtol=1e-4, atol=1e-5)


def test_transformer_xl_equals_the_conformer():
    torch.manual_seed(2)
    config = Wav2Vec2ConformerConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, position_embeddings_type="relative", attn_implementation="eager"
    )
    stock = Wav2Vec2ConformerSelfAttention(config).eval()
    redraw(stock)
    hidden = torch.randn(2, LENGTH, HIDDEN)
    sinusoids = Wav2Vec2ConformerRelPositionalEmbedding(config)(hidden)
    probabilities = stock(hidden, relative_position_embeddings=sinusoids)[1]

    parts = build(TransformerXLConfig(), causal=False)
    bias = parts.logit_bias
    with torch.no_grad():
        bias.content_bias.copy_(stock.pos_bias_u)
        bias.position_bias.copy_(stock.pos_bias_v)
        # The Conformer interleaves sines and cosines.
        weight = stock.linear_pos.weight
        bias.position_projection.copy_(torch.cat((weight[:, 0::2], weight[:, 1::2]), dim=1))
    query, key = split_heads(stock.linear_q(hidden)), split_heads(stock.linear_k(hidden))
    logits = positional_logits(parts, query, key, counted())
    torch.testing.assert_close(logits.softmax(-1), probabilities, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("behind", "ahead"), [(6, 2), (4, 4), (64, 8)])
def test_shaw_equals_wav2vec2_bert(behind, ahead):
    torch.manual_seed(3)
    config = Wav2Vec2BertConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=behind,
        right_max_position_embeddings=ahead,
        attn_implementation="eager",
    )
    stock = Wav2Vec2BertSelfAttention(config).eval()
    redraw(stock)
    hidden = torch.randn(2, LENGTH, HIDDEN)
    probabilities = stock(hidden)[1]

    parts = build(ShawConfig(max_distance=behind, max_distance_ahead=ahead), causal=False)
    with torch.no_grad():
        parts.logit_bias.weight.copy_(stock.distance_embedding.weight)
    query, key = split_heads(stock.linear_q(hidden)), split_heads(stock.linear_k(hidden))
    logits = positional_logits(parts, query, key, counted())
    torch.testing.assert_close(logits.softmax(-1), probabilities, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rank", "window"), [(4, 5), (16, 1024)])
@pytest.mark.parametrize("first_query", [0, 9])
def test_low_rank_relative_equals_inkling(rank, window, first_query):
    bias = build(LowRankRelativeConfig(rank, window)).logit_bias
    redraw(bias)
    stock = InklingRelativeLogits(rank, window)
    hidden = torch.randn(2, LENGTH - first_query, HIDDEN)
    with torch.no_grad():
        stock.proj.copy_(bias.profiles)
        states = (hidden @ bias.projection.T).unflatten(-1, (HEADS, rank))
        slots = torch.arange(first_query, LENGTH)
        expected = stock(states, slots, torch.arange(LENGTH))
    unused = torch.zeros(2, HEADS, LENGTH, HEAD_DIM)
    pairs = AttentionPairs(unused[:, :, first_query:], unused, slots, counted(), 1.0, hidden)
    torch.testing.assert_close(bias(pairs), expected, rtol=1e-6, atol=1e-6)
    assert (expected != 0).any()


def test_grape_equals_the_official_code():
    """Numbers of `KeyGatedAdditiveBias(6, 4)` in model/llama-mha-grape-a-keygated.py of model-architectures/GRAPE
    (commit f5b539f), with omega = linspace(-1, 1, 6), u = sin(0, 1, 2, ...) and k = cos(0, 1, 2, ...), both row-major,
    k as (1, heads, length 5, 4); printed: `bias[0, :, 4, 0]` and `bias[0, 2, 4]`, rounded to 6 digits."""
    bias = build(GrapeConfig(), heads=6, head_dim=4).logit_bias
    with torch.no_grad():
        bias.rate.copy_(torch.linspace(-1, 1, 6))
        bias.direction.copy_(torch.arange(24.0).sin().view(6, 4))
    key = torch.arange(120.0).cos().view(1, 6, 5, 4)
    values = bias(pairs_of(torch.zeros(1, 6, 5, 4), key))[0, :, 4]
    by_head = torch.tensor([-0.213176, -0.078663, -0.018453, -0.013147, -0.944506, -0.738319])
    torch.testing.assert_close(values[:, 0], by_head, rtol=0, atol=1e-6)
    by_key = torch.tensor([-0.018453, -0.032413, -0.008391, -0.006314, 0.0])
    torch.testing.assert_close(values[2], by_key, rtol=0, atol=1e-6)


def test_cope_equals_the_listing_of_its_paper():
    """Numbers of the listing at the end of arXiv:2405.18719, `npos_max` 3, with q = sin(0.7 n), k = cos(0.3 n) as
    (1, length 5, head_dim 4) and pos_emb = sin(1.3 n) as (1, head_dim 4, 3), n = 0, 1, 2, ... row-major; printed: the
    last row and the first three entries of row 2 of what `CoPE` returns under a causal mask, rounded to 6 digits."""
    bias = build(CopeConfig(num_positions=3), heads=1, head_dim=4).logit_bias
    with torch.no_grad():
        bias.weight.copy_((torch.arange(12.0) * 1.3).sin().view(4, 3).transpose(0, 1))
    query = (torch.arange(20.0) * 0.7).sin().view(1, 1, 5, 4)
    key = (torch.arange(20.0) * 0.3).cos().view(1, 1, 5, 4)
    values = bias(pairs_of(query, key, 0.5))[0, 0]
    last = torch.tensor([-0.004862, -0.004862, -0.030235, -0.087786, -0.080170])
    torch.testing.assert_close(values[4], last, rtol=0, atol=1e-6)
    torch.testing.assert_close(values[2, :3], torch.tensor([0.035822, -0.025904, -0.069140]), rtol=0, atol=1e-6)


def random_heads(heads: int = HEADS, head_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    query, key = torch.randn(2, 2, heads, LENGTH, head_dim, generator=generator)
    return query, key, torch.randn(2, LENGTH, heads * head_dim, generator=generator)


def test_decay_times_are_those_after_which_1_over_e_is_left():
    bias = build(ForgetGateConfig("bias_only", decay_times=(2.0, 200.0))).logit_bias
    remembered = bias(torch.tensor([-2, -20, -200])).exp().diagonal()
    torch.testing.assert_close(remembered, torch.full((3,), math.exp(-1)), rtol=1e-5, atol=0)


def test_a_fixed_table_of_shaw_is_the_scheme_of_its_name():
    query, key, _ = random_heads()
    wavelet = positional_logits(build(WaveletConfig()), query, key, counted())
    assert torch.equal(wavelet, positional_logits(build(ShawConfig("wavelet")), query, key, counted()))


UNCLIPPED = [TransformerXLConfig(), ShawConfig(table="sinusoidal")]


@pytest.mark.parametrize("config", UNCLIPPED, ids=repr)
@pytest.mark.parametrize("later", [2_000, 131_000, 1_000_000])
def test_sinusoids_of_early_tokens_do_not_depend_on_what_comes_later(config, later):
    bias = build(config, head_dim=32).logit_bias
    redraw(bias)
    query, key = torch.randn(2, 1, HEADS, 65, 32).unbind()
    ids = torch.cat((torch.arange(64), torch.tensor([later]))).unsqueeze(0)
    whole = AttentionPairs(query, key, torch.arange(65), Positions(ids, torch.tensor([[later + 1]])), 32**-0.5)
    early = AttentionPairs(
        query[:, :, :64], key[:, :, :64], torch.arange(64), Positions(ids[:, :64], torch.tensor([[64]])), 32**-0.5
    )
    # The same sums, in blocks that the two lengths cut differently.
    torch.testing.assert_close(pairwise_bias(bias, whole)[..., :64, :64], pairwise_bias(bias, early), rtol=0, atol=2e-5)


@pytest.mark.parametrize("position", [5, 4096, 131_071, 1_000_000])
def test_sinusoids_are_right_far_from_the_start(position):
    found = sinusoidal_vectors(torch.tensor([position]), turn_frequencies(64, 10000.0))[0]
    angles = [position * 10000.0 ** (-2 * pair / 64) for pair in range(32)]
    expected = torch.tensor([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [1_000, 1_000_000])
def test_sinusoids_of_the_distance_do_not_see_a_shift(shift):
    for config in UNCLIPPED:
        bias = build(config, head_dim=32).logit_bias
        redraw(bias)
        query, key = torch.randn(2, 1, HEADS, LENGTH, 32).unbind()
        near, far = (
            pairwise_bias(
                bias,
                AttentionPairs(
                    query,
                    key,
                    torch.arange(LENGTH),
                    Positions(torch.arange(start, start + LENGTH).unsqueeze(0), torch.tensor([[start + LENGTH]])),
                    32**-0.5,
                ),
            )
            for start in (0, shift)
        )
        torch.testing.assert_close(near, far, rtol=0, atol=2e-5)
