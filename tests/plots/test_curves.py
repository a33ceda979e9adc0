"""The lines of a comparison: which are drawn as one, where they are, and how they are named."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from hf_posenc.plots.curves import Curve, draw_curves
from hf_posenc.plots.dog import FLOOR, plot_dog
from hf_posenc.report import Record, Result, Subject

X = [64, 128, 256]


@pytest.mark.parametrize(
    ("curves", "drawn"),
    [
        (
            {"rope": [[1.48, 1.62, 2.49]], "p_rope": [[1.479, 1.62, 2.49]], "none": [[2.2, 2.3, 2.4]]},
            ["rope, p_rope", "none"],
        ),
        # A value far away does not join the others.
        ({"alibi": [[2, 2, 2]], "t5": [[2, 2.3, 2.9]], "rope": [[2, 60, 400]]}, ["alibi", "t5", "rope"]),
        # Neither do lines with different bands.
        (
            {
                "alibi": [[2, 2.1, 2.4], [1.99, 2.09, 2.39], [2.01, 2.11, 2.41]],
                "t5": [[2, 2.1, 2.4], [1, 1.1, 1.4], [3, 3.1, 3.4]],
            },
            ["alibi", "t5"],
        ),
    ],
)
@pytest.mark.parametrize("limits", [{"ceiling": 5.0}, {}], ids=["clipped", "whole"])
def test_lines_that_coincide_are_one_line_with_both_names(curves, drawn, limits) -> None:
    figure, axes = plt.subplots()
    draw_curves(axes, {label: Curve(X, *heights) for label, heights in curves.items()}, list(curves), **limits)
    plt.close(figure)
    assert [line.get_label() for line in axes.get_lines()] == drawn


def dog_result(causal: bool = False, **distances: list[float]) -> Result:
    """The distances of each scheme: that of the probe, then those of the layers; none for one that has an error."""
    records = []
    for label, (probe, *layers) in distances.items():
        records += [Record(label, "relative_l2", value, {"layer": layer}) for layer, value in enumerate(layers)]
        records += [Record(label, "probe", probe)] if layers else []
    subjects = [Subject(label, label, error=None if len(given) > 1 else "-") for label, given in distances.items()]
    settings = {"model": "BertModel", "sentence": "dog dog", "word": "dog", "causal": causal, "tolerance": 1e-5}
    return Result("dog", "", (), tuple(subjects), tuple(records), (), settings)


def test_the_lines_of_the_dog_test_hold_its_distances(tmp_path):
    path = tmp_path / "dog.png"
    layers_axes, probe_axes = plot_dog(
        dog_result(True, rope=[0.1, 0.0, 0.2, 0.3], none=[0.0, 0.0, 0.0, 1e-7], alibi=[0.0]), path
    ).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in layers_axes.get_lines()}
    # A scheme that could not be applied is left out.
    assert lines == {"rope": [FLOOR, 0.2, 0.3], "none": [FLOOR, FLOOR, 1e-7]}
    assert [line.get_ydata()[0] for line in probe_axes.get_lines()] == [0.1, FLOOR]
    assert path.stat().st_size > 1000


def test_names_stand_beside_the_lines_from_low_to_high_and_an_encoder_needs_no_second_panel():
    figure = plot_dog(dog_result(rope=[0.1, 0.0, 0.2], native=[0.1, 0.0, 0.2], alibi=[0.1, 0.0, 0.01]))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["alibi", "rope, native"]
    with pytest.raises(ValueError, match="none of the schemes"):
        plot_dog(dog_result(alibi=[0.0]))
