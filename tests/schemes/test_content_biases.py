"""Biases on queries, keys and hidden states against transformers and their authors' code, and reduced to others."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from hf_posenc import patch_model
from hf_posenc.schemes import (
    AttentionPairs,
    BuildContext,
    CopeConfig,
    DisentangledConfig,
    FireConfig,
    ForgetGateConfig,
    GrapeApConfig,
    GrapeConfig,
    KerpleConfig,
    LowRankRelativeConfig,
    Positions,
    SchemeConfig,
    ShawConfig,
    TransformerXLConfig,
    WaveletConfig,
    get_scheme,
)
from hf_posenc.schemes.bias import cope, relative_tables
from hf_posenc.schemes.bias.disentangled import LogBuckets
from hf_posenc.schemes.bias.fire import FireBias
from hf_posenc.schemes.bias.grape_ap import GrapeApBias
from hf_posenc.schemes.bias.relative_tables import select_rows_of_keys
from hf_posenc.schemes.logits import pairwise_bias
from hf_posenc.schemes.weights import AlikeParts, KeptValues
from tests.models import tiny

from .building import at, build, counted, pairs_at, part_of, random_heads, redraw

HIDDEN, HEADS, HEAD_DIM, LENGTH = 24, 3, 8, 12
PLACE: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}


@pytest.mark.parametrize(("rank", "window"), [(4, 5), (16, 1024)])
@pytest.mark.parametrize("first_query", [0, 9])
def test_low_rank_relative_equals_inkling(rank: int, window: int, first_query: int) -> None:
    bias = part_of(LowRankRelativeConfig(rank, window), **PLACE)
    redraw(bias)
    stock = InklingRelativeLogits(rank, window)
    slots = torch.arange(first_query, LENGTH)
    hidden = torch.randn(1, len(slots), HIDDEN)
    with torch.no_grad():
        stock.proj.copy_(bias.profiles)
        states = (hidden @ bias.projection.T).unflatten(-1, (HEADS, rank))
        expected = stock(states, slots, torch.arange(LENGTH))
    pairs = pairs_at(counted(LENGTH), slots, random_heads(LENGTH, **PLACE))
    values = bias(dataclasses.replace(pairs, hidden_states=hidden))
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    assert (expected != 0).any()


def test_grape_equals_the_official_code() -> None:
    """Numbers of `KeyGatedAdditiveBias(6, 4)` in model/llama-mha-grape-a-keygated.py of model-architectures/GRAPE
    (commit f5b539f), with omega = linspace(-1, 1, 6), u = sin(0, 1, 2, ...) and k = cos(0, 1, 2, ...), both row-major,
    k as (1, heads, length 5, 4); printed: `bias[0, :, 4, 0]` and `bias[0, 2, 4]`, rounded to 6 digits."""
    bias = part_of(GrapeConfig(), num_heads=6, num_key_value_heads=6, head_dim=4)
    with torch.no_grad():
        bias.rate.copy_(torch.linspace(-1, 1, 6))
        bias.direction.copy_(torch.arange(24.0).sin().view(6, 4))
    key = torch.arange(120.0).cos().view(1, 6, 5, 4)
    values = bias(pairs_at(counted(5), heads=(torch.zeros(1, 6, 5, 4), key)))[0, :, 4]
    by_head = torch.tensor([-0.213176, -0.078663, -0.018453, -0.013147, -0.944506, -0.738319])
    torch.testing.assert_close(values[:, 0], by_head, rtol=0, atol=1e-6)
    by_key = torch.tensor([-0.018453, -0.032413, -0.008391, -0.006314, 0.0])
    torch.testing.assert_close(values[2], by_key, rtol=0, atol=1e-6)


def test_cope_equals_the_listing_of_its_paper() -> None:
    """Numbers of the listing at the end of arXiv:2405.18719, `npos_max` 3, with q = sin(0.7 n), k = cos(0.3 n) as
    (1, length 5, head_dim 4) and pos_emb = sin(1.3 n) as (1, head_dim 4, 3), n = 0, 1, 2, ... row-major; printed: the
    last row and the first three entries of row 2 of what `CoPE` returns under a causal mask, rounded to 6 digits."""
    bias = part_of(CopeConfig(num_positions=3), num_heads=1, num_key_value_heads=1, head_dim=4)
    with torch.no_grad():
        bias.weight.copy_((torch.arange(12.0) * 1.3).sin().view(4, 3).transpose(0, 1))
    query = (torch.arange(20.0) * 0.7).sin().view(1, 1, 5, 4)
    key = (torch.arange(20.0) * 0.3).cos().view(1, 1, 5, 4)
    values = bias(pairs_at(counted(5), heads=(query, key)))[0, 0]
    last = torch.tensor([-0.004862, -0.004862, -0.030235, -0.087786, -0.080170])
    torch.testing.assert_close(values[4], last, rtol=0, atol=1e-6)
    torch.testing.assert_close(values[2, :3], torch.tensor([0.035822, -0.025904, -0.069140]), rtol=0, atol=1e-6)


def test_decay_times_are_those_after_which_1_over_e_is_left() -> None:
    bias = part_of(ForgetGateConfig("bias_only", decay_times=(2.0, 200.0)), **PLACE)
    remembered = bias(torch.tensor([-2, -20, -200])).exp().diagonal()
    torch.testing.assert_close(remembered, torch.full((3,), math.exp(-1)), rtol=1e-5, atol=0)


def test_wavelets_at_any_distance_equal_their_formula() -> None:
    """The table ends where the wavelets do: beyond it, and on its edge, they are nil in float32."""
    bias = part_of(WaveletConfig(), num_heads=1, head_dim=128)
    distances = torch.tensor([0, 1, 3, 15, 100, 700, 890, 897, 911, 912, 913, 2000, 10**6])
    keys = at(torch.cat((distances.flip(0).neg(), distances)))
    query = torch.eye(128)[None, None]
    # Every query is one dimension, at the position 0 of slot 13.
    pairs = AttentionPairs(query, query[:, :, : keys.ids.shape[1]], torch.full((128,), 13), keys, 1.0)
    u = torch.stack([(-keys.ids[0].double() - shift) / 2.0**scale for scale in range(8) for shift in range(16)])
    expected = ((1 - u.square()) * (-0.5 * u.square()).exp()).float()
    found = bias(pairs)[0, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    # Some processors compute many times as slowly with subnormal numbers.
    assert (found[found != 0].abs() > torch.finfo().tiny).all()


@pytest.mark.parametrize("queries", [1, 5])
def test_queries_of_grape_ap_are_projected_once(queries: int) -> None:
    """What is left of the features for the queries changes nothing. A subclass may compute other features."""

    class Doubled(GrapeApBias):
        def key_features(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().key_features(hidden_states)

    context = BuildContext(num_heads=2, head_dim=8, hidden_size=16)
    states, slots = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    positions = Positions(torch.tensor([[-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]]), torch.tensor([[4], [5]]))
    for kind in (GrapeApBias, Doubled):
        bias = kind(GrapeApConfig(), context)
        features, _ = bias.features(states)
        assert torch.equal(features, bias.key_features(states))
        new = states[:, -queries:]
        heads = torch.zeros(2, 2, queries, 8), torch.zeros(2, 2, 5, 8)
        pairs = AttentionPairs(*heads, slots[-queries:], positions, 1.0, new, features)
        handed_over = dataclasses.replace(pairs, query_features=bias.features(new)[1])
        assert (handed_over.query_features is None) == (kind is Doubled)
        assert torch.equal(bias(handed_over), bias(pairs))


def test_constants_of_inference_mode_can_be_used_in_training() -> None:
    with torch.inference_mode():
        bias = part_of(WaveletConfig(), **PLACE)
        assert not bias._table.on(torch.device("meta")).is_inference()
    query, key = (heads.requires_grad_() for heads in random_heads(LENGTH, **PLACE))
    bias(pairs_at(counted(LENGTH), heads=(query, key))).sum().backward()
    assert query.grad.any()  # type: ignore[union-attr]


# --- real positions, and what a layer has to give

HALVES = at(torch.arange(LENGTH) * 0.5)


@pytest.mark.parametrize(
    "config",
    [
        ShawConfig("sinusoidal"),
        ShawConfig("wavelet"),
        TransformerXLConfig(),
        GrapeConfig(),
        ForgetGateConfig("bias_only"),
        KerpleConfig(),
        KerpleConfig("power"),
        FireConfig(initial_threshold=4.0),
    ],
    ids=repr,
)
def test_real_positions_interpolate(config: SchemeConfig) -> None:
    bias, query_and_key = part_of(config), random_heads(LENGTH)
    assert not bias.whole_positions
    whole, real = (pairwise_bias(bias, pairs_at(at(ids))) for ids in (range(LENGTH), torch.arange(LENGTH).float()))
    torch.testing.assert_close(whole, real, rtol=1e-5, atol=1e-5)
    halves = pairwise_bias(bias, pairs_at(HALVES))
    # Every other token again has a whole distance, between the same heads at half of it.
    even = pairs_at(counted(LENGTH // 2), heads=tuple(x[:, :, ::2] for x in query_and_key))
    torch.testing.assert_close(halves[:, :, ::2, ::2], pairwise_bias(bias, even), rtol=1e-5, atol=1e-5)
    assert (halves[:, :, 1, 0] - halves[:, :, 1, 1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "config",
    [ShawConfig(), TransformerXLConfig(clamp_length=4), LowRankRelativeConfig(), DisentangledConfig(max_distance=4)],
    ids=repr,
)
def test_tables_refuse_real_positions(config: SchemeConfig) -> None:
    bias = build(config).logit_bias
    pairs = dataclasses.replace(pairs_at(HALVES), hidden_states=torch.randn(1, LENGTH, HIDDEN))
    assert bias.whole_positions
    with pytest.raises(ValueError, match="floating-point"):
        bias(pairs)


@pytest.mark.parametrize(("config", "message"), [(ForgetGateConfig(), "bias_only"), (LowRankRelativeConfig(), "shaw")])
def test_what_a_layer_does_not_give_is_missed_with_a_remedy(config: SchemeConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part_of(config)(pairs_at(counted(LENGTH)))


# --- DeBERTa's disentangled attention


@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(256, 512), (8, 24), (7, 24), (2, 3), (3, 3), (5, 4), (320, 512), (32, 2048)]
)
def test_log_buckets_equal_those_of_transformers(buckets: int, max_distance: int) -> None:
    distance = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    expected = make_log_bucket_position(distance, buckets, max_distance).long()
    ours = LogBuckets(buckets, max_distance)
    assert torch.equal(ours(distance), expected)
    assert int(ours(torch.tensor(max_distance - 1))) == max(2 * (buckets // 2) - 1, 1)


@pytest.mark.parametrize("most", [1, 100, 2**23])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("queries", [slice(0, 40), slice(0, 1), slice(20, 22), slice(39, 40), slice(5, 30)])
def test_products_of_keys_equal_those_of_single_pairs(
    most: int, batch: int, queries: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys that are far from all queries on both sides, in one piece and in many."""
    monkeypatch.setattr(relative_tables, "_MOST_PRODUCTS", most)
    torch.manual_seed(0)
    ids = torch.stack([torch.arange(40), torch.arange(40) * 2 - 7])[:batch]
    rows = (ids[:, queries].unsqueeze(-1) - ids.unsqueeze(1)).clamp(-6, 5) + 6
    key, table = torch.randn(2, HEADS, 40, 4), torch.randn(HEADS, 12, 4)
    expected = torch.einsum("bhjd,hbijd->bhij", key, table[:, rows.expand(2, -1, -1)])
    torch.testing.assert_close(select_rows_of_keys(key, table, rows), expected, rtol=1e-5, atol=1e-5)


