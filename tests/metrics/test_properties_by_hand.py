"""The numbers behind the properties, against formulas, the literature, and schemes that are made to fail."""

import cmath
import math
from dataclasses import dataclass

import pytest
import torch

from hf_posenc.metrics.properties import (
    decay_curve,
    defined_past_training,
    determinism,
    extensibility,
    length_consistency,
    linearity,
    logit_defect,
    long_term_decay,
    low_precision,
    norm_preservation,
    relativity,
    sinusoidal_shift,
    uniqueness,
)
from hf_posenc.metrics.properties.encodings import nearest_rows, unique_rows
from hf_posenc.schemes import (
    AdditiveEncoding,
    BinaryConfig,
    DynamicScaling,
    IntegerConfig,
    LearnedConfig,
    NormalizedIntegerConfig,
    PRopeConfig,
    QueryKeyMap,
    RopeConfig,
    SchemeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
)


def stretched(original, factor=2.0):
    return RopeConfig(scaling=DynamicScaling(factor=factor, original_max_positions=original))


def yarn(factor):
    return RopeConfig(scaling=YarnScaling(factor=factor, original_max_positions=256))


#: |PE(p) - PE(p + 1)|^2 = sum over pairs of 2 - 2 cos(w), whatever p is; 1.4718 for a width of 64.
NEIGHBOURS = math.sqrt(sum(2 - 2 * math.cos(10000 ** (-pair / 32)) for pair in range(32)))
#: 4 heads of ALiBi have the slopes 1/4, 1/16, 1/64 and 1/256.
SLOPE = (1 / 4 + 1 / 16 + 1 / 64 + 1 / 256) / 4
DISTANCES = (0, 1, 10, 100, 1000, 4000)


def mean_cosine(distance):
    return sum(math.cos(distance * 10000 ** (-pair / 32)) for pair in range(32)) / 32


def mean_of_sums(distance):
    """RoFormer's envelope."""
    terms = [cmath.exp(1j * distance * 10000 ** (-pair / 32)) for pair in range(32)]
    return sum(abs(sum(terms[: count + 1])) for count in range(32)) / 32


@pytest.mark.parametrize(
    ("measure", "expected", "tolerance"),
    [
        (lambda: uniqueness("sinusoidal", length=8192).value, NEIGHBOURS, 1e-5),
        # 32 buckets, half of them for keys before the query.
        (lambda: uniqueness("t5").details["distinct"], 16, 0),
        # p / 256 against p / S at p = 255, along a vector of length 8.
        (
            lambda: list(length_consistency("normalized_integer").details["by_length"].values()),
            [0.5, 0.875, 1 - 1 / 128],
            1e-6,
        ),
        (lambda: norm_preservation(yarn(2.0)).value, 0.1 * math.log(2), 1e-6),
        (lambda: norm_preservation(yarn(8.0)).value, 0.1 * math.log(8), 1e-6),
        (lambda: norm_preservation(yarn(8.0)).details["by_position"], 0, 1e-6),
        (lambda: [mean_of_sums(distance) for distance in DISTANCES], [16.5, 15.95, 8.81, 7.47, 4.09, 1.67], 0.006),
        # float32 frequencies are off by 6e-8, which 4000 positions make an angle of 2e-4.
        (lambda: list(long_term_decay("rope").details["envelope"].values()), list(map(mean_of_sums, DISTANCES)), 1e-3),
        (
            lambda: decay_curve("rope")[[0, 1, 10, 100, 255]].tolist(),
            list(map(mean_cosine, (0, 1, 10, 100, 255))),
            1e-5,
        ),
        # 128 pairs, each of variance 1 / 64: the mean has a standard deviation of 0.011.
        (lambda: float(decay_curve("rope", independent=True).abs().max()), 0, 0.05),
        (lambda: float(decay_curve("alibi")[100]), 1 - 100 * SLOPE, 1e-5),
        (lambda: long_term_decay("alibi").details["half"], math.floor(0.5 / SLOPE) + 1, 0),
    ],
)
def test_numbers_are_those_of_the_formula(measure, expected, tolerance):
    assert measure() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("measure", "scheme", "passed"),
    [
        (length_consistency, NormalizedIntegerConfig(length=512), True),
        (length_consistency, stretched(256), False),
        (length_consistency, stretched(32768), True),
        # A shift is not a longer sequence: in an encoder; a causal model counts the keys before a query.
        (relativity, "fire", True),
        (relativity, "log_n_scale", True),
        (relativity, "llama4_scale", True),
        (relativity, "ssmax", True),
        (linearity, "integer", False),
        (defined_past_training, "learned", False),
        (defined_past_training, LearnedConfig(extension="interpolate"), True),
        (extensibility, "rope", None),
    ],
)
def test_verdicts(measure, scheme, passed):
    found = measure(scheme)
    assert found.passed is passed
    assert found.value == 0 or measure is not relativity


