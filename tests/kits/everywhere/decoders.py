"""Next tokens and greedy texts of exported decoders, beside those of the patched model in transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.export.gguf.run import Prediction, complete, predict
from hf_posenc.export.gguf.verify import token_differences
from hf_posenc.report import Record
from tests.kits.everywhere import in_transformers, text
from tests.kits.everywhere.launch import run_script
from tests.kits.everywhere.models import loaded, slug
from tests.kits.everywhere.plan import Plan, Variant
from tests.kits.everywhere.steps import Steps, file_name

#: llama.cpp's most probable tokens, whose probabilities are compared.
TOP = 4096
#: The program that every other one is compared with, and the same model with the positions of the stock model.
REFERENCE, CONTROL = "transformers with the plugin", "transformers, stock positions instead"
PLAIN = "transformers without the plugin"
#: What onnxruntime runs, by the name of the program.
ONNX = {"onnxruntime": "model.onnx", "onnxruntime, int8": "model_quantized.onnx"}


class Reference:
    """What the patched model computes in transformers.

    Args:
        arrays: of `in_transformers.predictions`.
        texts: of `in_transformers.greedy`.
        task: what was run.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], texts: Sequence[str], task: Mapping[str, Any]) -> None:
        self.arrays, self.texts, self.task = arrays, list(texts), dict(task)


def task_of(plan: Plan, tokenizer: Any) -> dict[str, Any]:
    """The task for the scripts: windows of the speech, and prompts."""
    tokens = text.tokens_of(tokenizer, text.speech())
    pieces = text.windows(tokens, plan.windows, plan.prompt + plan.places)
    return {
        "windows": pieces,
        "prompt": plan.prompt,
        "places": plan.places,
        "everywhere": True,
        "prompts": plan.prompts,
        "greedy": plan.greedy,
    }


def reference(steps: Steps, source: Path, variant: Variant, plan: Plan) -> tuple[Reference, list[Record]]:
    """Runs the model in transformers.

    Returns:
        What it computes, and how far the stock positions are from it: the size of an error that would not go unseen.
    """
    task = task_of(plan, AutoTokenizer.from_pretrained(source))

    def make(place: Path) -> None:
        with loaded(source) as model:
            arrays = in_transformers.predictions(model, task)
            texts = in_transformers.greedy(model, AutoTokenizer.from_pretrained(source), task)
            control = {}
            if variant.scheme:
                control = in_transformers.predictions(hf_posenc.unpatch_model(model), task)
        place.mkdir()
        np.savez(
            place / "arrays.npz",
            allow_pickle=False,
            **arrays,
            **{f"control_{name}": array for name, array in control.items()},
        )
        (place / "found.json").write_text(json.dumps(texts))

    settings = {"variant": asdict(variant), "task": task, "machine": steps.machine}
    place = steps.folder(f"reference-{slug(variant)}", settings, make)
    with np.load(place / "arrays.npz") as file:
        arrays = dict(file)
    control = {name.removeprefix("control_"): arrays.pop(name) for name in list(arrays) if name.startswith("control_")}
    computed = Reference(arrays, json.loads((place / "found.json").read_text()), task)
    records = [
        *_predictions(variant, REFERENCE, computed, arrays)[1:],
        *_texts(variant, REFERENCE, computed, computed.texts),
    ]
    if control:
        records += _predictions(variant, CONTROL, computed, control)
    return computed, records


def run_everywhere(
    steps: Steps, variant: Variant, places: Mapping[str, Path | None], expected: Reference
) -> list[Record]:
    """Runs the exports of a variant.

    Args:
        steps: the work so far.
        variant: which it is.
        places: the folders of its exports by format.
        expected: the model in transformers.
    """
    records: list[Record] = []
    settings = {"variant": asdict(variant), "task": expected.task}

    def measured(program: str, measure: Callable[[], list[Record]]) -> None:
        name = f"text-{slug(variant)}-{file_name(program)}"
        records.extend(steps.measured(name, settings, measure))

    if (stock := places["stock"]) is not None:
        measured(PLAIN, lambda: _script("in_transformers.py", stock, variant, PLAIN, expected))
    if (onnx := places["onnx"]) is not None:
        ends = _ends(onnx)
        for program, file in ONNX.items():
            extra = {"kind": "predict", "tokenizer": str(onnx / "tokenizer.json"), "ends": ends}
            run = partial(_script, "in_onnxruntime.py", onnx / file, variant, program, expected, **extra)
            measured(program, run)
    for form in ("f32", "q8_0"):
        if (gguf := places[f"gguf, {form}"]) is not None:
            program = f"llama.cpp, {form}"
            measured(program, partial(_llama, gguf / "model.gguf", variant, program, expected))
    return records


