"""The target "gguf": one file for llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.export.gguf.carriers import CARRIERS, refuse_other_blocks
from hf_posenc.export.gguf.file import PRECISIONS, write_file
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.gelu import silent_activations, without_activations
from hf_posenc.export.gguf.parts import parts_of
from hf_posenc.export.gguf.run import runtime
from hf_posenc.export.gguf.verify import Difference, compare
from hf_posenc.export.gguf.vocabulary import vocabulary
from hf_posenc.export.records import Check, Written
from hf_posenc.export.refusal import ExportError
from hf_posenc.export.request import Request
from hf_posenc.export.samples import float32_reference

#: Name of the file.
FILE = "model.gguf"
#: Largest accepted differences of logits and of probabilities. In float32, the programs differ in the order of sums and
#: in llama.cpp's angles, which it computes by repeated multiplication.
_EXACT = Difference(1e-4, 1e-3)
#: The same for models with GELU. llama.cpp rounds each argument and value to 11 bits, which is off by up to 5e-4 of the
#: value, and its form of GELU differs by up to 5e-4 from the other one. Random models with 2 to 12 layers differ by up
#: to 1.2e-3, also without positions. This limit hides small errors, so all but the activations must agree to `_EXACT`.
_GELU = Difference(1e-2, 1e-2)
#: The end of a mode that compares all but the activations.
_WITHOUT = ", without GELU"
#: The same for rounded weights. A position encoding that is lost or wrong changes more (see tests/export/test_gguf.py),
#: and is found before, because the carrier is first compared in float32.
_ROUNDED = {"f16": Difference(1e-2, 1e-2), "q8_0": Difference(0.25, 0.15)}


def write(request: Request, *, dtype: str = "f32") -> Written:
    """Writes `model.gguf`, which llama.cpp runs without this package.

    The carriers are tried in order. Each file is run in llama.cpp with float32 weights and a float32 cache, and must
    give the model's logits and probabilities, for prompts of several lengths and while decoding. A model with GELU is
    also compared without its activations, which llama.cpp rounds. With another `dtype`, the rounded file is written and
    run after that.

    Args:
        request: the model, its tokenizer and where to write them.
        dtype: precision of the matrices: "f32", "f16" or "q8_0" (8 bits in blocks of 32; matrices whose rows do not
            divide into blocks are stored as f16).

    Raises:
        UnsupportedError: if no carrier can express the scheme, with the reason of each; or if llama.cpp has no
            tokenizer that gives the same tokens.
        UnknownNameError: for an unknown precision.
    """
    if dtype not in PRECISIONS:
        raise UnknownNameError("dtype", dtype, list(PRECISIONS), owner="the export to 'gguf'")
    refuse_other_blocks(request.model)
    parts = parts_of(request.model)
    forms: list[tuple[str, GgufForm]] = []
    reasons: dict[str, list[str]] = {}
    for carrier in CARRIERS:
        if carrier.blocks.fits(request.model):
            try:
                forms.append((carrier.name, carrier.form(parts)))
            except UnsupportedError as error:
                reasons.setdefault(str(error), []).append(carrier.name)
    if not forms:
        raise ExportError(request, "gguf", "llama.cpp", _sentences(reasons), False)
    words = vocabulary(request.tokenizer, int(request.model.config.get_text_config().vocab_size))
    inexact: list[tuple[Difference, GgufForm]] = []
    for name, form in forms:
        try:
            found = _differences(request, form, words)
        except UnsupportedError as error:
            reasons.setdefault(str(error), []).append(name)
            continue
        excess = _excess(found, form)
        if excess is None:
            return _written(
                request, form, words, dtype, _checks(found, "f32", {mode: _allowed(form, mode) for mode in found})
            )
        inexact.append((found["prefill"].worst(found["decode"]), form))
        reasons.setdefault(excess, []).append(name)
    if request.approximate and inexact:
        _, form = min(inexact, key=lambda pair: (pair[0].logits != pair[0].logits, pair[0].logits))
        return _written(request, form, words, dtype, ())
    (request.draft / FILE).unlink(missing_ok=True)
    raise ExportError(request, "gguf", "llama.cpp", _sentences(reasons), bool(inexact))


def _sentences(reasons: dict[str, list[str]]) -> list[str]:
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _differences(request: Request, form: GgufForm, words: dict[str, Any]) -> dict[str, Difference]:
    """Writes a float32 file, and returns its differences by mode."""
    reference, file = float32_reference(request.model), request.draft / FILE
    length, name = int(form.metadata["context_length"]), type(request.model).__name__
    found = {}
    if form.gelu:
        write_file(file, without_activations(form), words, "f32", name)
        with silent_activations(reference, form.gelu):
            found = {f"{mode}{_WITHOUT}": one for mode, one in compare(reference, file, length).items()}
    write_file(file, form, words, "f32", name)
    return found | compare(reference, file, length)


def _allowed(form: GgufForm, mode: str) -> Difference:
    return _GELU if form.gelu and not mode.endswith(_WITHOUT) else _EXACT


def _excess(found: dict[str, Difference], form: GgufForm) -> str | None:
    """Says which differences of a float32 file are too large, in a sentence; `None` if none is."""
    # The narrow limit comes first, because it tells a wrong file from an imprecise one.
    for suffix in (_WITHOUT, "") if form.gelu else ("",):
        worst, allowed = found["prefill" + suffix].worst(found["decode" + suffix]), _allowed(form, suffix)
        if not (worst.logits <= allowed.logits and worst.probabilities <= allowed.probabilities):
            return (
                f"llama.cpp gives other numbers{suffix}. The logits differ by {worst.logits:.2g} of the largest "
                f"(allowed: {allowed.logits:g}), the probabilities by {worst.probabilities:.2g} (allowed: "
                f"{allowed.probabilities:g})"
            )
    return None


def _written(
    request: Request, form: GgufForm, words: dict[str, object], dtype: str, checks: tuple[Check, ...]
) -> Written:
    """Writes the file in its precision and runs it. An exact carrier has been checked in float32."""
    file = request.draft / FILE
    if dtype != "f32" or not checks:
        write_file(file, form, words, dtype, type(request.model).__name__)
        limit = _ROUNDED.get(dtype, _EXACT) if checks else None
        found = compare(float32_reference(request.model), file, int(form.metadata["context_length"]))
        checks += _checks(found, dtype, dict.fromkeys(found, limit))
        _refuse_excess(checks, dtype, file)
    return Written(form.carrier, checks, _usage())


def _checks(found: dict[str, Difference], dtype: str, allowed: Mapping[str, Difference | None]) -> tuple[Check, ...]:
    program = f"{runtime()}, {dtype}"
    rows = []
    for mode, difference in found.items():
        for quantity in ("logits", "probabilities"):
            limit = allowed[mode]
            most = None if limit is None else getattr(limit, quantity)
            rows.append(Check(program, mode, quantity, getattr(difference, quantity), most))
    return tuple(rows)


def _refuse_excess(checks: tuple[Check, ...], dtype: str, file: Path) -> None:
    for check in checks:
        if check.allowed is not None and not check.difference <= check.allowed:
            file.unlink()
            raise UnsupportedError(
                f"In llama.cpp the {check.quantity} of the float32 file are those of the model, but with weights in "
                f"{dtype} they differ by {check.difference:.2g} (allowed: {check.allowed:g}). Choose a more precise "
                "dtype."
            )


def _usage() -> str:
    return (
        f"```bash\nllama-cli -m {{folder}}/{FILE} -p 'The dog chased'\nllama-server -m {{folder}}/{FILE}\n```\n\n"
        f"or, in Python, with `pip install xllamacpp`:\n\n```python\nimport xllamacpp\n\n"
        f'options = xllamacpp.CommonParams()\noptions.model.path = "{{folder}}/{FILE}"\n'
        "server = xllamacpp.Server(options)\n"
        'answer = server.handle_completions({"prompt": "The dog chased", "n_predict": 20, "temperature": 0.0})\n'
        'print(answer["choices"][0]["text"])\n```'
    )
