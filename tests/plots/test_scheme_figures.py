"""Figures of schemes: which apply, whether they agree with the formula, and files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy
import pytest
import torch

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.colors import to_rgb
from PIL import Image

from hf_posenc.cli import main
from hf_posenc.plots.schemes import applicable_kinds, draw_kind, kind_named, plot_scheme, subject_of
from hf_posenc.plots.schemes.drawing import color_scale
from hf_posenc.plots.schemes.rotations import turning_pairs
from hf_posenc.plots.schemes.subject import bias_matrix, equal_query_key_logits, turning_frequencies
from hf_posenc.plots.style import line_style, styled
from hf_posenc.schemes import (
    AdditiveEncoding,
    AlibiConfig,
    BinaryConfig,
    ComposedConfig,
    DynamicScaling,
    LinearScaling,
    NoneConfig,
    PRopeConfig,
    QueryKeyMap,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
    get_scheme,
)
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

torch.set_num_threads(1)

EVERYWHERE = ["heat_map", "decay", "dimensions", "difference"]
MAP = ["heat_map", "rotation", "frequencies", "decay", "dimensions", "difference"]
BIAS = ["bias_distance", "bias_map"]


class Waves(AdditiveEncoding):
    """One sine in every dimension."""

    def forward(self, positions):
        return (positions.ids.float() / 7).sin().unsqueeze(-1).expand(*positions.ids.shape, 128)


class Stretch(QueryKeyMap):
    """Multiplies by a factor that grows with position: neither a rotation nor one with frequencies."""

    def phases(self, positions):
        return (1 + positions.ids.float().unsqueeze(-1) / 100,)

    def map_query(self, query, phases):
        return query * phases[0].unsqueeze(1).to(query.dtype)

    map_key = map_query


@dataclass(frozen=True)
class ThirdPartyConfig(SchemeConfig):
    """A third-party scheme, which is not registered and has its own parts."""

    name: ClassVar[str] = "third_party"
    wave: bool = True

    def build(self, context):
        return SchemeParts(additive=Waves()) if self.wave else SchemeParts(query_key_map=Stretch())


def lines(config: SchemeConfig, kind: str, panel: int = 0) -> dict[str, numpy.ndarray]:
    axes = draw_kind(kind_named(kind), subject_of(config)).axes[panel]
    return {str(line.get_label()): numpy.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (NoneConfig(), ["decay"]),
        (SinusoidalConfig(), EVERYWHERE),
        (AlibiConfig(), BIAS),
        (RopeConfig(), MAP),
        (ComposedConfig((SinusoidalConfig(), T5Config())), [*BIAS, "heat_map", "dimensions", "difference"]),
        (ScheduleConfig((RopeConfig(), NoneConfig())), ["layers"]),
        # A bias of far pairs only is shown by its distances.
        (get_scheme("rerope")(), ["distance_map", *MAP]),
        (get_scheme("self_extend")(), ["distance_map", *MAP]),
        (get_scheme("attention_sinks")(), ["distance_map", *MAP]),
        (get_scheme("position_shift")(), ["position_map", *(kind for kind in MAP if kind != "frequencies")]),
        (get_scheme("ssmax")(), ["logit_scale"]),
        (get_scheme("rope_nd")(), ["grid", *MAP]),
        (PRopeConfig(fraction=0.0), [kind for kind in MAP if kind != "rotation"]),
        (ThirdPartyConfig(wave=True), EVERYWHERE),
        (ThirdPartyConfig(wave=False), EVERYWHERE),
    ],
    ids=lambda value: value.name if isinstance(value, SchemeConfig) else "",
)
def test_a_scheme_gets_the_kinds_that_its_parts_can_show(config, kinds):
    subject = subject_of(config)
    assert [kind.name for kind in applicable_kinds(subject)] == kinds
    for name in kinds:
        kind = kind_named(name)
        assert kind.summary
        assert draw_kind(kind, subject).axes
        assert kind.caption_of(subject).endswith(".")


def test_the_bias_over_distance_is_the_slope_times_the_distance():
    drawn = lines(AlibiConfig(), "bias_distance")
    assert len(drawn) == 4
    # Lines that cross all the time are drawn for one head only.
    assert list(lines(T5Config(), "bias_distance")) == ["head 1 of 8"]
    for label, slope in (("head 1 of 8", 2.0**-1), ("head 8 of 8", 2.0**-8)):
        # The line runs from the farthest key to the nearest.
        numpy.testing.assert_allclose(drawn[label], -slope * numpy.arange(256, -1, -1), rtol=1e-6)


def test_the_bias_map_hides_later_keys_and_shows_the_share_that_the_others_keep():
    figure = draw_kind(kind_named("bias_map"), subject_of(AlibiConfig()))
    for panel, slope in ((figure.axes[0], 2.0**-1), (figure.axes[3], 2.0**-8)):
        shown = numpy.ma.filled(panel.images[0].get_array(), numpy.nan)
        earlier = numpy.tril(numpy.ones(shown.shape, dtype=bool))
        assert numpy.isnan(shown[~earlier]).all()
        rows, columns = numpy.nonzero(earlier)
        numpy.testing.assert_allclose(shown[earlier], numpy.exp(-slope * (rows - columns)), rtol=1e-5, atol=1e-12)


def test_every_head_of_a_bias_map_uses_a_good_part_of_the_colours():
    """A map in one colour shows nothing."""
    for name in ("alibi", "kerple", "sandwich", "fire", "t5"):
        figure = draw_kind(kind_named("bias_map"), subject_of(get_scheme(name)()))
        for (shown,) in (axes.images for axes in figure.axes if axes.images):
            values = numpy.ma.compressed(numpy.ma.masked_invalid(shown.get_array()))
            low, high = shown.get_clim()
            assert values.max() - values.min() > 0.1 * (high - low), name


def test_heads_that_look_away_keep_nothing():
    drawn = lines(AlibiConfig("asymmetric"), "bias_distance", panel=1)
    assert all(numpy.nanmin(kept) >= 0 and numpy.nanmax(kept) == 1 for kept in drawn.values())


def test_colours_of_signed_numbers_are_centred_on_zero():
    signed = color_scale(torch.tensor([-1.0, 0.5]))
    assert (signed["vmin"], signed["vmax"]) == (-1.0, 1.0)
    assert color_scale(torch.tensor([-3.0, -1.0]))["vmax"] == -1.0
    assert color_scale(torch.tensor([2.0, 2.0]))["vmax"] > color_scale(torch.tensor([2.0, 2.0]))["vmin"]


def test_an_additive_heat_map_holds_the_vectors_position_by_position():
    figure = draw_kind(kind_named("heat_map"), subject_of(BinaryConfig(bits=8)))
    shown = numpy.asarray(figure.axes[0].images[0].get_array())
    assert shown.shape == (128, 100)
    digit = numpy.arange(128) * 8 // 128
    for position in (0, 5, 99):
        numpy.testing.assert_array_equal(shown[:, position], (position >> digit) & 1)


def test_a_rotation_is_shown_by_its_cosine_and_sine():
    figure = draw_kind(kind_named("heat_map"), subject_of(RopeConfig(layout="half")))
    cosine, sine = (numpy.asarray(axes.images[0].get_array()) for axes in figure.axes[:2])
    angles = numpy.arange(100) * 10000.0 ** (-2 * 3 / 64)
    numpy.testing.assert_allclose(cosine[3], numpy.cos(angles), atol=1e-5)
    numpy.testing.assert_allclose(sine[3 + 32], numpy.sin(angles), atol=1e-5)


SLOW = [
    (get_scheme("mrope")(), 32, (31, 63)),
    (RopeConfig(theta=5e6, layout="interleaved"), 32, (62, 63)),
    # Pairs that do not turn are left out.
    (PRopeConfig(fraction=0.5, layout="half"), 16, (15, 47)),
    (RopeConfig(theta=5e5, scaling=YarnScaling(4.0, 2048)), 32, (31, 63)),
    # Other positions for a rotation.
    (get_scheme("position_shift")(offset=32, inner=RopeConfig(theta=5e6, layout="interleaved")), 32, (62, 63)),
    (get_scheme("position_scale")(factor=0.25, inner=RopeConfig(theta=5e5)), 32, (31, 63)),
]


@pytest.mark.parametrize(("config", "count", "slowest"), SLOW, ids=lambda value: getattr(value, "name", ""))
def test_slow_pairs_are_the_right_ones_and_come_last(config, count, slowest):
    subject = subject_of(config)
    pairs = turning_pairs(subject)
    assert len(pairs) == count
    assert len({second - first for _, (first, second) in pairs}) == 1
    titles = [axes.get_title() for axes in draw_kind(kind_named("rotation"), subject).axes]
    assert f"dimensions {slowest[0]} and {slowest[1]}\n" in titles[3]


def test_slow_pairs_are_drawn_over_positions_at_which_they_have_turned():
    figure = draw_kind(kind_named("rotation"), subject_of(RopeConfig()))
    for panel in figure.axes[:4]:
        points = numpy.asarray(panel.collections[0].get_offsets(), dtype=float)
        angles = numpy.unwrap(numpy.arctan2(points[:, 1], points[:, 0]))
        assert abs(angles[-1] - angles[0]) > 0.6 * math.pi, panel.get_title()
    assert [axes.get_xlabel() for axes in figure.axes[:4:3]] == [
        "positions 0 to 15,\nevery token", "positions 0 to 30,720,\nevery 2,048 tokens"
    ]  # fmt: skip


@pytest.mark.parametrize("inner", [None, RopeConfig(theta=5e6)])
def test_the_speed_of_a_pair_is_its_frequency(inner):
    config = RopeConfig(theta=5e6) if inner is None else get_scheme("position_shift")(offset=8, inner=inner)
    subject = subject_of(config)
    frequencies = rope_inverse_frequencies(5e6, 64).tolist()
    # Where it is measured: float32 components, over 255 steps of the slowest pair.
    assert [speed for speed, _ in turning_pairs(subject)] == pytest.approx(frequencies, rel=2e-3)


def test_frequencies_are_drawn_before_and_after_scaling_for_several_lengths_and_where_they_stop():
    drawn = lines(RopeConfig(scaling=LinearScaling(4.0)), "frequencies")
    plain = rope_inverse_frequencies(10000.0, 64).numpy()
    numpy.testing.assert_allclose(drawn["RoPE, same base"], plain, rtol=1e-6)
    numpy.testing.assert_allclose(drawn["this scheme"], plain / 4, rtol=1e-6)
    assert list(lines(RopeConfig(theta=500.0), "frequencies")) == ["RoPE"]
    assert {"at 4096 tokens", "at 32768 tokens"} <= set(
        lines(RopeConfig(scaling=DynamicScaling(2.0, original_max_positions=512)), "frequencies")
    )
    # Pairs that stopped stand on a line of their own.
    drawn = lines(PRopeConfig(fraction=0.5), "frequencies")
    assert numpy.isnan(drawn["this scheme"][16:]).all()
    assert (drawn["does not turn"][16:] < drawn["this scheme"][:16].min()).all()


def test_decay_starts_at_the_mean_squared_length_of_the_vectors():
    subject = subject_of(NoneConfig())
    logits = equal_query_key_logits(subject, subject.positions(16), 8)
    # One vector everywhere: all logits of a sample are its squared length over sqrt(64), and all heads are equal.
    assert torch.allclose(logits, logits[:, :1, :1, :1].expand_as(logits), rtol=1e-5)
    assert 6 < float(logits.mean()) < 10
    flat = lines(NoneConfig(), "decay")["every head"]
    assert numpy.ptp(flat) < 1e-4


def test_only_what_is_a_rotation_has_its_envelope_beside_the_decay():
    for name in ("rope", "sinusoidal", "xpos", "fope", "rerope"):
        subject = subject_of(get_scheme(name)())
        assert (turning_frequencies(subject, 16) is None) == (name == "sinusoidal")
        assert len(draw_kind(kind_named("decay"), subject).axes) == (2 if name == "rope" else 1)
    assert all(turning_frequencies(subject_of(ThirdPartyConfig(wave)), 16) is None for wave in (True, False))


def test_the_difference_figure_holds_one_token_at_three_positions_and_what_changed():
    axes = draw_kind(kind_named("difference"), subject_of(SinusoidalConfig())).axes[0]
    first, middle, last, by_middle, by_last = numpy.asarray(axes.images[0].get_array())
    numpy.testing.assert_allclose(by_middle, middle - first, atol=1e-6)
    numpy.testing.assert_allclose(by_last, last - first, atol=1e-6)
    # The first pair of the sinusoid turns by one radian per position.
    numpy.testing.assert_allclose(by_middle[0], math.sin(50), atol=1e-4)


def test_figures_of_one_style_hold_on_light_and_dark_pages(tmp_path):
    """Every colour of a line stands out from the page, and no two lines of a figure look the same."""
    names = ["alibi", "none", "rope", "native", "t5", *(f"mine {index}" for index in range(9))]
    for dark in (False, True):
        with styled(dark):
            page, looks = to_rgb(matplotlib.rcParams["figure.facecolor"]), [line_style(name, names) for name in names]
        assert len({tuple(map(str, look.values())) for look in looks}) == len(names)
        for look in looks:
            assert sum(abs(one - other) for one, other in zip(page, to_rgb(look["color"]), strict=True)) > 0.8
    paths = plot_scheme(AlibiConfig(), tmp_path, kinds=["bias_map"], dark=True)
    assert [path.name for path in paths] == ["alibi_bias_map_dark.png", "alibi_bias_map_dark.svg"]
    with Image.open(paths[0]) as image:
        assert max(image.convert("RGB").getpixel((0, 0))) < 50


@pytest.mark.parametrize(
    ("config", "enlarged", "note"),
    [
        (T5Config(), ("weight",), "drawn larger, so that the figure shows an effect: `weight`"),
        # Parameters with values of their own stay as they are.
        (AlibiConfig(learnable=True), (), "before any training (seed 0)"),
        (AlibiConfig(), (), ""),
    ],
)
def test_small_tables_are_drawn_larger_and_the_caption_says_so(config, enlarged, note):
    subject = subject_of(config)
    assert subject.enlarged == enlarged
    assert note in subject.note if note else subject.note == ""
    assert ("untrained" in subject.title) == bool(enlarged)
    if enlarged:
        assert float(bias_matrix(subject, 8).std()) > 0.2
    else:
        assert torch.allclose(bias_matrix(subject, 8), bias_matrix(subject_of(AlibiConfig()), 8), rtol=1e-5)


@dataclass(frozen=True)
class WideRopeConfig(SchemeConfig):
    """A third party's scheme that needs heads of 128 dimensions and both directions."""

    name: ClassVar[str] = "wide_rope"

    def build(self, context):
        if context.causal or context.head_dim < 128:
            raise ValueError("needs wide heads and a bidirectional model")
        return RopeConfig().build(context)


