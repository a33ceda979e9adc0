"""The expected marks of every scheme, and the numbers of the literature."""

import cmath
import json
import math
from dataclasses import dataclass

import pytest
import torch

from hf_posenc.cli import main
from hf_posenc.errors import UnknownNameError
from hf_posenc.metrics import (
    MeasurementError,
    build_specimen,
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
    properties_table,
    relativity,
    rotary_envelope,
    sinusoidal_shift,
    uniqueness,
)
from hf_posenc.metrics.properties.decay import spearman
from hf_posenc.metrics.properties.precision import unique_rows
from hf_posenc.metrics.properties.result import HEADINGS
from hf_posenc.metrics.properties.uniqueness import nearest_rows
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
    list_schemes,
)
from tests.schemes.table import TABLE

torch.set_num_threads(1)

MARKS = {True: "+", False: "-", None: "."}


@pytest.mark.parametrize("name", list_schemes())
def test_marks_are_the_expected_ones(name):
    row = properties_table([name]).rows[0]
    assert row.error is None
    assert list(row.properties) == list(HEADINGS)
    found = "".join(MARKS[mark] for mark in row.marks.values())
    assert found == TABLE[name].marks, {key: value.value for key, value in row.properties.items()}
    for measurement in row.properties.values():
        # Every verdict has a number and a threshold, or says why there is none.
        assert (measurement.passed is None) == (measurement.reason is not None)
        assert measurement.passed is None or measurement.value is not None or measurement.refused


# Uniqueness and length consistency


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


# Relativity and linearity


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


# Extrapolation, determinism, several axes


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


# Norms and decay


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


def test_spearman():
    assert spearman(torch.arange(5), torch.tensor([9.0, 7.0, 5.0, 3.0, 1.0])) == pytest.approx(-1)
    assert spearman(torch.arange(5), torch.full((5,), 3.0)) == 0
    # By hand: ranks 1.5 1.5 3 4 against 1 2 3 4 have the covariance 4.5 of 4.5 and 5.
    assert spearman(torch.arange(4), torch.tensor([2.0, 2.0, 5.0, 8.0])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


# Low precision


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


# Specimens, the table and the command


def test_specimens_draw_small_weights_anew_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    specimen = build_specimen("t5")
    uniqueness(specimen), determinism(specimen), long_term_decay(specimen)
    assert torch.equal(torch.rand(3), expected)
    assert specimen.redrawn == ("T5Bias.weight",)
    weight = specimen.parts.logit_bias.weight
    assert 0.2 < float(weight.std()) < 0.3
    assert torch.equal(weight, build_specimen("t5").parts.logit_bias.weight)
    assert not torch.equal(weight, build_specimen("t5", seed=1).parts.logit_bias.weight)
    assert build_specimen("rope").redrawn == ()


def test_a_causal_scheme_is_compared_on_what_it_sees():
    specimen = build_specimen("forget_gate")
    assert specimen.causal
    assert specimen.visible(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert build_specimen("rope").visible(2).all()


def test_the_table_in_all_forms():
    too_wide = RopeConfig(rotary_dim=128)
    result = properties_table(["none", "learned", too_wide])
    entry = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [row["scheme"] for row in entry["rows"]] == ["none", "learned", "rope"]
    assert set(entry["columns"]) == set(HEADINGS)
    assert "would rotate 128 of 64 dimensions" in entry["rows"][2]["error"]
    assert any("moved by 30000" in reason for reason in entry["rows"][1]["properties"]["relativity"]["refused"])
    assert result.row("none").marks["relativity"] is True
    with pytest.raises(KeyError, match="alibi"):
        result.row("alibi")
    for text in (result.table(), result.page()):
        assert "defined past training length" in text
        assert "rope:rotary_dim=128" in text
        assert "longer than the 1024 positions" in text
    lines = result.page().splitlines()
    assert lines[0] == "# Properties of the schemes"
    assert sum(line.startswith("| learned ") for line in lines) == 1
    assert len({line.count("|") for line in lines if line.startswith("| ")}) == 1


def test_a_table_too_short_for_any_property_has_a_row_of_refusals():
    row = properties_table([LearnedConfig(num_positions=8)]).rows[0]
    applicable = {name: measurement for name, measurement in row.properties.items() if measurement.refused}
    assert set(applicable) == set(HEADINGS) - {"extensibility", "norm_preservation"}
    assert all(measurement.passed is None for measurement in applicable.values())
    assert all("8 positions of the learned table" in measurement.refused[0] for measurement in applicable.values())


def test_schemes_that_cannot_be_named_are_refused():
    with pytest.raises(UnknownNameError, match="alibi"):
        properties_table(["none", "alibbi"])
    with pytest.raises(MeasurementError, match="Pass a config"):
        build_specimen("composed")
    with pytest.raises(MeasurementError, match="would rotate 128"):
        build_specimen(RopeConfig(rotary_dim=128))


def test_command_line(capsys):
    assert main(["eval", "properties", "--schemes", "none,", "rope:theta=500000", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in entry["rows"]] == ["none", "rope:theta=500000"]
    assert main(["eval", "properties", "--schemes", "none", "--markdown"]) == 0
    assert "| none " in capsys.readouterr().out
    assert main(["eval", "properties", "--schemes", "none"]) == 0
    assert "scheme" in capsys.readouterr().out
    assert main(["eval", "properties", "--schemes", "nonne"]) == 2
    assert "none" in capsys.readouterr().err