def test_a_causal_model_has_vectors_for_earlier_keys_only() -> None:
    for config, causal, table, shape in (
        (DisentangledConfig(max_distance=5), False, "key_weight", (3, 10, 8)),
        (DisentangledConfig(max_distance=5), True, "query_weight", (3, 5, 8)),
        # Buckets reach any distance.
        (DisentangledConfig("c2p", max_distance=2**20, buckets=8), True, "key_weight", (3, 8, 8)),
    ):
        assert getattr(build(config, causal=causal, **PLACE).logit_bias, table).shape == shape
    assert build(DisentangledConfig("p2c", 20, 6)).logit_bias.key_weight is None


@torch.no_grad()
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("reach", [5, 40])
def test_one_query_reads_tables_that_a_cache_keeps(reach: int, gap: int) -> None:
    """As without a cache, also if they do not reach the first keys, and with a gap between tokens."""
    positions, heads, hidden = counted(LENGTH), random_heads(LENGTH, **PLACE), torch.randn(1, 1, HIDDEN)
    ids = positions.ids + gap * (positions.ids > 4)
    newest = torch.tensor([LENGTH - 1])
    tables = LowRankRelativeConfig(4, reach), DisentangledConfig(max_distance=reach)
    for config in (*tables, TransformerXLConfig()):
        bias: Any = build(config, **PLACE).logit_bias
        redraw(bias)
        found = []
        for memo in ({}, {KeptValues: KeptValues()}):
            at_ids = dataclasses.replace(positions, ids=ids, memo=memo)
            pairs = dataclasses.replace(pairs_at(at_ids, newest, heads), hidden_states=hidden)
            found += [bias(pairs), bias(pairs)]
        for values in found[1:]:
            torch.testing.assert_close(values, found[0], rtol=1e-5, atol=1e-5)


