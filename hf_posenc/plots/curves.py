"""Figures of a comparison: losses while training, by length and by position, and the dog distance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.plots.style import line_style, new_figure, save_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = {"causal": "causal (Llama)", "masked": "masked (BERT)"}
_REFERENCE: dict[str, Any] = {"color": "0.45", "linestyle": (0, (2, 2)), "linewidth": 1.2, "zorder": 1}


def plot_comparison(results: dict[str, Any], folder: str | Path) -> list[Path]:
    """Draws every figure of a comparison as PNG and SVG, one panel per task.

    Args:
        results: the content of the `results.json` of `training/compare.py`.
        folder: where the files go.

    Returns:
        The files; none if no training has finished.
    """
    tasks = [task for task in _TITLES if _finished(results, task)]
    if not tasks:
        return []
    drawings: dict[str, Callable[[Axes, dict[str, Any], str], None]] = {
        "loss_curves": _draw_curves,
        "loss_by_length": _draw_lengths,
        "tail_loss_by_length": _draw_tails,
        "loss_by_position": _draw_positions,
        "dog_distance": _draw_dogs,
    }
    paths: list[Path] = []
    for name, draw in drawings.items():
        with styled():
            figure, panels = new_figure(len(tasks))
            for axes, task in zip(panels, tasks, strict=True):
                draw(axes, results, task)
                axes.set_title(_TITLES[task])
            handles: dict[str, Any] = {}
            for axes in panels:
                handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False)
            paths += save_figure(figure, Path(folder), name)
    return paths


def _finished(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return [
        training for training in results["trainings"] if training["task"] == task and training["status"] == "finished"
    ]


def _schemes(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(training["scheme"] for training in results["trainings"]))


def _draw_curves(axes: Axes, results: dict[str, Any], task: str) -> None:
    for training in _finished(results, task):
        curve = training["curve"]
        style = line_style(training["scheme"], _schemes(results))
        axes.plot(
            curve["step"],
            curve["validation_loss"],
            label=training["scheme"],
            markevery=_marked(results, training, len(curve["step"])),
            **style,
        )
    _unigram(axes, results)
    axes.set_xlabel("training step")
    axes.set_ylabel(f"validation loss at {results['lengths'][0]} tokens (nats)")


def _draw_lengths(axes: Axes, results: dict[str, Any], task: str) -> None:
    _draw_by_length(axes, results, task, "loss")
    axes.set_ylabel("mean loss (nats per token)")


def _draw_tails(axes: Axes, results: dict[str, Any], task: str) -> None:
    _draw_by_length(axes, results, task, "tail_loss")
    axes.set_ylabel(f"loss of the last {results['tail_tokens']} tokens (nats)")


def _draw_by_length(axes: Axes, results: dict[str, Any], task: str, key: str) -> None:
    lengths = results["lengths"]
    for training in _finished(results, task):
        style = line_style(training["scheme"], _schemes(results))
        axes.plot(lengths, _numbers(training["by_length"][key]), label=training["scheme"], **style)
    _unigram(axes, results)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel(f"evaluated length (trained on {lengths[0]})")


def _draw_positions(axes: Axes, results: dict[str, Any], task: str) -> None:
    for training in _finished(results, task):
        edges = training["by_length"]["position_edges"]
        middles = [(start + stop) / 2 for start, stop in itertools.pairwise(edges)]
        style = line_style(training["scheme"], _schemes(results))
        axes.plot(
            middles,
            _numbers(training["by_length"]["position_loss"]),
            label=training["scheme"],
            markevery=_marked(results, training, len(middles)),
            **style,
        )
    _unigram(axes, results)
    axes.axvspan(0, results["lengths"][0], color="0.95", zorder=0)
    axes.set_xlim(0, results["lengths"][-1])
    axes.set_xlabel("position in the sequence (grey: trained)")
    axes.set_ylabel("loss (nats per token)")


def _draw_dogs(axes: Axes, results: dict[str, Any], task: str) -> None:
    floor = 1e-8
    for training in _finished(results, task):
        if "error" in training["dog"]:
            continue
        heights = [max(distance, floor) for distance in training["dog"]["layers"]]
        style = line_style(training["scheme"], _schemes(results))
        axes.plot(range(len(heights)), heights, label=training["scheme"], **style)
    axes.axhspan(floor / 2, 1e-5, color="0.93", zorder=0)
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 4)
    axes.set_xticks(range(results["settings"]["num_layers"] + 1))
    axes.set_xlabel("layer (0: embeddings; grey: rounding)")
    axes.set_ylabel("distance of the two dogs (relative L2)")


def _unigram(axes: Axes, results: dict[str, Any]) -> None:
    axes.axhline(results["unigram_cross_entropy"], label="token frequencies", **_REFERENCE)


def _marked(results: dict[str, Any], training: dict[str, Any], points: int) -> tuple[int, int]:
    """Which points carry a marker: a few per line, and other ones on each line, so that equal lines can be told."""
    every = max(1, points // 4)
    place = _schemes(results).index(training["scheme"]) / len(_schemes(results))
    return int(place * every), every


def _numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
