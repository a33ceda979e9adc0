import pytest

from hf_posenc.metrics import DogResult, DogRow, LayerDistance

pytest.importorskip("matplotlib")
from hf_posenc.plots.dog import FLOOR, plot_dog


def result(*rows: DogRow) -> DogResult:
    return DogResult(
        model="BertModel",
        sentence="The dog chased another dog",
        word="dog",
        tokens=("the", "dog"),
        first=(1,),
        second=(4,),
        causal=False,
        probe_without_positions=0.0,
        rows=rows,
    )


def row(name: str, *distances: float, probe: float | None = 0.1, error: str | None = None) -> DogRow:
    layers = tuple(LayerDistance(layer, value, value**2) for layer, value in enumerate(distances))
    return DogRow(name, None, layers, probe, tolerance=1e-5, causal=False, label=name, error=error)


def test_lines_hold_the_distances(tmp_path):
    path = tmp_path / "dog.png"
    figure = plot_dog(result(row("rope", 0.0, 0.2, 0.3), row("none", 0.0, 0.0, 1e-7, probe=0.0)), path)
    layers_axes, probe_axes = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in layers_axes.get_lines()}
    assert lines["rope"] == [FLOOR, 0.2, 0.3]
    assert lines["none"] == [FLOOR, FLOOR, 1e-7]
    assert [line.get_ydata()[0] for line in probe_axes.get_lines()] == [0.1, FLOOR]
    assert path.stat().st_size > 1000


def test_schemes_that_could_not_be_applied_are_left_out():
    figure = plot_dog(result(row("rope", 0.1), row("alibi", probe=None, error="no logits")))
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["rope"]


def test_a_result_without_a_single_number_is_refused():
    with pytest.raises(ValueError, match="none of the schemes"):
        plot_dog(result(row("alibi", probe=None, error="no logits")))
