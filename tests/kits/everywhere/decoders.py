"""Next tokens and greedy texts of exported decoders, beside those of the patched model in transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.export.gguf.run import decode, tokenize
from hf_posenc.report import Record
from tests.kits.everywhere import in_transformers, text
from tests.kits.everywhere.launch import run_script
from tests.kits.everywhere.models import loaded
from tests.kits.everywhere.plan import Plan, Variant

#: The program that every other one is compared with, and the same model with the positions of the stock model.
REFERENCE, CONTROL = "transformers with the plugin", "transformers, stock positions instead"
PLAIN = "transformers without the plugin"
#: What onnxruntime runs, by the name of the program.
ONNX = {"onnxruntime": "model.onnx", "onnxruntime, int8": "model_quantized.onnx"}
#: llama.cpp's own cache is float16, with flash attention.
DEFAULT_CACHE = "llama.cpp, f32, default cache"
#: The export that a program runs.
_EXPORTS = {
    PLAIN: "stock", **dict.fromkeys(ONNX, "onnx"), "llama.cpp, f32": "gguf, f32", "llama.cpp, q8_0": "gguf, q8_0",
    DEFAULT_CACHE: "gguf, f32",
}  # fmt: skip
#: The programs that read one long prompt. All but the default cache read the pieces of a text.
_OF_LONG = ("llama.cpp, f32", DEFAULT_CACHE, "onnxruntime")


@dataclass(frozen=True)
class Task:
    """What a decoder reads and writes.

    Args:
        given: for the scripts: "windows", "prompt", "places", "everywhere", "prompts" and "greedy".
        length: of one long prompt; `None` for pieces of a text, and prompts.
    """

    given: Mapping[str, Any]
    length: int | None = None

    @classmethod
    def of(cls, plan: Plan, source: Path, length: int | None = None) -> Task:
        """Windows of the speech and prompts, or the start of the speech."""
        tokens = text.speech_tokens(source)
        if length is None:
            windows = text.windows(tokens, plan.windows, plan.prompt + plan.places)
            sizes, writing = (plan.prompt, plan.places), (plan.prompts, plan.greedy)
        else:
            windows = [tokens[: length + plan.long_places]]
            sizes, writing = (length, plan.long_places), ((), 0)
        named = dict(zip(("prompt", "places", "prompts", "greedy"), (*sizes, *writing), strict=True))
        return cls({"windows": windows, "everywhere": length is None, **named}, length)

    def at(self, program: str) -> dict[str, Any]:
        """Where the records of a program stand."""
        return {"program": program} if self.length is None else {"tokens": self.length, "program": program}


@dataclass(frozen=True)
class Reference:
    """What the patched model computes in transformers.

    Args:
        arrays: of `in_transformers.predictions`.
        texts: of `in_transformers.greedy`.
        task: what was run.
    """

    arrays: Mapping[str, np.ndarray]
    texts: Sequence[str]
    task: Task


def reference(source: Path, variant: Variant, task: Task) -> tuple[Reference, list[Record]]:
    """Runs the model in transformers.

    Returns:
        What it computes, and how far the stock positions are from it: the size of an error that would not go unseen.
    """
    given = dict(task.given)
    with loaded(source) as model:
        arrays = in_transformers.predictions(model, given)
        texts = in_transformers.greedy(model, AutoTokenizer.from_pretrained(source), given)
        control = in_transformers.predictions(hf_posenc.unpatch_model(model), given) if variant.scheme else {}
    computed = Reference(arrays, texts, task)
    records = _texts(variant, REFERENCE, computed, computed.texts)
    if task.length is None:
        records = [*_predictions(variant, REFERENCE, computed, arrays)[1:], *records]
    if control:
        records += _predictions(variant, CONTROL, computed, control)
    return computed, records


def run_everywhere(variant: Variant, places: Mapping[str, Path | None], expected: Reference) -> list[Record]:
    """Runs the exports of a variant.

    Args:
        variant: which it is.
        places: the folders of its exports by format.
        expected: the model in transformers.
    """
    long = expected.task.length is not None
    records: list[Record] = []
    for program in _OF_LONG if long else [name for name in _EXPORTS if name != DEFAULT_CACHE]:
        if (place := places[_EXPORTS[program]]) is not None:
            records += _run(program, place, variant, expected)
    return records


def _run(program: str, place: Path, variant: Variant, expected: Reference) -> list[Record]:
    """What a program makes of an export."""
    given = dict(expected.task.given)
    if program == PLAIN:
        arrays, others = run_script("in_transformers.py", place, **given)
    elif program in ONNX:
        extra = {"kind": "predict", "tokenizer": str(place / "tokenizer.json"), "ends": _ends(place)}
        arrays, others = run_script("in_onnxruntime.py", place / ONNX[program], **given, **extra)
    else:
        return _llama(place / "model.gguf", program, variant, expected)
    return [*_predictions(variant, program, expected, arrays), *_texts(variant, program, expected, others["texts"])]


def _ends(folder: Path) -> list[int]:
    """The tokens that end a text, which the greedy texts leave out."""
    tokens = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return tokens if isinstance(tokens, list) else [tokens]


def _llama(file: Path, program: str, variant: Variant, expected: Reference) -> list[Record]:
    task, vocabulary = expected.task.given, expected.arrays["logprobs"].shape[-1]
    prompt, end = task["prompt"], task["prompt"] + task["places"] - 1
    windows = [[window[:prompt], *([token] for token in window[prompt:end])] for window in task["windows"]]
    logits = torch.stack(decode(file, windows, precise=program != DEFAULT_CACHE))
    logprobs = logits.log_softmax(-1)[..., :vocabulary].numpy()
    records = _predictions(variant, program, expected, {"logprobs": logprobs})
    if not task["prompts"]:
        return records
    prompts = [[ids] for ids in tokenize(file, task["prompts"])]
    tokenizer = AutoTokenizer.from_pretrained(file.parent)
    written = decode(file, prompts, task["greedy"] - 1, without=[tokenizer.eos_token_id])
    texts = tokenizer.batch_decode([rows.argmax(-1).tolist() for rows in written])
    return [*records, *_texts(variant, program, expected, texts)]


def _predictions(variant: Variant, program: str, expected: Reference, arrays: Mapping[str, np.ndarray]) -> list[Record]:
    """How far predictions are from those of the reference, at the places or everywhere; the perplexity where known.

    Args:
        variant: which it is.
        program: what made the predictions.
        expected: the model in transformers.
        arrays: as those of the reference; without "best" and "next" from a program that predicts at the places only.
    """
    at, wanted = expected.task.at(program), expected.arrays
    logprobs = arrays["logprobs"]
    gap = float(np.abs(np.exp(logprobs) - np.exp(wanted["logprobs"])).max())
    if "next" in arrays:
        equal = arrays["best"] == wanted["best"]
    else:
        equal = logprobs.argmax(-1) == wanted["logprobs"].argmax(-1)
    shown = f"{int(equal.sum())} of {equal.size}"
    records = [
        Record(variant.name, "probability", gap, at, count=int(np.prod(logprobs.shape[:2]))),
        Record(variant.name, "agreement", float(equal.mean()), at, count=equal.size, shown=shown),
    ]
    if "next" in arrays:
        perplexity = math.exp(-float(arrays["next"].mean()))
        records.append(Record(variant.name, "perplexity", perplexity, at, count=equal.size, shown=f"{perplexity:.2f}"))
    return records


def _texts(variant: Variant, program: str, expected: Reference, texts: Sequence[str]) -> list[Record]:
    if not texts:
        return []
    equal = [written == reference_text for written, reference_text in zip(texts, expected.texts, strict=True)]
    details = {"texts": list(texts), "prompts": list(expected.task.given["prompts"])}
    shown = f"{sum(equal)} of {len(equal)}"
    at = expected.task.at(program)
    return [Record(variant.name, "greedy", sum(equal) / len(equal), at, shown=shown, details=details)]