# --- biases that leave out what is the same for all, against the plain way

LONG = 96


@pytest.mark.parametrize("scheme", ["transformer_xl", "disentangled", "grape"])
def test_what_layers_share_fits_the_number_of_tokens_of_each(scheme: str) -> None:
    layers = [build(get_scheme(scheme)(), **PLACE).logit_bias for _ in range(2)]
    for layer in layers:
        redraw(layer)
    memo: dict[Any, Any] = {AlikeParts: AlikeParts(lambda: [(0, [layer]) for layer in layers])}
    for length in (9, 5, 12):
        pairs = some_pairs(0, length)
        shared = dataclasses.replace(pairs, keys=dataclasses.replace(pairs.keys, memo=memo))
        for layer in layers:
            assert torch.allclose(layer(shared), layer(pairs), atol=1e-5), (length, scheme)


def some_pairs(start: int, stop: int) -> AttentionPairs:
    query, key = (x.repeat(2, 1, 1, 1) for x in random_heads(LONG, **PLACE))
    query[1] += 1.0
    return pairs_at(counted(LONG), heads=(query, key)).of_queries(start, stop).of_first_keys(stop)


def values_and_gradients(bias: Any, pairs: AttentionPairs) -> list[Tensor]:
    values = bias(pairs)
    visible = pairs.slot_distance <= 0
    if not list(bias.parameters()):
        return [values * visible]
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((values * weights * visible).sum(), list(bias.parameters()))
    return [(values * visible).detach(), *gradients]