@pytest.mark.parametrize(
    ("scheme", "first"),
    [("fire", 2048), ("log_n_scale", 2048), ("llama4_scale", 32768), (stretched(1024, factor=1.0), 2048)],
)
def test_schemes_that_follow_the_length_past_a_threshold_are_found_there(scheme, first):
    """In an encoder; below its threshold each of them is the same at any length."""
    found = length_consistency(scheme)
    assert found.passed is False
    assert {length: change > 1e-3 for length, change in found.details["by_length"].items()} == {
        length: length >= first for length in (512, 2048, 32768)
    }


def test_what_a_scheme_refuses_is_named():
    binary, table = uniqueness(BinaryConfig(bits=8)), relativity("learned")
    assert binary.passed is None
    assert "256 positions that 8 bits can tell apart" in binary.refused[0]
    assert binary.reason is not None
    assert table.passed is False
    assert set(table.details["by_shift"]) == {1, 17, 500}
    assert [entry.partition(":")[0] for entry in table.refused] == [
        "near positions moved by 4000", "near positions moved by 30000", "spread positions",
    ]  # fmt: skip
    assert "longer than the 1024 positions" in defined_past_training("learned").refused[0]


def test_details_of_a_measurement():
    first, second = uniqueness("sinusoidal", length=8192).details["pair"]
    assert abs(first - second) == 1
    assert uniqueness(T5Config(num_buckets=64, max_distance=4096)).details["distinct"] > 16
    by_shift = relativity("rope").details["by_shift"]
    # The rounding of relative schemes grows with the shift.
    assert by_shift[1] < 1e-4 < by_shift[30000] < 2e-3
    assert relativity("rope", shifts=(1,)).value < 1e-4
    assert linearity("sinusoidal").details["explicit"] < 1e-6
    assert linearity("integer").details["affine"] < 1e-9
    assert linearity("learned").details["affine"] > 0.5
    unbounded = defined_past_training("integer")
    assert unbounded.value > 100
    assert unbounded.details["finite"]
    # A quarter of the pairs still turns, so that at least 1 - 2 * 0.25 of the dot product is left.
    assert float(decay_curve(PRopeConfig(fraction=0.25)).min()) >= 0.5
    assert long_term_decay(PRopeConfig(fraction=0.25)).details["half"] is None
    assert "envelope" not in long_term_decay("alibi").details


@pytest.mark.parametrize("count", [2, 3, 200])
def test_nearest_rows_against_all_pairs(count):
    rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(count)) + 100
    rows[-1] = rows[0] + 1e-3
    distance, pair, distinct = nearest_rows(rows)
    pairs = {(a, b): float((rows[a].double() - rows[b].double()).norm()) for a in range(count) for b in range(a)}
    assert distance == pytest.approx(min(pairs.values()), rel=1e-9)
    assert tuple(sorted(pair, reverse=True)) == min(pairs, key=pairs.get)
    assert distinct == count


@pytest.mark.parametrize("frequencies", ["vaswani", "tensor2tensor"])
@pytest.mark.parametrize("layout", ["interleaved", "concatenated", "cosines_first"])
def test_the_shift_of_a_sinusoidal_table_is_one_rotation(frequencies, layout):
    config = SinusoidalConfig(frequencies=frequencies, layout=layout, offset=2, scale=3.0)

    def encoding(position):
        angles = [position * 10000 ** (-(pair / 8 if frequencies == "vaswani" else pair / 7)) for pair in range(8)]
        sines, cosines = ([3 * wave(a) for a in angles] for wave in (math.sin, math.cos))
        halves = [cosines, sines] if layout == "cosines_first" else [sines, cosines]
        vectors = torch.tensor(halves, dtype=torch.float64)
        return (vectors.T if layout == "interleaved" else vectors).flatten()

    for shift in (1, 7, 64):
        matrix = sinusoidal_shift(config, 16, shift)
        for position in (0, 5, 1000):
            torch.testing.assert_close(matrix @ encoding(position), encoding(position + shift), rtol=0, atol=1e-9)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    with pytest.raises(ValueError, match="use an even width"):
        sinusoidal_shift(SinusoidalConfig(), 15, 1)


