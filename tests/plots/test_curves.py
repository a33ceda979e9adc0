"""Which lines are drawn as one."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from hf_posenc.plots.curves import Curve, draw_curves

X = [64, 128, 256]


def drawn(curves: dict[str, Curve], **limits: float) -> list[str]:
    figure, axes = plt.subplots()
    draw_curves(axes, curves, list(curves), **limits)
    plt.close(figure)
    return [str(line.get_label()) for line in axes.get_lines()]


def test_lines_that_coincide_are_one_line_with_both_names() -> None:
    curves = {"rope": Curve(X, [1.48, 1.62, 2.49]), "p_rope": Curve(X, [1.479, 1.62, 2.49])}
    assert drawn(curves | {"none": Curve(X, [2.2, 2.3, 2.4])}) == ["rope, p_rope", "none"]


@pytest.mark.parametrize("limits", [{"ceiling": 5.0}, {}], ids=["clipped", "whole"])
def test_a_value_far_away_does_not_join_the_others(limits: dict[str, float]) -> None:
    curves = {
        "alibi": Curve(X, [2.0, 2.0, 2.0]),
        "t5": Curve(X, [2.0, 2.3, 2.9]),
        "rope": Curve(X, [2.0, 60.0, 400.0]),
    }
    assert drawn(curves, **limits) == ["alibi", "t5", "rope"]


def test_lines_with_different_bands_stay_apart() -> None:
    curves = {
        "alibi": Curve(X, [2.0, 2.1, 2.4], [1.99, 2.09, 2.39], [2.01, 2.11, 2.41]),
        "t5": Curve(X, [2.0, 2.1, 2.4], [1.0, 1.1, 1.4], [3.0, 3.1, 3.4]),
    }
    assert drawn(curves) == ["alibi", "t5"]
