"""The target "gguf": one file for llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gguf import PoolingType

from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.export.gguf.carriers import CARRIERS, carriers_for
from hf_posenc.export.gguf.differences import Differences, largest
from hf_posenc.export.gguf.file import PRECISIONS, write_file
from hf_posenc.export.gguf.form import GgufForm, is_encoder
from hf_posenc.export.gguf.parts import parts_of
from hf_posenc.export.gguf.run import runtime
from hf_posenc.export.gguf.verify import SAME_GELU, compare
from hf_posenc.export.gguf.vocabulary import vocabulary
from hf_posenc.export.records import Check, Written
from hf_posenc.export.refusal import ExportError
from hf_posenc.export.request import Request
from hf_posenc.export.samples import float32_reference

#: Name of the file.
FILE = "model.gguf"
#: The values of the option `pooling`.
_POOLING = {name: PoolingType[name.upper()] for name in ("none", "mean", "cls", "last")}
#: Largest accepted differences. In float32, the programs differ in the order of sums and in llama.cpp's angles, which
#: it computes by repeated multiplication.
_EXACT = {"logits": 1e-4, "probabilities": 1e-3, "hidden states": 1e-4}
#: llama.cpp's GELU is a table of float16. It alone changes the hidden states of a stock MiniLM by 2e-3, and those of a
#: MiniLM with other positions by up to 5e-3.
_GELU = 2e-2
#: With that GELU in the model too, a different order of sums can still lead to the next entry of the table: a noise of
#: 1e-7 in the embeddings changes the hidden states of MiniLM by 2e-4. Up to 6e-4 was measured. Wrong positions change
#: more: one wrong row of 512 in a table 6e-2, a base of RoPE that is wrong by 1 % 2e-2, lost ALiBi 0.8.
_SAME_GELU = 2e-3
#: The same as `_EXACT` for rounded weights. Q8_0 changes the hidden states of MiniLM by up to 8e-2. A position encoding
#: that is lost or wrong changes more (see tests/export/test_gguf.py), and is found before, because the carrier is first
#: compared in float32.
_ROUNDED = {
    "f16": {"logits": 1e-2, "probabilities": 1e-2, "hidden states": 1e-2},
    "q8_0": {"logits": 0.25, "probabilities": 0.15, "hidden states": 0.25},
}


def write(request: Request, *, dtype: str = "f32", pooling: str | None = None) -> Written:
    """Writes `model.gguf`, which llama.cpp runs without this package.

    The carriers are tried in order. Each file is run in llama.cpp with float32 weights and a float32 cache, and must
    give the model's logits and probabilities, for prompts of several lengths and while decoding, or an encoder's hidden
    states. With another `dtype`,
    the rounded file is written and run after that.

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
    """
    if dtype not in PRECISIONS:
        raise UnknownNameError("dtype", dtype, list(PRECISIONS), owner="the export to 'gguf'")
    if pooling is not None and pooling not in _POOLING:
        raise UnknownNameError("pooling", pooling, list(_POOLING), owner="the export to 'gguf'")
    parts = parts_of(request.model)
    forms, reasons = [], []
    for carrier in carriers_for(request.model, CARRIERS):
        try:
            forms.append((carrier.name, _pooled(carrier.form(parts), pooling)))
        except UnsupportedError as error:
            reasons.append(f"{carrier.name}: {error}")
    if not forms:
        raise ExportError(request, "gguf", "llama.cpp", reasons, False)
    words = vocabulary(request.tokenizer, int(request.model.config.get_text_config().vocab_size))
    reference, file = float32_reference(request.model), request.draft / FILE
    inexact: list[tuple[Differences, GgufForm]] = []
    for name, form in forms:
        write_file(file, form, words, "f32", type(request.model).__name__)
        try:
            found = compare(reference, file)
        except UnsupportedError as error:
            reasons.append(f"{name}: {error}")
            continue
        worst = largest(found)
        if all(worst[what] <= allowed for what, allowed in _limits(worst, "f32").items()):
            return _written(request, form, words, dtype, _checks(found, "f32"))
        inexact.append((worst, form))
        reasons.append(f"{name}: llama.cpp gives other numbers. {_excess(worst)}")
    if request.approximate and inexact:
        _, form = min(inexact, key=lambda pair: [(value != value, value) for value in pair[0].values()])
        return _written(request, form, words, dtype, ())
    file.unlink(missing_ok=True)
    raise ExportError(request, "gguf", "llama.cpp", reasons, bool(inexact))


def _pooled(form: GgufForm, pooling: str | None) -> GgufForm:
    if pooling is None:
        return form
    if not is_encoder(form):
        raise UnsupportedError(f"the option pooling={pooling!r} is for encoders; omit it for this model")
    return replace(form, metadata={**form.metadata, "pooling_type": int(_POOLING[pooling])})


def _written(
    request: Request, form: GgufForm, words: dict[str, object], dtype: str, checks: tuple[Check, ...]
) -> Written:
    """Writes the file in its precision and runs it. An exact carrier has been checked in float32."""
    file = request.draft / FILE
    if dtype != "f32" or not checks:
        write_file(file, form, words, dtype, type(request.model).__name__)
        found = compare(float32_reference(request.model), file)
        checks += _checks(found, dtype, limited=bool(checks))
        _refuse_excess(checks, dtype, file)
    return Written(form.carrier, checks, _usage(form))


def _limits(found: Differences, dtype: str) -> Differences:
    """The largest accepted differences."""
    limits = _ROUNDED.get(dtype, _EXACT)
    allowed = {}
    for what in found:
        exact = limits[what.removesuffix(SAME_GELU)]
        if what.endswith(SAME_GELU):
            allowed[what] = max(exact, _SAME_GELU)
        else:
            allowed[what] = max(exact, _GELU) if what + SAME_GELU in found else exact
    return allowed


def _checks(found: dict[str, Differences], dtype: str, *, limited: bool = True) -> tuple[Check, ...]:
    program = f"{runtime()}, {dtype}"
    return tuple(
        Check(program, mode, what, value, _limits(differences, dtype)[what] if limited else None)
        for mode, differences in found.items()
        for what, value in differences.items()
    )


def _excess(found: Differences) -> str:
    limits = _limits(found, "f32")
    named = [
        f"the {what} by {value:.2g}{'' if 'probabilities' in what else ' of the largest'} (allowed: {limits[what]:g})"
        for what, value in found.items()
    ]
    first, *rest = (part.replace(" by ", " differ by ", 1) if not place else part for place, part in enumerate(named))
    return ", ".join([first[0].upper() + first[1:], *rest])


def _refuse_excess(checks: tuple[Check, ...], dtype: str, file: Path) -> None:
    for check in checks:
        if check.allowed is not None and not check.difference <= check.allowed:
            file.unlink()
            raise UnsupportedError(
                f"In llama.cpp the {check.quantity} of the float32 file are those of the model, but with weights in "
                f"{dtype} they differ by {check.difference:.2g} (allowed: {check.allowed:g}). Choose a more precise "
                "dtype."
            )


_DECODER_USAGE = (
    f"```bash\nllama-cli -m {{folder}}/{FILE} -p 'The dog chased'\nllama-server -m {{folder}}/{FILE}\n```\n\n"
    f"or, in Python, with `pip install xllamacpp`:\n\n```python\nimport xllamacpp\n\n"
    f'options = xllamacpp.CommonParams()\noptions.model.path = "{{folder}}/{FILE}"\n'
    "server = xllamacpp.Server(options)\n"
    'answer = server.handle_completions({"prompt": "The dog chased", "n_predict": 20, "temperature": 0.0})\n'
    'print(answer["choices"][0]["text"])\n```'
)
_ENCODER_USAGE = (
    f"```bash\nllama-embedding -m {{folder}}/{FILE}{{option}} -p 'The dog chased'\n"
    f"llama-server -m {{folder}}/{FILE}{{option}} --embeddings\n```\n\n"
    f"or, in Python, with `pip install xllamacpp`:\n\n```python\nimport xllamacpp\n\n"
    f'options = xllamacpp.CommonParams()\noptions.model.path = "{{folder}}/{FILE}"\noptions.embedding = True\n{{line}}'
    "server = xllamacpp.Server(options)\n"
    'print(server.handle_embeddings({"input": ["The dog chased"]})["data"][0]["embedding"])\n```'
)
#: What a program has to be told if the file does not say how to make one vector of a text.
_POOLED = " --pooling mean", "options.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN\n"
_ENCODER_DECODER_USAGE = (
    f"`{FILE}` is an encoder-decoder. Programs that call `llama_encode` and `llama_decode` of llama.cpp run it. "
    "`llama-server` and the programs that contain it do not."
)


def _usage(form: GgufForm) -> str:
    if "decoder_block_count" in form.metadata:
        return _ENCODER_DECODER_USAGE
    if not is_encoder(form):
        return _DECODER_USAGE
    option, line = ("", "") if "pooling_type" in form.metadata else _POOLED
    return _ENCODER_USAGE.replace("{option}", option).replace("{line}", line)