class RandomVectors(AdditiveEncoding):
    def __init__(self, when):
        super().__init__()
        self.when = when
        self.vector = torch.rand(64)

    def forward(self, positions):
        shape = (*positions.ids.shape, 64)
        if self.when == "evaluations":
            return torch.rand(shape)
        if self.when == "builds":
            return self.vector.expand(shape)
        return positions.ids.max().float().expand(shape)


@dataclass(frozen=True)
class RandomConfig(SchemeConfig):
    when: str = "evaluations"

    def build(self, context):
        return SchemeParts(additive=RandomVectors(self.when))


@pytest.mark.parametrize("when", ["evaluations", "builds", "batches"])
def test_determinism_finds_each_kind_of_chance(when):
    found = determinism(RandomConfig(when))
    assert found.passed is False
    assert found.details[when] > 1e-3
    if when != "evaluations":
        assert found.details["evaluations"] == 0


class AnglesOfProducts(QueryKeyMap):
    """Turns pairs by the product of two coordinates, which no distance along one axis determines."""

    def __init__(self, combine):
        super().__init__()
        self.combine = combine

    def phases(self, positions):
        coordinates = positions.coordinates
        if coordinates is None:
            coordinates = torch.stack((positions.ids, positions.ids))
        angles = 0.1 * self.combine(coordinates[0], coordinates[1]).float().unsqueeze(-1)
        return angles.cos(), angles.sin()

    def map_query(self, query, phases):
        cosine, sine = (phase.unsqueeze(1) for phase in phases)
        first, second = query.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)

    map_key = map_query


@dataclass(frozen=True)
class ProductConfig(SchemeConfig):
    first_only: bool = False

    def build(self, context):
        return SchemeParts(query_key_map=AnglesOfProducts((lambda a, b: a) if self.first_only else torch.mul))


def test_axes_have_to_be_seen_and_relative():
    product, first_only = (extensibility(ProductConfig(first_only)) for first_only in (False, True))
    assert (product.passed, first_only.passed) == (False, False)
    assert max(product.details["moved"]) > 1e-2
    assert max(first_only.details["moved"]) < 1e-4
    assert first_only.details["seen"][1] == 0


@pytest.mark.parametrize(
    ("dtype", "first_collision", "unique_ids", "alibi"),
    [
        # 8 significant bits: 257 integers up to 256, then 128 per power of two up to 8192 itself, to which the last
        # positions round.
        (torch.bfloat16, 257, 257 + 5 * 128, 769),
        # 11 bits: 2049 up to 2048, then 1024 per power of two.
        (torch.float16, 2049, 2049 + 2 * 1024, 3073),
    ],
)
def test_positions_that_are_rounded_first_collide_and_distances_of_alibi_too(dtype, first_collision, unique_ids, alibi):
    found = low_precision("sinusoidal", dtype, length=8192).details
    assert found["first_collision_ids_cast_first"] == first_collision
    assert round(found["unique_ids_cast_first"] * 8192) == unique_ids
    assert found["unique"] == 1
    # Slopes are powers of two, so that all heads round alike.
    found = low_precision("alibi", dtype, length=4096).details
    assert (round(found["unique"] * 4096), found["unique_float32"]) == (alibi, 1)


def test_logits_of_rope_do_not_suffer_from_far_positions():
    for dtype in (torch.float16, torch.bfloat16):
        defects = [logit_defect("rope", position, dtype) for position in (0, 1000, 16000, 64000)]
        assert 0 < max(defects) < 2 * min(defects)
    assert logit_defect(IntegerConfig(), 1000, torch.bfloat16) > 1
    assert logit_defect("rope", 1000, torch.float32) == 0


def test_unique_rows_compares_values():
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [1.0, 1e-6]])
    assert [unique_rows(rows.to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)] == [3, 3, 3]
    assert unique_rows(torch.zeros(5, 0)) == 1
