"""DeBERTa's disentangled attention: its buckets, its products, and options that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from hf_posenc.schemes import AttentionPairs, BuildContext, DisentangledConfig, Positions, SchemeConfig
from hf_posenc.schemes.bias import relative_tables
from hf_posenc.schemes.bias.disentangled import LogBuckets
from hf_posenc.schemes.bias.relative_tables import select_rows_of_keys

HEADS, HEAD_DIM = 3, 4


@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(256, 512), (8, 24), (7, 24), (2, 3), (3, 3), (5, 4), (320, 512), (32, 2048)]
)
def test_buckets_equal_those_of_transformers(buckets: int, max_distance: int) -> None:
    distance = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    expected = make_log_bucket_position(distance, buckets, max_distance).long()
    found = LogBuckets(buckets, max_distance)
    assert torch.equal(found(distance), expected)
    assert int(found(torch.tensor(max_distance - 1))) == max(2 * (buckets // 2) - 1, 1)


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
    key, table = torch.randn(2, HEADS, 40, HEAD_DIM), torch.randn(HEADS, 12, HEAD_DIM)
    expected = torch.einsum("bhjd,hbijd->bhij", key, table[:, rows.expand(2, -1, -1)])
    torch.testing.assert_close(select_rows_of_keys(key, table, rows), expected, rtol=1e-5, atol=1e-5)


def parts_of(config: SchemeConfig, **options: Any) -> Any:
    torch.manual_seed(0)
    return config.build(BuildContext(HEADS * HEAD_DIM, HEADS, HEAD_DIM, **options))


def test_a_causal_model_has_vectors_for_earlier_keys_only() -> None:
    assert parts_of(DisentangledConfig(max_distance=5), causal=False).logit_bias.key_weight.shape == (3, 10, 4)
    assert parts_of(DisentangledConfig(max_distance=5), causal=True).logit_bias.query_weight.shape == (3, 5, 4)
    assert parts_of(DisentangledConfig("p2c", 20, 6), causal=False).logit_bias.key_weight is None


@pytest.mark.parametrize(("terms", "products"), [("c2p|p2c", 3), ("c2p", 2), ("p2c", 2)])
def test_the_factor_of_the_logits_is_completed(terms: str, products: int) -> None:
    config = DisentangledConfig(terms, max_distance=4)
    assert parts_of(config, logit_terms=products).logit_scale is None
    for made_for in (1, 4):
        scale = parts_of(config, logit_terms=made_for).logit_scale
        positions = Positions(torch.arange(5).unsqueeze(0), torch.tensor([[5]]))
        torch.testing.assert_close(scale(positions), torch.full((1, 1, 5), (made_for / products) ** 0.5))


@pytest.mark.parametrize("terms", ["c2p|p2c", "c2p", "p2c"])
def test_scaled_queries_and_keys_give_the_same_bias(terms: str) -> None:
    """Some modules multiply their queries or keys before the product, and nothing after it."""
    bias = parts_of(DisentangledConfig(terms, max_distance=4), causal=False).logit_bias
    query, key = torch.randn(2, 1, HEADS, 9, HEAD_DIM)
    slots, positions = torch.arange(9), Positions(torch.arange(9).unsqueeze(0), torch.tensor([[9]]))
    expected = bias(AttentionPairs(query, key, slots, positions, 0.3))
    for of_query, of_key in ((0.3, 1.0), (1.0, 0.3), (0.5, 0.6)):
        scaled = AttentionPairs(
            query * of_query, key * of_key, slots, positions, 1.0, query_factor=of_query, key_factor=of_key
        )
        torch.testing.assert_close(bias(scaled), expected, rtol=1e-5, atol=1e-6)


def test_buckets_reach_any_distance() -> None:
    config = DisentangledConfig("c2p", max_distance=2**20, buckets=8)
    assert parts_of(config).logit_bias.key_weight.shape == (3, 8, 4)
