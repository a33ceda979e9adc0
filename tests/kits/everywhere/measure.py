"""Every step, in order, and the result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from benchmarks.errors import BenchmarkError
from benchmarks.llama_cpp import PHASES, measure as measured_in_rounds
from benchmarks.timing import quartiles
from hf_posenc.export.onnx import Session
from hf_posenc.report import Record, Result, Subject
from tests.kits.everywhere import programs
from tests.kits.everywhere.models import FORMATS, HEALING, checkpoint, export, loaded
from tests.kits.everywhere.page import QUANTITIES
from tests.kits.everywhere.plan import Plan, Variant
from tests.kits.everywhere.programs import DEFAULT_CACHE, ONNX
from training.data.loading import packaged_folder

_PACKAGES = ("torch", "transformers", "onnxruntime", "xllamacpp", "gguf")
#: The longest text of the corpus.
SPEECH = "1981-Carter-1.txt"
#: The program that every other one is compared with, and the same model with the positions of the stock model.
REFERENCE, CONTROL = "transformers with the plugin", "transformers, stock positions instead"
PLAIN = "transformers without the plugin"
#: The export that a program runs.
EXPORTS = {
    PLAIN: "stock", **dict.fromkeys(ONNX, "onnx"), "llama.cpp, f32": "gguf, f32", "llama.cpp, q8_0": "gguf, q8_0",
    DEFAULT_CACHE: "gguf, f32",
}  # fmt: skip
#: The programs that read one long prompt. All but the default cache read the pieces of a text.
_OF_LONG = ("llama.cpp, f32", DEFAULT_CACHE, "onnxruntime")
_TIMED = ("llama.cpp, q8_0", "llama.cpp, f32", "onnxruntime")
#: The folders of the exports of a variant, by format.
Places = Mapping[str, Path | None]


def measure(plan: Plan, work: Path, machine: Mapping[str, Any], bases: Mapping[str, Path], command: str) -> Result:
    """Makes the models and exports that are missing, and measures.

    Args:
        machine: of `describe_machine`.
        bases: the checkpoints of the stock models, "smollm2" and "minilm".
        command: the command line, for the page.
    """
    records: list[Record] = []
    exports: dict[str, Places] = {}
    sources: dict[str, Path] = {}
    tokens = {model: speech_tokens(base) for model, base in bases.items()}

    def exported(variant: Variant, model: str, forms: Sequence[str]) -> Places:
        made = {form: export(work, machine, sources[variant.name], variant, model, form) for form in forms}
        records.extend(record for _, record in made.values())
        return {form: place for form, (place, _) in made.items()}

    for variant in plan.decoders:
        sources[variant.name] = checkpoint(work, bases["smollm2"], variant, "smollm2")
        exports[variant.name] = exported(variant, "smollm2", list(FORMATS))
        pieces = windows(tokens["smollm2"], plan.windows, plan.prompt + plan.places)
        records += decoded(variant, sources[variant.name], exports[variant.name], plan, pieces)
    decoders = dict(sources)
    for variant in plan.encoders:
        sources[variant.name] = checkpoint(work, bases["minilm"], variant, "minilm")
        place = exported(variant, "minilm", ["onnx"])["onnx"]
        if place is not None:
            records += embedded(variant, sources[variant.name], place, plan, tokens["minilm"])
    for name, lengths in plan.long.items():
        for length in lengths:
            piece = [tokens["smollm2"][: length + plan.long_places]]
            records += decoded(plan.decoder(name), decoders[name], exports[name], plan, piece, length)
    records += timed(exports, tokens["smollm2"][: plan.timed_prompt], plan)
    schemes = {named.name: named.scheme or "native" for named in (*plan.encoders, *plan.decoders)}
    labels = dict.fromkeys([named.name for named in (*plan.decoders, *plan.encoders)])
    labels |= dict.fromkeys(record.subject for record in records)
    settings: dict[str, Any] = {
        "command": command, "machine": dict(machine), "versions": {name: version(name) for name in _PACKAGES},
        "plan": asdict(plan), "healing": list(HEALING), "text": SPEECH,
    }  # fmt: skip
    subjects = tuple(Subject(label, schemes.get(label, "native")) for label in labels)
    return Result("everywhere", "", QUANTITIES, subjects, tuple(records), (), settings)


def speech_tokens(source: Path) -> list[int]:
    """The ids of a speech without special tokens, by the tokenizer of a checkpoint."""
    speech = (packaged_folder() / SPEECH).read_text(encoding="utf-8")
    ids: list[int] = AutoTokenizer.from_pretrained(source)(speech, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def windows(tokens: list[int], count: int, length: int) -> list[list[int]]:
    """Pieces of one length, spread over a text."""
    if len(tokens) < count * length:
        raise BenchmarkError(f"The text has {len(tokens)} tokens, too few for {count} pieces of {length}.")
    starts = [index * (len(tokens) - length) // max(1, count - 1) for index in range(count)]
    return [tokens[start : start + length] for start in starts]


def decoded(
    variant: Variant, source: Path, exports: Places, plan: Plan, pieces: list[list[int]], long: int | None = None
) -> Iterator[Record]:
    """Compares next tokens and greedy texts of a variant in all programs with those in transformers.

    Args:
        long: the number of tokens of one long prompt, without greedy texts; `None` for the pieces of a text.
    """
    model = loaded(source, "smollm2")
    prompt, last = (plan.prompt, 0) if long is None else (long, plan.long_places)
    prompts, places = (plan.prompts, plan.places) if long is None else ((), plan.long_places)
    start = partial(programs.in_transformers, model)
    wanted = programs.predictions(start, pieces, len(pieces[0]), last)
    texts = programs.written(start, prompts, plan.greedy, source)

    def compared(program: str, found: Sequence[Tensor], greedy: Sequence[str]) -> Iterator[Record]:
        at = {"program": program} if long is None else {"tokens": long, "program": program}
        gaps = [
            (one[-places:].exp() - other[-places:].exp()).abs().max() for one, other in zip(found, wanted, strict=True)
        ]
        if program != REFERENCE:
            yield Record(variant.name, "probability", float(max(gaps)), at, count=len(pieces) * places)
        if program != REFERENCE or long is None:
            equal = programs.agreement(found, wanted)
            shown = f"{int(equal.sum())} of {equal.size}"
            yield Record(variant.name, "agreement", float(equal.mean()), at, count=equal.size, shown=shown)
        if len(found[0]) == len(pieces[0]) - 1 and long is None:
            following = [
                rows.gather(-1, torch.tensor(piece[1:])[:, None]) for rows, piece in zip(found, pieces, strict=True)
            ]
            perplexity = math.exp(-float(torch.cat(following).mean()))
            yield Record(variant.name, "perplexity", perplexity, at, count=equal.size, shown=f"{perplexity:.2f}")
        if greedy:
            same = sum(text == other for text, other in zip(greedy, texts, strict=True))
            details = {"texts": list(greedy), "prompts": list(prompts)}
            shown = f"{same} of {len(texts)}"
            yield Record(variant.name, "greedy", same / len(texts), at, shown=shown, details=details)

    yield from compared(REFERENCE, wanted, texts)
    if variant.scheme:
        hf_posenc.unpatch_model(model)
        yield from compared(CONTROL, programs.predictions(start, pieces, len(pieces[0]), last), ())
    del model
    for program, form in EXPORTS.items():
        place = exports[form]
        if place is None or (program not in _OF_LONG if long else program == DEFAULT_CACHE):
            continue
        if program in ONNX or program == PLAIN:
            if program == PLAIN:
                plain = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
                reader: Any = partial(programs.in_transformers, plain)
            else:
                reader = partial(programs.in_onnxruntime, Session(place / ONNX[program]))
            found = programs.predictions(reader, pieces, prompt, last)
            greedy = programs.written(reader, prompts, plan.greedy, place)
        else:
            precise = program != DEFAULT_CACHE
            found = programs.of_llama_cpp(place, pieces, prompt, wanted[0].shape[-1], precise=precise)
            greedy = programs.written_by_llama_cpp(place, prompts, plan.greedy) if prompts else []
        yield from compared(program, found, greedy)


@torch.no_grad()
def embedded(variant: Variant, source: Path, onnx: Path, plan: Plan, tokens: list[int]) -> Iterator[Record]:
    """Embeds passages of the speech, as one padded batch, in transformers and in onnxruntime."""
    model = loaded(source, "minilm")
    native = model.config.max_position_embeddings
    # The stock model has a table of this length. What replaces it has no end.
    lengths = [length for length in plan.passages if variant.scheme or length <= native]
    starts = torch.linspace(0, len(tokens) - max(lengths), len(lengths)).int().tolist()
    passages = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def run(inputs: dict[str, Tensor]) -> Tensor:
        states: Tensor = model(**inputs).last_hidden_state
        return states

    def compared(program: str, computed: Tensor, wanted: Tensor, longest: int) -> Iterator[Record]:
        at, count, cosine = {"program": program}, len(wanted), float((wanted * computed).sum(-1).min())
        yield Record(variant.name, "embedding_difference", float((wanted - computed).abs().max()), at, count=count)
        yield Record(variant.name, "cosine", cosine, at, count=count, shown=f"{cosine:.6f}")
        yield Record(variant.name, "longest", longest, at, count=count)

    expected = programs.embeddings(run, passages)
    if variant.scheme:
        hf_posenc.unpatch_model(model)
        short = [passage for passage in passages if len(passage) <= native]
        kept = expected[torch.tensor([passage in short for passage in passages])]
        yield from compared(CONTROL, programs.embeddings(run, short), kept, max(map(len, short)))
    for program, file in ONNX.items():
        session = Session(onnx / file)
        computed = programs.embeddings(partial(_states, session), passages)
        yield from compared(program, computed, expected, max(lengths))


def _states(session: Session, inputs: dict[str, Tensor]) -> Tensor:
    return session(inputs, [])["last_hidden_state"]


def timed(exports: Mapping[str, Places], prompt: Sequence[int], plan: Plan) -> Iterator[Record]:
    """Times the exports of all variants, and those of the first one for comparison."""
    for program in _TIMED:
        places = {name: place for name, forms in exports.items() if (place := forms[EXPORTS[program]]) is not None}
        runs = {name: partial(programs.times, program, place) for name, place in places.items()}
        times = measured_in_rounds(partial(_run, runs, prompt, plan.timed_steps), list(runs), plan.rounds)
        first = times[next(iter(runs))]
        for name, by_phase in times.items():
            for phase in PHASES:
                ratios, time = quartiles(by_phase[phase], first[phase]), statistics.median(by_phase[phase])
                shown = "{median:.2f} ({low:.2f} to {high:.2f})".format(**ratios)
                middle, count, at = ratios.pop("median"), plan.rounds, {"program": program}
                yield Record(name, f"{phase}_ms", time, at, count=count, shown=f"{time:.2f}")
                yield Record(name, f"{phase}_ratio", middle, at, count=count, shown=shown, details=ratios)


def _run(runs: Mapping[str, Any], prompt: Sequence[int], steps: int, name: str) -> Mapping[str, float]:
    found: Mapping[str, float] = runs[name](prompt, steps)
    return found
