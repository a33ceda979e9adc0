"""What tells positions apart, and what a shift, a longer sequence, another axis or another build changes."""

import math
from dataclasses import dataclass

import pytest
import torch

from hf_posenc.metrics.properties import (
    defined_past_training,
    determinism,
    extensibility,
    length_consistency,
    linearity,
    relativity,
    sinusoidal_shift,
    uniqueness,
)
from hf_posenc.metrics.properties.encodings import nearest_rows
from hf_posenc.schemes import (
    AdditiveEncoding,
    BinaryConfig,
    DynamicScaling,
    LearnedConfig,
    NormalizedIntegerConfig,
    QueryKeyMap,
    RopeConfig,
    SchemeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
)


def test_uniqueness_of_a_sinusoidal_table_is_the_distance_of_neighbours():
    # By hand: |PE(p) - PE(p + 1)|^2 = sum over pairs of 2 - 2 cos(w), whatever p is; 1.4718 for a width of 64.
    distance = math.sqrt(sum(2 - 2 * math.cos(10000 ** (-pair / 32)) for pair in range(32)))
    found = uniqueness("sinusoidal", length=8192)
    assert distance == pytest.approx(1.4718, abs=1e-4)
    assert found.value == pytest.approx(distance, abs=1e-5)
    assert abs(found.details["pair"][0] - found.details["pair"][1]) == 1


def test_t5_tells_apart_as_many_positions_as_it_has_buckets():
    # 32 buckets, half of them for keys before the query.
    assert uniqueness("t5").details["distinct"] == 16
    assert uniqueness(T5Config(num_buckets=64, max_distance=4096)).details["distinct"] > 16


def test_a_scheme_that_ends_before_everything_asked_for_has_no_verdict():
    found = uniqueness(BinaryConfig(bits=8))
    assert found.passed is None
    assert "256 positions that 8 bits can tell apart" in found.refused[0]
    assert found.reason is not None


@pytest.mark.parametrize("count", [2, 3, 200])
def test_nearest_rows_against_all_pairs(count):
    rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(count)) + 100
    rows[-1] = rows[0] + 1e-3
    distance, pair, distinct = nearest_rows(rows)
    pairs = {(a, b): float((rows[a].double() - rows[b].double()).norm()) for a in range(count) for b in range(a)}
    assert distance == pytest.approx(min(pairs.values()), rel=1e-9)
    assert tuple(sorted(pair, reverse=True)) == min(pairs, key=pairs.get)
    assert distinct == count


def test_length_consistency_sees_what_depends_on_the_length():
    assert length_consistency(NormalizedIntegerConfig(length=512)).passed
    # p / 256 against p / S at p = 255, along a vector of length 8.
    found = length_consistency("normalized_integer").details["by_length"]
    assert found == pytest.approx({512: 0.5, 2048: 0.875, 32768: 1 - 1 / 128})
    stretched = RopeConfig(scaling=DynamicScaling(factor=2.0, original_max_positions=256))
    assert not length_consistency(stretched).passed
    assert length_consistency(RopeConfig(scaling=DynamicScaling(factor=2.0, original_max_positions=32768))).passed


@pytest.mark.parametrize(
    ("scheme", "first"),
    [
        ("fire", 2048),
        ("log_n_scale", 2048),
        ("llama4_scale", 32768),
        (RopeConfig(scaling=DynamicScaling(factor=1.0, original_max_positions=1024)), 2048),
    ],
)
def test_schemes_that_follow_the_length_past_a_threshold_are_found_there(scheme, first):
    """In an encoder; below its threshold each of them is the same at any length."""
    found = length_consistency(scheme)
    assert found.passed is False
    assert {length: change > 1e-3 for length, change in found.details["by_length"].items()} == {
        length: length >= first for length in (512, 2048, 32768)
    }


def test_relativity_names_what_a_table_refuses():
    found = relativity("learned")
    assert found.passed is False
    assert set(found.details["by_shift"]) == {1, 17, 500}
    assert [entry.partition(":")[0] for entry in found.refused] == [
        "near positions moved by 4000",
        "near positions moved by 30000",
        "spread positions",
    ]


@pytest.mark.parametrize("name", ["fire", "log_n_scale", "llama4_scale", "ssmax"])
def test_a_shift_is_not_a_longer_sequence(name):
    """In an encoder; a causal model counts the keys before a query, which a shift changes."""
    found = relativity(name)
    assert found.passed
    assert found.value == 0


def test_the_rounding_of_relative_schemes_grows_with_the_shift():
    by_shift = relativity("rope").details["by_shift"]
    assert by_shift[1] < 1e-4 < by_shift[30000] < 2e-3
    assert relativity("rope", shifts=(1,)).value < 1e-4


@pytest.mark.parametrize("frequencies", ["vaswani", "tensor2tensor"])
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_the_shift_of_a_sinusoidal_table_is_one_rotation(frequencies, layout):
    config = SinusoidalConfig(frequencies=frequencies, layout=layout, offset=2, scale=3.0)

    def encoding(position):
        angles = [position * 10000 ** (-(pair / 8 if frequencies == "vaswani" else pair / 7)) for pair in range(8)]
        sines, cosines = [3 * math.sin(a) for a in angles], [3 * math.cos(a) for a in angles]
        if layout == "concatenated":
            return torch.tensor(sines + cosines, dtype=torch.float64)
        return torch.tensor([x for pair in zip(sines, cosines, strict=True) for x in pair], dtype=torch.float64)

    for shift in (1, 7, 64):
        matrix = sinusoidal_shift(config, 16, shift)
        for position in (0, 5, 1000):
            torch.testing.assert_close(matrix @ encoding(position), encoding(position + shift), rtol=0, atol=1e-9)
    identity = torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, identity)
    torch.testing.assert_close(sinusoidal_shift(config, 16, 7) @ sinusoidal_shift(config, 16, 57), matrix)


def test_an_odd_width_has_no_shift():
    with pytest.raises(ValueError, match="give an even width"):
        sinusoidal_shift(SinusoidalConfig(), 15, 1)


def test_linearity_finds_the_explicit_rotation_and_the_affine_one():
    sinusoidal = linearity("sinusoidal")
    assert sinusoidal.details["explicit"] < 1e-6
    integer = linearity("integer")
    assert not integer.passed
    assert integer.details["affine"] < 1e-9
    assert linearity("learned").details["affine"] > 0.5


def test_unbounded_logits_fail_past_the_training_length():
    found = defined_past_training("integer")
    assert found.value > 100
    assert found.details["finite"]
    learned = defined_past_training("learned")
    assert learned.passed is False
    assert "longer than the 1024 positions" in learned.refused[0]
    assert defined_past_training(LearnedConfig(extension="interpolate")).passed


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
    assert extensibility("rope").passed is None
    product = extensibility(ProductConfig())
    assert product.passed is False
    assert max(product.details["moved"]) > 1e-2
    first_only = extensibility(ProductConfig(first_only=True))
    assert first_only.passed is False
    assert max(first_only.details["moved"]) < 1e-4
    assert first_only.details["seen"][1] == 0
