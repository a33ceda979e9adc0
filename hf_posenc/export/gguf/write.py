"""The target "gguf": one file for llama.cpp."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from gguf import PoolingType
from transformers import PreTrainedModel

from hf_posenc.errors import UnknownNameError, UnsupportedError, UsageError
from hf_posenc.export.gguf.carriers import CARRIERS, refuse_other_blocks
from hf_posenc.export.gguf.file import PRECISIONS, write_file
from hf_posenc.export.gguf.form import GgufForm, is_encoder
from hf_posenc.export.gguf.parts import parts_of
from hf_posenc.export.gguf.verify import Differences, checks, compare, excess, largest
from hf_posenc.export.gguf.vocabulary import vocabulary
from hf_posenc.export.records import Check, Written
from hf_posenc.export.refusal import ExportError, Reasons
from hf_posenc.export.request import Request
from hf_posenc.export.samples import float32_reference

_FILE = "model.gguf"
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
    reasons: Reasons = defaultdict(list)
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
            reasons[str(error)].append(name)
            continue
        worst = largest(found)
        too_large = excess(worst)
        if too_large is None:
            return _written(request, form, words, dtype, checks(found, "f32"))
        inexact.append((worst, form))
        reasons[too_large].append(name)
    if request.approximate and inexact:
        _, form = min(inexact, key=lambda pair: [(value != value, value) for value in pair[0].values()])
        return _written(request, form, words, dtype, ())
    (request.draft / _FILE).unlink(missing_ok=True)
    raise ExportError(request, "gguf", "llama.cpp", reasons, bool(inexact))


def proposal(model: PreTrainedModel) -> str | None:
    """What could carry a model's scheme, before it is run; `None` if nothing could."""
    try:
        forms = _forms(model, defaultdict(list))
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
                reasons[str(error)].append(carrier.name)
    return forms


def _pooled(form: GgufForm, pooling: str | None) -> GgufForm:
    if pooling is None:
        return form
    if not is_encoder(form):
        raise UsageError(f"The option pooling={pooling!r} of the export to 'gguf' is for encoders. Leave it out.")
    return replace(form, metadata={**form.metadata, "pooling_type": int(_POOLING[pooling])})


def _run(request: Request, form: GgufForm, words: dict[str, Any], dtype: str) -> dict[str, Differences]:
    """Writes the file and returns its differences by mode."""
    file, length = request.draft / _FILE, form.metadata["context_length"]
    write_file(file, form, words, dtype, type(request.model).__name__)
    return compare(float32_reference(request.model), file, int(length), same_gelu=dtype == "f32")


def _written(request: Request, form: GgufForm, words: dict[str, Any], dtype: str, found: tuple[Check, ...]) -> Written:
    """Writes the file in its precision and runs it. An exact carrier has been checked in float32."""
    if dtype != "f32" or not found:
        exact = bool(found)
        found += checks(_run(request, form, words, dtype), dtype, limited=exact)
    for check in found:
        if check.allowed is not None and not check.difference <= check.allowed:
            (request.draft / _FILE).unlink()
            raise UnsupportedError(
                f"In llama.cpp the {check.quantity} of the float32 file are those of the model, but with weights in "
                f"{dtype} they differ by {check.difference:.2g} (allowed: {check.allowed:g}). Choose a more precise "
                "dtype."
            )
    return Written(form.carrier, found, _usage(form))


def _usage(form: GgufForm) -> str:
    if "decoder_block_count" in form.metadata:
        return _ENCODER_DECODER
    if not is_encoder(form):
        return _DECODER
    option, line = ("", "") if "pooling_type" in form.metadata else _POOLED
    return _ENCODER.replace("{option}", option).replace("{line}", line)


_DECODER = """```bash
llama-cli -m {folder}/model.gguf -p 'The dog chased'
llama-server -m {folder}/model.gguf
```

or, in Python, with `pip install xllamacpp`:

```python
import xllamacpp

options = xllamacpp.CommonParams()
options.model.path = "{folder}/model.gguf"
server = xllamacpp.Server(options)
answer = server.handle_completions({"prompt": "The dog chased", "n_predict": 20, "temperature": 0.0})
print(answer["choices"][0]["text"])
```"""
_ENCODER = """```bash
llama-embedding -m {folder}/model.gguf{option} -p 'The dog chased'
llama-server -m {folder}/model.gguf{option} --embeddings
```

or, in Python, with `pip install xllamacpp`:

```python
import xllamacpp

options = xllamacpp.CommonParams()
options.model.path = "{folder}/model.gguf"
options.embedding = True
{line}server = xllamacpp.Server(options)
print(server.handle_embeddings({"input": ["The dog chased"]})["data"][0]["embedding"])
```"""
#: What a program has to be told if the file does not say how to make one vector of a text.
_POOLED = " --pooling mean", "options.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN\n"
_ENCODER_DECODER = (
    "`model.gguf` is an encoder-decoder. Programs that call `llama_encode` and `llama_decode` of llama.cpp run it. "
    "`llama-server` and the programs that contain it load the file and then answer with wrong text: they do not "
    "run the encoder."
)
