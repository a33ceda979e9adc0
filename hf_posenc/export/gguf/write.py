"""The target "gguf": one file for llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gguf import PoolingType
from transformers import PreTrainedModel

from hf_posenc.errors import UnknownNameError, UnsupportedError, UsageError
from hf_posenc.export.gguf.carriers import CARRIERS, refuse_other_blocks
from hf_posenc.export.gguf.differences import Differences, largest
from hf_posenc.export.gguf.file import PRECISIONS, write_file
from hf_posenc.export.gguf.form import GgufForm, is_encoder
from hf_posenc.export.gguf.limits import checks, excess
from hf_posenc.export.gguf.parts import parts_of
from hf_posenc.export.gguf.usage import FILE, usage
from hf_posenc.export.gguf.verify import compare
from hf_posenc.export.gguf.vocabulary import vocabulary
from hf_posenc.export.records import Check, Written
from hf_posenc.export.refusal import ExportError, Reasons
from hf_posenc.export.request import Request
from hf_posenc.export.samples import float32_reference

#: The values of the option `pooling`.
_POOLING = {name: PoolingType[name.upper()] for name in ("none", "mean", "cls", "last")}


def write(request: Request, *, dtype: str = "f32", pooling: str | None = None) -> Written:
    """Writes `model.gguf`, which llama.cpp runs without this package.

    The carriers with the model's blocks are tried in order. Each file is run in llama.cpp with float32 weights and a
    float32 cache, for prompts of several lengths and while decoding. It must give the model's logits and probabilities,
    or the hidden states of an encoder. With another `dtype`, the rounded file is written and run after that.

    Args:
        request: the model, its tokenizer and where to write them.
        dtype: precision of the matrices: "f32", "f16" or "q8_0" (8 bits in blocks of 32; matrices whose rows do not
            divide into blocks are stored as f16).
        pooling: how llama.cpp makes one vector of a text from an encoder's hidden states: "mean", "cls" (the first
            token), "last" or "none". By default the file says nothing, and programs are told by their own option.

    Raises:
        UnsupportedError: if no carrier can express the scheme, with the reason of each; or if llama.cpp has no
            tokenizer that gives the same tokens.
        UnknownNameError: for an unknown precision or pooling.
        UsageError: for a pooling of a model that is not an encoder.
    """
    if dtype not in PRECISIONS:
        raise UnknownNameError("dtype", dtype, list(PRECISIONS), owner="the export to 'gguf'")
    if pooling is not None and pooling not in _POOLING:
        raise UnknownNameError("pooling", pooling, list(_POOLING), owner="the export to 'gguf'")
    reasons = Reasons()
    forms = _forms(request.model, reasons)
    if not forms:
        raise ExportError(request, "gguf", "llama.cpp", reasons, False)
    words = vocabulary(request.tokenizer, int(request.model.config.get_text_config().vocab_size))
    inexact: list[tuple[Differences, GgufForm]] = []
    for name, proposed in forms:
        form = _pooled(proposed, pooling)
        try:
            found = _run(request, form, words, "f32")
        except UnsupportedError as error:
            reasons.add(name, error)
            continue
        worst = largest(found)
        too_large = excess(worst)
        if too_large is None:
            return _written(request, form, words, dtype, checks(found, "f32"))
        inexact.append((worst, form))
        reasons.add(name, too_large)
    if request.approximate and inexact:
        _, form = min(inexact, key=lambda pair: [(value != value, value) for value in pair[0].values()])
        return _written(request, form, words, dtype, ())
    (request.draft / FILE).unlink(missing_ok=True)
    raise ExportError(request, "gguf", "llama.cpp", reasons, bool(inexact))


def proposal(model: PreTrainedModel) -> str | None:
    """What could carry a model's scheme, before it is run; `None` if nothing could."""
    try:
        forms = _forms(model, Reasons())
    except UnsupportedError:
        return None
    return forms[0][1].carrier if forms else None


def _forms(model: PreTrainedModel, reasons: Reasons) -> list[tuple[str, GgufForm]]:
    """The forms of all carriers that have one, with their names. The reasons of the others are added."""
    refuse_other_blocks(model)
    parts = parts_of(model)
    forms = []
    for carrier in CARRIERS:
        if carrier.blocks.fits(model):
            try:
                forms.append((carrier.name, carrier.form(parts)))
            except UnsupportedError as error:
                reasons.add(carrier.name, error)
    return forms


def _pooled(form: GgufForm, pooling: str | None) -> GgufForm:
    if pooling is None:
        return form
    if not is_encoder(form):
        raise UsageError(f"The option pooling={pooling!r} of the export to 'gguf' is for encoders. Leave it out.")
    return replace(form, metadata={**form.metadata, "pooling_type": int(_POOLING[pooling])})


def _run(request: Request, form: GgufForm, words: dict[str, Any], dtype: str) -> dict[str, Differences]:
    """Writes the file and returns its differences by mode."""
    file, length = request.draft / FILE, form.metadata["context_length"]
    write_file(file, form, words, dtype, type(request.model).__name__)
    return compare(float32_reference(request.model), file, int(length), same_gelu=dtype == "f32")


def _written(request: Request, form: GgufForm, words: dict[str, Any], dtype: str, found: tuple[Check, ...]) -> Written:
    """Writes the file in its precision and runs it. An exact carrier has been checked in float32."""
    if dtype != "f32" or not found:
        exact = bool(found)
        found += checks(_run(request, form, words, dtype), dtype, limited=exact)
        _refuse_excess(request, found, dtype)
    return Written(form.carrier, found, usage(form))


def _refuse_excess(request: Request, found: tuple[Check, ...], dtype: str) -> None:
    for check in found:
        if check.allowed is not None and not check.difference <= check.allowed:
            (request.draft / FILE).unlink()
            raise UnsupportedError(
                f"In llama.cpp the {check.quantity} of the float32 file are those of the model, but with weights in "
                f"{dtype} they differ by {check.difference:.2g} (allowed: {check.allowed:g}). Choose a more precise "
                "dtype."
            )
