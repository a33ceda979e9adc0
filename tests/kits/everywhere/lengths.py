"""One long prompt: llama.cpp with an exact cache and with its default one, and onnxruntime, beside transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.report import Record
from tests.kits.everywhere import in_transformers, text
from tests.kits.everywhere.decoders import CONTROL, compare_dense, compare_sparse, compared, predict_windows
from tests.kits.everywhere.launch import run_script
from tests.kits.everywhere.models import loaded, slug
from tests.kits.everywhere.plan import Plan, Variant
from tests.kits.everywhere.steps import Steps, file_name

#: llama.cpp by the precision of its cache. The default is float16, with flash attention.
_CACHES = {"llama.cpp, f32": True, "llama.cpp, f32, default cache": False}


def run_length(
    steps: Steps, source: Path, variant: Variant, places: Mapping[str, Path | None], length: int, plan: Plan
) -> list[Record]:
    """Reads the start of the speech, and compares the predictions at the last places.

    Args:
        steps: the work so far.
        source: the checkpoint of the variant.
        variant: which it is.
        places: the folders of its exports by format.
        length: tokens of the prompt that are read before the first prediction.
        plan: the sizes.
    """
    tokens = text.tokens_of(AutoTokenizer.from_pretrained(source), text.speech())
    count = plan.long_places
    task = {"windows": [tokens[: length + count]], "prompt": length, "places": count, "everywhere": False}
    settings = {"variant": asdict(variant), "task": task}
    name = f"{slug(variant)}-{length}"

    def make(stock: bool, place: Path) -> None:
        with loaded(source) as model:
            arrays = in_transformers.predictions(hf_posenc.unpatch_model(model) if stock else model, task)
        place.mkdir()
        np.save(place / "logprobs.npy", arrays["logprobs"])

    here = settings | {"machine": steps.machine}
    expected = np.load(steps.folder(f"reference-{name}", here, partial(make, False)) / "logprobs.npy")

    def sparse(file: Path, precise: bool) -> tuple[float, np.ndarray]:
        return compare_sparse(expected, predict_windows(file, task, precise=precise))

    def dense(run: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
        logprobs = run()
        return compare_dense(expected, logprobs), logprobs.argmax(-1)

    programs: dict[str, Callable[[], tuple[float, np.ndarray]]] = {}
    if (gguf := places["gguf, f32"]) is not None:
        for program, precise in _CACHES.items():
            programs[program] = partial(sparse, gguf / "model.gguf", precise)
    if (onnx := places["onnx"]) is not None:
        programs["onnxruntime"] = partial(dense, partial(_onnx, onnx, task))
    if variant.scheme:
        control = partial(steps.folder, f"control-{name}", here, partial(make, True))
        programs[CONTROL] = partial(dense, lambda: np.load(control() / "logprobs.npy"))

    def measure(program: str) -> list[Record]:
        gap, best = programs[program]()
        return compared(variant, {"tokens": length, "program": program}, gap, best == expected.argmax(-1))

    return [
        record
        for program in programs
        for record in steps.measured(f"length-{name}-{file_name(program)}", settings, partial(measure, program))
    ]


def _onnx(folder: Path, task: Mapping[str, Any]) -> np.ndarray:
    nothing = {"kind": "predict", "tokenizer": str(folder / "tokenizer.json"), "prompts": [], "greedy": 0, "ends": []}
    arrays, _ = run_script("in_onnxruntime.py", folder / "model.onnx", **task, **nothing)
    return arrays["logprobs"]
