import pytest

from hf_posenc.report import Record, Result, Subject

pytest.importorskip("matplotlib")
from hf_posenc.plots.dog import FLOOR, plot_dog


def result(causal: bool = False, **distances: list[float]) -> Result:
    """The distances of each scheme: that of the probe, then those of the layers; none for one that has an error."""
    records = []
    for label, (probe, *layers) in distances.items():
        records += [Record(label, "relative_l2", value, {"layer": layer}) for layer, value in enumerate(layers)]
        records += [Record(label, "probe", probe)] if layers else []
    return Result(
        task="dog",
        title="",
        quantities=(),
        subjects=tuple(
            Subject(label, label, error=None if len(given) > 1 else "-") for label, given in distances.items()
        ),
        records=tuple(records),
        views=(),
        settings={
            "model": "BertModel",
            "sentence": "The dog chased another dog",
            "word": "dog",
            "causal": causal,
            "tolerance": 1e-5,
        },
    )


def test_lines_hold_the_distances(tmp_path):
    path = tmp_path / "dog.png"
    figure = plot_dog(result(causal=True, rope=[0.1, 0.0, 0.2, 0.3], none=[0.0, 0.0, 0.0, 1e-7]), path)
    layers_axes, probe_axes = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in layers_axes.get_lines()}
    assert lines["rope"] == [FLOOR, 0.2, 0.3]
    assert lines["none"] == [FLOOR, FLOOR, 1e-7]
    assert [line.get_ydata()[0] for line in probe_axes.get_lines()] == [0.1, FLOOR]
    assert path.stat().st_size > 1000


def test_only_a_causal_model_needs_the_attention_without_a_mask():
    assert len(plot_dog(result(rope=[0.1, 0.0, 0.2])).axes) == 1


def test_lines_that_coincide_are_drawn_once_with_both_names():
    figure = plot_dog(result(rope=[0.1, 0.0, 0.2], native=[0.1, 0.0, 0.2], alibi=[0.1, 0.0, 0.01]))
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["rope, native", "alibi"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["alibi", "rope, native"]


def test_schemes_that_could_not_be_applied_are_left_out():
    figure = plot_dog(result(rope=[0.1, 0.1], alibi=[0.0]))
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["rope"]


def test_a_result_without_a_single_number_is_refused():
    with pytest.raises(ValueError, match="none of the schemes"):
        plot_dog(result(alibi=[0.0]))
