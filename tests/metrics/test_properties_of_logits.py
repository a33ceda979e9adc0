"""Norms, decay and rounding, against the numbers of the literature."""

import cmath
import math

import pytest
import torch

from hf_posenc.metrics.properties import (
    decay_curve,
    logit_defect,
    long_term_decay,
    low_precision,
    norm_preservation,
    rotary_envelope,
)
from hf_posenc.metrics.properties.encodings import unique_rows
from hf_posenc.schemes import IntegerConfig, PRopeConfig, RopeConfig, YarnScaling


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_yarn_lengthens_by_its_temperature(factor):
    config = RopeConfig(scaling=YarnScaling(factor=factor, original_max_positions=256))
    found = norm_preservation(config)
    assert found.value == pytest.approx(0.1 * math.log(factor), rel=1e-5)
    assert found.details["by_position"] < 1e-6


def test_envelope_of_roformer():
    expected = []
    for distance in (0, 1, 10, 100, 1000, 4000):
        terms = [cmath.exp(1j * distance * 10000 ** (-pair / 32)) for pair in range(32)]
        expected.append(sum(abs(sum(terms[: count + 1])) for count in range(32)) / 32)
    assert expected == pytest.approx([16.5, 15.95, 8.81, 7.47, 4.09, 1.67], abs=0.006)
    # float32 frequencies are off by 6e-8, which 4000 positions make an angle of 2e-4.
    assert rotary_envelope() == pytest.approx(expected, abs=1e-3)
    shown = long_term_decay("rope").details["envelope"]
    assert list(shown.values()) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["xpos", "fope", "rerope", "alibi"])
def test_only_rotations_have_an_envelope(name):
    assert "envelope" not in long_term_decay(name).details


def test_decay_of_rope_is_the_mean_cosine():
    curve = decay_curve("rope")
    for distance in (0, 1, 10, 100, 255):
        mean = sum(math.cos(distance * 10000 ** (-pair / 32)) for pair in range(32)) / 32
        assert float(curve[distance]) == pytest.approx(mean, abs=1e-5)


def test_p_rope_ends_on_a_plateau():
    # A quarter of the pairs still turns, so that at least 1 - 2 * 0.25 of the dot product is left.
    assert float(decay_curve(PRopeConfig(fraction=0.25)).min()) >= 0.5
    assert long_term_decay(PRopeConfig(fraction=0.25)).details["half"] is None


def test_independent_queries_and_keys_do_not_decay():
    # 128 pairs, each of variance 1 / 64: the mean has a standard deviation of 0.011.
    independent = decay_curve("rope", independent=True)
    assert float(independent.abs().max()) < 0.05
    assert float(decay_curve("rope")[:4].min()) > 0.7


def test_decay_of_alibi_is_the_mean_slope():
    # 4 heads have the slopes 1/4, 1/16, 1/64 and 1/256.
    slope = (1 / 4 + 1 / 16 + 1 / 64 + 1 / 256) / 4
    curve = decay_curve("alibi")
    assert float(curve[100]) == pytest.approx(1 - 100 * slope, abs=1e-5)
    assert long_term_decay("alibi").details["half"] == math.floor(0.5 / slope) + 1


def test_positions_that_are_rounded_first_collide():
    # bfloat16 has 8 significant bits: 257 integers up to 256, then 128 per power of two up to 8192 itself, to which the
    # last positions round. float16 has 11: 2049 up to 2048, then 1024 per power of two.
    bfloat16 = low_precision("sinusoidal", torch.bfloat16, length=8192).details
    float16 = low_precision("sinusoidal", torch.float16, length=8192).details
    assert bfloat16["first_collision_ids_cast_first"] == 257
    assert round(bfloat16["unique_ids_cast_first"] * 8192) == 257 + 5 * 128
    assert float16["first_collision_ids_cast_first"] == 2049
    assert round(float16["unique_ids_cast_first"] * 8192) == 2049 + 2 * 1024
    assert bfloat16["unique"] == float16["unique"] == 1


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 769), (torch.float16, 3073)])
def test_alibi_keeps_few_distances_in_half_precision(dtype, expected):
    found = low_precision("alibi", dtype, length=4096)
    # Slopes are powers of two, so that all heads round alike.
    assert round(found.details["unique"] * 4096) == expected
    assert found.details["unique_float32"] == 1


def test_logits_of_rope_do_not_suffer_from_far_positions():
    for dtype in (torch.float16, torch.bfloat16):
        defects = [logit_defect("rope", position, dtype) for position in (0, 1000, 16000, 64000)]
        assert 0 < max(defects) < 2 * min(defects)
    assert logit_defect(IntegerConfig(), 1000, torch.bfloat16) > 1
    assert logit_defect("rope", 1000, torch.float32) == 0


def test_unique_rows_compares_values():
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [1.0, 1e-6]])
    assert unique_rows(rows) == 3
    assert unique_rows(rows.half()) == 3
    assert unique_rows(rows.bfloat16()) == 3
    assert unique_rows(torch.tensor([[256.0], [257.0], [258.0]]).bfloat16()) == 2
    assert unique_rows(torch.zeros(5, 0)) == 1