def assert_equal_results(results: list[Tensor], expected: list[Tensor], close: float) -> None:
    for value, other in zip(results, expected, strict=True):
        torch.testing.assert_close(value, other, atol=close, rtol=close)


@pytest.mark.parametrize("config", [CopeConfig(num_positions=4), CopeConfig(num_positions=9), CopeConfig()])
def test_keys_beyond_the_table_of_cope(config: CopeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    bias, pairs = part_of(config, max_positions=LONG, **PLACE), some_pairs(80, 96)
    assert (bias._keys_beyond_the_table(pairs) > 0) == (config.num_positions < 10)
    results = values_and_gradients(bias, pairs)
    monkeypatch.setattr(cope.CopeBias, "_keys_beyond_the_table", lambda self, pairs: 0)
    assert_equal_results(results, values_and_gradients(bias, pairs), 1e-4)


def test_closed_gates_leave_cope_nothing_out() -> None:
    """Where no query counts any key, all keys are near."""
    pairs = some_pairs(80, 96)
    closed = dataclasses.replace(pairs, query=torch.full_like(pairs.query, 9.0), key=torch.full_like(pairs.key, -9.0))
    assert part_of(CopeConfig(num_positions=4), **PLACE)._keys_beyond_the_table(closed) == 0


@pytest.mark.parametrize("start", [0, 40, 80])
def test_keys_that_all_find_in_one_row(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative_tables, "_MANY_KEYS", 1)
    bias, pairs = part_of(ShawConfig(max_distance=5), **PLACE), some_pairs(start, start + 16)
    rows = pairs.distance.clamp(-5, 5) + 5
    assert relative_tables.leading_keys_of_one_row(rows) == max(0, start - 5 + 1)
    results = values_and_gradients(bias, pairs)
    monkeypatch.setattr(relative_tables, "leading_keys_of_one_row", lambda rows: 0)
    assert_equal_results(results, values_and_gradients(bias, pairs), 1e-5)


@pytest.mark.parametrize(
    "config",
    [
        ShawConfig(),
        DisentangledConfig(max_distance=24),
        # Distance 11 has bucket 19.
        DisentangledConfig(max_distance=12, buckets=20),
        DisentangledConfig(max_distance=2048, buckets=40),
        WaveletConfig(),
        LowRankRelativeConfig(rank=3),
    ],
    ids=repr,
)
def test_tables_have_only_distances_that_occur(config: SchemeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host knows the greatest position or can read it: a table for 12 tokens has at most 23 rows."""
    monkeypatch.setattr(relative_tables, "_FEW_ROWS", 0)
    bias, rows = build(config, **PLACE).logit_bias, []
    redraw(bias, std=1.0)
    pairs = dataclasses.replace(some_pairs(0, 12), hidden_states=torch.randn(2, 12, HIDDEN))
    places = pairs.keys.ids, pairs.keys.lengths
    all_rows = dataclasses.replace(pairs, keys=Positions(*places).bounded(10**6))
    expected = values_and_gradients(bias, all_rows)

    def watched(original: Any) -> Any:
        def select(products: Tensor, *places: Any) -> Tensor:
            rows.append(products.shape[-1])
            return original(products, *places)

        return select

    for select in ("gather", "as_strided"):
        monkeypatch.setattr(Tensor, select, watched(getattr(Tensor, select)))
    for keys in (Positions(*places).bounded(12), Positions(*places)):
        assert_equal_results(values_and_gradients(bias, dataclasses.replace(pairs, keys=keys)), expected, 1e-5)
    assert 0 < max(rows) <= (39 if config == DisentangledConfig(max_distance=12, buckets=20) else 23)


@pytest.mark.parametrize("config", [ShawConfig(), DisentangledConfig(), WaveletConfig()])
def test_padding_alone_has_a_bias(config: SchemeConfig) -> None:
    """A batch may hold rows without tokens, whose numbers do not matter."""
    keys = at(torch.full((1, LENGTH), -1))
    assert build(config, **PLACE).logit_bias(pairs_at(keys, heads=random_heads(LENGTH, **PLACE))).isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_the_network_of_fire(seed: int) -> None:
    """Sums of up to 32 products in another order."""
    bias: FireBias = part_of(FireConfig(initial_threshold=20.0), **PLACE)
    pairs = some_pairs(0, LONG)
    with torch.no_grad():
        torch.manual_seed(seed)
        for parameter in (bias.hidden_weight, bias.hidden_bias, bias.output_weight):
            parameter.normal_()
        # Units that are constant, and two with one corner.
        bias.hidden_weight[:2] = 0.0
        bias.hidden_weight[3], bias.hidden_bias[3] = -bias.hidden_weight[4], -bias.hidden_bias[4]
    inputs = bias.normalized_distance(pairs)
    plain = bias.network(inputs.flatten()).unflatten(-1, inputs.shape).transpose(0, 1)
    torch.testing.assert_close(bias(pairs), plain, atol=1e-5, rtol=1e-5)
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3))
    gradients, expected = (
        torch.autograd.grad((value * weights).sum(), list(bias.parameters())) for value in (bias(pairs), plain)
    )
    for value, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(value, other, atol=2e-3 * float(other.abs().max()), rtol=1e-3)


@torch.no_grad()
def test_cope_in_a_model_that_multiplies_its_scores_by_a_mask() -> None:
    torch.manual_seed(0)
    model = patch_model(tiny("OpenAIGPTLMHeadModel", n_embd=32, n_layer=2, n_head=4).eval(), "cope")
    ids = torch.arange(1, 13).unsqueeze(0)
    torch.testing.assert_close(model(ids[:, :7]).logits, model(ids).logits[:, :7])
