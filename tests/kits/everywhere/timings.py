"""Time per token of the exports in llama.cpp and onnxruntime, beside that of the stock model's export."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.llama_cpp import PHASES, measure, timed
from benchmarks.timing import quartiles
from hf_posenc.report import Record
from tests.kits.everywhere.launch import run_script
from tests.kits.everywhere.plan import Plan

#: Runs an export on a prompt, and returns its times by phase.
Run = Callable[[Path, Sequence[int], int], dict[str, float]]


def run_timings(exports: Mapping[str, Mapping[str, Path | None]], tokens: Sequence[int], plan: Plan) -> list[Record]:
    """Times every export that exists.

    Args:
        exports: folders by variant and format. The first variant is what the others are divided by.
        tokens: of a text.
        plan: the sizes.
    """
    programs: dict[str, tuple[str, Run]] = {
        "llama.cpp, q8_0": ("gguf, q8_0", _llama),
        "llama.cpp, f32": ("gguf, f32", _llama),
        "onnxruntime": ("onnx", _onnx),
    }
    prompt = list(tokens[: plan.timed_prompt])
    records: list[Record] = []
    for program, (form, run) in programs.items():
        runs = {
            name: partial(run, place, prompt, plan.timed_steps)
            for name, by_format in exports.items()
            if (place := by_format[form]) is not None
        }
        times = _times(runs, plan.rounds)
        first = times[next(iter(runs))]
        for name, by_phase in times.items():
            for phase in PHASES:
                records += _records(name, program, phase, by_phase[phase], first[phase])
    return records


def _times(runs: Mapping[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, list[float]]]:
    return measure(lambda name: runs[name](), list(runs), rounds)


def _llama(folder: Path, prompt: Sequence[int], steps: int) -> dict[str, float]:
    return timed(folder / "model.gguf", prompt, steps)


def _onnx(folder: Path, prompt: Sequence[int], steps: int) -> dict[str, float]:
    task = {"kind": "time", "windows": [prompt], "greedy": steps}
    times: dict[str, float] = run_script("in_onnxruntime.py", folder / "model.onnx", **task)[1]["times"]
    return times


def _records(name: str, program: str, phase: str, times: list[float], first: list[float]) -> list[Record]:
    at = {"program": program}
    ratios, time = quartiles(times, first), statistics.median(times)
    shown = "{median:.2f} ({low:.2f} to {high:.2f})".format(**ratios)
    middle = ratios.pop("median")
    return [
        Record(name, f"{phase}_ms", time, at, count=len(times), shown=f"{time:.2f}"),
        Record(name, f"{phase}_ratio", middle, at, count=len(times), shown=shown, details=ratios),
    ]