def _script(
    script: str, source: Path, variant: Variant, program: str, expected: Reference, **extra: Any
) -> list[Record]:
    arrays, others = run_script(script, source, **expected.task, **extra)
    return [*_predictions(variant, program, expected, arrays), *_texts(variant, program, expected, others["texts"])]


def _ends(folder: Path) -> list[int]:
    """The tokens that end a text, which the greedy texts leave out."""
    tokens = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return tokens if isinstance(tokens, list) else [tokens]


def _llama(file: Path, variant: Variant, program: str, expected: Reference) -> list[Record]:
    task, logprobs = expected.task, expected.arrays["logprobs"]
    gap, best = compare_sparse(logprobs, predict_windows(file, task, precise=True))
    completions = complete(file, task["prompts"], task["greedy"], context=task["greedy"] + 64, precise=True)
    return [
        *compared(variant, {"program": program}, gap, best == logprobs.argmax(-1)),
        *_texts(variant, program, expected, [completion.text for completion in completions]),
    ]


def predict_windows(file: Path, task: Mapping[str, Any], *, precise: bool) -> list[list[Prediction]]:
    """llama.cpp's predictions at the places of each window."""
    prompt, end = task["prompt"], task["prompt"] + task["places"] - 1
    prompts = [window[:prompt] for window in task["windows"]]
    following = [window[prompt:end] for window in task["windows"]]
    context = end + 8
    return predict(file, prompts, task["places"], TOP, context, following=following, precise=precise)


def compare_sparse(expected: np.ndarray, predicted: Sequence[Sequence[Prediction]]) -> tuple[float, np.ndarray]:
    """The largest difference of a probability, and llama.cpp's most probable tokens, `(windows, places)`.

    Args:
        expected: log-probabilities, `(windows, places, vocabulary)`.
        predicted: llama.cpp's predictions, by window and place.
    """
    top = min(TOP, expected.shape[-1])
    gaps = [
        token_differences(torch.from_numpy(logprobs), torch.tensor(step.ids[:top]), torch.tensor(step.logprobs[:top]))[
            "probabilities"
        ]
        for window, predictions in zip(expected, predicted, strict=True)
        for logprobs, step in zip(window, predictions, strict=True)
    ]
    return max(gaps), np.array([[step.ids[0] for step in predictions] for predictions in predicted])


def compare_dense(expected: np.ndarray, computed: np.ndarray) -> float:
    """The largest difference of a probability, of log-probabilities of all tokens."""
    return float(np.abs(np.exp(computed) - np.exp(expected)).max())


def compared(
    variant: Variant, at: Mapping[str, Any], gap: float, equal: np.ndarray, places: int | None = None
) -> list[Record]:
    """How far probabilities are from those of the reference, and how often the most probable token is the same.

    Args:
        variant: which it is.
        at: of the records.
        gap: the largest difference of a probability.
        equal: by place, whether the most probable token is the same.
        places: of the probabilities, if they are fewer.
    """
    shown = f"{int(equal.sum())} of {equal.size}"
    return [
        Record(variant.name, "probability", gap, at, count=equal.size if places is None else places),
        Record(variant.name, "agreement", float(equal.mean()), at, count=equal.size, shown=shown),
    ]


def _predictions(variant: Variant, program: str, expected: Reference, arrays: Mapping[str, np.ndarray]) -> list[Record]:
    """The largest difference of a probability at the places; the best tokens and the perplexity everywhere."""
    at = {"program": program}
    gap = compare_dense(expected.arrays["logprobs"], arrays["logprobs"])
    equal = arrays["best"] == expected.arrays["best"]
    places = int(np.prod(arrays["logprobs"].shape[:2]))
    perplexity = math.exp(-float(arrays["next"].mean()))
    return [
        *compared(variant, at, gap, equal, places),
        Record(variant.name, "perplexity", perplexity, at, count=equal.size, shown=f"{perplexity:.2f}"),
    ]


def _texts(variant: Variant, program: str, expected: Reference, texts: Sequence[str]) -> list[Record]:
    equal = [written == reference_text for written, reference_text in zip(texts, expected.texts, strict=True)]
    at = {"program": program}
    details = {"texts": list(texts), "prompts": list(expected.task["prompts"])}
    shown = f"{sum(equal)} of {len(equal)}"
    return [Record(variant.name, "greedy", sum(equal) / len(equal), at, shown=shown, details=details)]
