"""What is special about each additive scheme: oracles in transformers, algebra, lengths, adoption of native tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import CTRLConfig, CTRLModel
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings as distilbert_table
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.musicgen.modeling_musicgen import MusicgenSinusoidalPositionalEmbedding
from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding
from transformers.models.speech_to_text.modeling_speech_to_text import Speech2TextSinusoidalPositionalEmbedding
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings as xlm_table

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.schemes import (
    AdditiveEncoding,
    BinaryConfig,
    BuildContext,
    IntegerConfig,
    LearnedConfig,
    NormalizedIntegerConfig,
    Positions,
    SchemeConfig,
    SinusoidalConfig,
)

from .table import positions_of


def encoding(config: SchemeConfig, hidden: int = 24, max_positions: int | None = 64) -> AdditiveEncoding:
    torch.manual_seed(0)
    part = config.build(BuildContext(hidden, 2, hidden // 2, max_positions=max_positions)).additive
    assert part is not None
    return part


def rows(config: SchemeConfig, length: int, hidden: int = 24) -> torch.Tensor:
    return encoding(config, hidden)(positions_of(length))[0]


# --- sinusoidal

#: Angles of thousands of positions need more than float32.
LENGTH = 4097
INTERLEAVED = SinusoidalConfig()
CONCATENATED = SinusoidalConfig(layout="concatenated")
COSINES_FIRST = SinusoidalConfig("tensor2tensor", "cosines_first")
SHIFTED = SinusoidalConfig("tensor2tensor", "concatenated", offset=2)

TABLES = {
    "xlm": (INTERLEAVED, lambda hidden: xlm_table(LENGTH, hidden, torch.empty(LENGTH, hidden))),
    "distilbert": (INTERLEAVED, lambda hidden: distilbert_table(LENGTH, hidden, torch.empty(LENGTH, hidden))),
    "marian": (CONCATENATED, lambda hidden: MarianSinusoidalPositionalEmbedding(LENGTH, hidden).create_weight()),
    "pegasus": (CONCATENATED, lambda hidden: PegasusSinusoidalPositionalEmbedding(LENGTH, hidden).create_weight()),
    "roformer": (CONCATENATED, lambda hidden: RoFormerSinusoidalPositionalEmbedding(LENGTH, hidden).create_weight()),
    # fairseq's tables start with two rows that no token gets.
    "m2m100": (SHIFTED, lambda hidden: M2M100SinusoidalPositionalEmbedding(LENGTH, hidden, 1).weights[2:]),
    "xglm": (SHIFTED, lambda hidden: XGLMSinusoidalPositionalEmbedding(LENGTH, hidden, 1).weights[2:]),
    "speech2text": (SHIFTED, lambda hidden: Speech2TextSinusoidalPositionalEmbedding(LENGTH, hidden, 1).weights[2:]),
    "musicgen": (COSINES_FIRST, lambda hidden: MusicgenSinusoidalPositionalEmbedding(LENGTH, hidden).weights),
}


@pytest.mark.parametrize("hidden", [16, 33])
@pytest.mark.parametrize("name", TABLES)
def test_sinusoidal_equals_the_tables_of_transformers(name, hidden):
    config, table = TABLES[name]
    torch.testing.assert_close(rows(config, LENGTH, hidden), table(hidden)[:LENGTH], rtol=0, atol=1e-5)


def test_sinusoidal_equals_ctrl():
    model = CTRLModel(CTRLConfig(vocab_size=9, n_positions=256, n_embd=32, dff=32, n_layer=1, n_head=2))
    # CTRL's angles are float32 products, off by up to one part in 1e7 of the angle.
    expected = model.pos_encoding
    torch.testing.assert_close(rows(SinusoidalConfig(layout="concatenated"), 256, 32), expected, rtol=0, atol=4e-5)


@given(shift=st.integers(1, 2000), position=st.integers(0, 60_000), pairs=st.integers(2, 16))
@settings(max_examples=50, deadline=None)
def test_a_shift_of_the_sinusoidal_is_a_fixed_linear_map(shift, position, pairs):
    part = encoding(SinusoidalConfig(), 2 * pairs)
    here, there, step = (
        part(Positions(torch.tensor([[p]]), torch.tensor([[p + 1]])))[0, 0].view(pairs, 2)
        for p in (position, position + shift, shift)
    )
    sine, cosine = step[:, 0], step[:, 1]
    moved = torch.stack((here[:, 0] * cosine + here[:, 1] * sine, here[:, 1] * cosine - here[:, 0] * sine), dim=-1)
    torch.testing.assert_close(moved, there, rtol=0, atol=2e-6)


def test_sinusoidal_padding_is_zero_and_offset_shifts():
    padded = encoding(SinusoidalConfig(offset=3))(positions_of(4, 9))
    assert padded[0, :5].eq(0).all()
    torch.testing.assert_close(padded[1, :6], rows(SinusoidalConfig(), 9)[3:], rtol=0, atol=0)


# --- binary


@given(bits=st.integers(1, 10), hidden=st.integers(10, 40))
@settings(max_examples=40, deadline=None)
def test_binary_vectors_are_unique_and_the_next_one_is_refused(bits, hidden):
    part = encoding(BinaryConfig(bits=bits), hidden)
    assert part(positions_of(2**bits))[0].unique(dim=0).shape[0] == 2**bits
    with pytest.raises(SequenceLengthError, match=rf"length {2**bits + 1} .* {bits} bits .*bits={bits + 1}"):
        part(positions_of(2**bits + 1))


@pytest.mark.parametrize(("max_positions", "bits"), [(None, 11), (1, 1), (2, 1), (64, 6), (65, 7), (131072, 17)])
def test_binary_takes_the_fewest_bits_for_the_model(max_positions, bits):
    assert encoding(BinaryConfig(), max_positions=max_positions).bits == bits


# --- integer


@pytest.mark.parametrize("config", [IntegerConfig(), NormalizedIntegerConfig()])
def test_ones_is_invisible_under_layer_norm_and_other_directions_are_not(config):
    hidden = 64
    tokens = torch.randn(1, 20, hidden)
    norm = torch.nn.LayerNorm(hidden)
    assert config.invisible_under_layer_norm
    torch.testing.assert_close(norm(tokens + rows(config, 20, hidden)), norm(tokens), rtol=0, atol=2e-5)
    for direction in ("random", "one_hot", "learned"):
        visible = type(config)(direction=direction)
        assert not visible.invisible_under_layer_norm
        assert (norm(tokens + rows(visible, 20, hidden)) - norm(tokens)).abs().max() > 1e-3


def test_fixed_directions_share_one_norm_and_random_ignores_the_global_seed():
    for direction in ("ones", "random", "one_hot"):
        assert rows(IntegerConfig(direction=direction), 2, 100)[1].norm().item() == pytest.approx(10.0)
    state = torch.get_rng_state()
    first = IntegerConfig(direction="random").build(BuildContext(8, 1, 8)).additive
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(123)
    second = IntegerConfig(direction="random").build(BuildContext(8, 1, 8)).additive
    assert torch.equal(first(positions_of(3)), second(positions_of(3)))


def test_live_normalisation_depends_on_the_length_and_refuses_a_cache():
    live = encoding(NormalizedIntegerConfig())
    assert live.length_dependent
    assert not torch.equal(live(positions_of(8))[0], live(positions_of(16))[0, :8])
    with pytest.raises(UnsupportedError, match=r"use_cache=False.*length="):
        live.check_cache(8, 9)
    live.check_cache(0, 9)
    frozen = encoding(NormalizedIntegerConfig(length=16))
    assert not frozen.length_dependent
    assert torch.equal(frozen(positions_of(8))[0], frozen(positions_of(16))[0, :8])
    frozen.check_cache(8, 9)


def test_a_single_token_divided_by_zero_length_minus_one_is_finite():
    assert rows(NormalizedIntegerConfig(subtract_one=True), 1).eq(0).all()


# --- learned


@pytest.mark.parametrize("extension", ["error", "interpolate"])
def test_learned_padding_falls_on_the_rows_below_the_offset(extension):
    part = encoding(LearnedConfig(10, 2, extension))
    padded = part(positions_of(4, 6))
    assert torch.equal(padded[0, :2], part.weight[1].expand(2, -1))
    assert torch.equal(padded[0, 2:], part.weight[2:6])


@given(length=st.integers(1, 200), num_positions=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_interpolation_keeps_rows_within_the_table_and_both_ends_past_it(length, num_positions):
    part = encoding(LearnedConfig(num_positions, extension="interpolate"))
    vectors = part(positions_of(length))[0]
    if length <= num_positions:
        assert torch.equal(vectors, part.weight[:length])
    else:
        assert torch.equal(vectors[0], part.weight[0])
        assert torch.equal(vectors[-1], part.weight[-1])


def test_interpolation_refuses_only_caches_past_the_table():
    part = encoding(LearnedConfig(10, extension="interpolate"))
    assert part.length_dependent
    part.check_cache(8, 10)
    part.check_cache(0, 30)
    for cached in (8, 10, 29):
        with pytest.raises(UnsupportedError, match=r"use_cache=False.*num_positions=30"):
            part.check_cache(cached, 30)
    plain = encoding(LearnedConfig(10))
    assert not plain.length_dependent
    plain.check_cache(8, 30)


def native_table(positions: int, offset: int, hidden: int = 24) -> torch.Tensor:
    return torch.randn(positions + offset, hidden, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("offset", "extension"), [(0, "error"), (2, "error"), (0, "interpolate"), (2, "interpolate")])
def test_adopting_a_table_of_the_same_length_gives_its_rows(offset, extension):
    part = encoding(LearnedConfig(16, offset, extension))
    native = native_table(16, offset)
    assert part.adopt(native)
    assert torch.equal(part(positions_of(16))[0], native[offset:])
    assert part.weight.requires_grad


def test_adopting_into_shorter_and_longer_tables():
    native = native_table(16, 2)
    shorter = encoding(LearnedConfig(8, 2))
    assert shorter.adopt(native)
    assert torch.equal(shorter.weight, native[:10])

    longer = encoding(LearnedConfig(31, 2))
    fresh = longer.weight.detach().clone()
    assert longer.adopt(native)
    assert torch.equal(longer.weight[:18], native)
    assert torch.equal(longer.weight[18:], fresh[18:])

    stretched = encoding(LearnedConfig(31, 2, "interpolate"))
    assert stretched.adopt(native)
    assert torch.equal(stretched.weight[:2], native[:2])
    torch.testing.assert_close(stretched.weight[2::2], native[2:])  # 31 rows over 16: every other one is native
    torch.testing.assert_close(stretched.weight[3::2], (native[2:-1] + native[3:]) / 2)


@pytest.mark.parametrize("native", [torch.zeros(16, 23), torch.zeros(2, 24), torch.zeros(24)])
def test_unfitting_tables_are_not_adopted(native):
    part = encoding(LearnedConfig(16, 2))
    before = part.weight.detach().clone()
    assert not part.adopt(native)
    assert torch.equal(part.weight, before)