def test_a_scheme_is_drawn_at_the_first_place_it_fits():
    subject = subject_of(WideRopeConfig())
    assert (subject.context.head_dim, subject.context.causal) == (128, False)
    assert [kind.name for kind in applicable_kinds(subject)] == MAP
    assert "bidirectional model with heads of 128" in subject.place_note
    assert subject_of(RopeConfig()).place_note == ""


def test_files_are_small_images_and_text(tmp_path):
    (png, svg) = plot_scheme(RopeConfig(), tmp_path, kinds=["heat_map"])
    with Image.open(png) as image:
        assert image.width > 400
        assert len(image.convert("RGB").getcolors(10**6)) > 20
    assert png.stat().st_size < 60_000
    text = svg.read_text()
    assert "position (tokens)" in text
    assert "<image" in text
    assert svg.stat().st_size < 100_000
    again = plot_scheme(RopeConfig(), tmp_path / "again", kinds=["heat_map"])
    assert [path.read_bytes() for path in again] == [png.read_bytes(), svg.read_bytes()]


def test_the_command_writes_the_files_it_prints(tmp_path, capsys):
    words = ["plot", "rope", "--option", "theta=500", "layout=half", "--kind", "decay,rotation", "--output"]
    assert main([*words, str(tmp_path)]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [str(tmp_path / f"rope_{kind}.{end}") for kind in ("decay", "rotation") for end in ("png", "svg")]
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 4


def test_the_command_lists_kinds_without_writing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "alibi", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == BIAS
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["alibi", "--kind", "bias_map,rotation"], "nothing to show"),
        (["alibi", "--kind", "heatmap"], "Did you mean 'heat_map'"),
        (["rope:rotary_dim=256"], "rotate 256 of 64"),
        (["alibi", "--option", "slope=1"], "Unknown option"),
        (["alibi", "--output", __file__], "is a file. Give the path of a folder"),
    ],
)
def test_the_command_says_why_it_cannot(words, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert reason in captured.err
    assert not list(tmp_path.iterdir())
