"""Which scheme runs where: every scheme of the table, exported from tiny models to their targets."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import (
    DynamicScaling,
    InterleavedConfig,
    LinearScaling,
    PositionEncodingError,
    RopeConfig,
    YarnScaling,
)
from hf_posenc.export.layers import ModelParts, rotation_of
from hf_posenc.schemes.needs import BIASES, Need
from hf_posenc.schemes.refusals import SGLANG, VLLM
from hf_posenc.serving.engine_schemes import sites_for_engine
from tests.export.gguf_cases import byte_tokenizer
from tests.models import tiny
from tests.schemes.table import TABLE

#: Bytes, and some room for special tokens.
VOCABULARY = 288
#: Why there is no export of a scheme that `patch_model` refuses.
UNPATCHED = "patch_model"
#: What carries a scheme in an engine.
PLUG_IN = "plug-in"


@dataclass(frozen=True)
class Runtime:
    """A column of the page.

    Args:
        target: value of `to=`, or the name of an engine in `ENGINES`.
        mode: which of the measured differences it shows.
        of: the precision, where an export is checked in several.
    """

    name: str
    target: str
    mode: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    of: str = ""


#: The rows: the first variant of every scheme of the table, and arrangements that are often asked for.
SCHEMES: dict[str, Any] = {name: row.variants[0] for name, row in TABLE.items()} | {
    "rope, linear x4": RopeConfig(scaling=LinearScaling(4.0)),
    "rope, YaRN x4": RopeConfig(scaling=YarnScaling(4.0, original_max_positions=16)),
    "rope, dynamic NTK x4": RopeConfig(scaling=DynamicScaling(4.0, original_max_positions=64)),
    "interleaved, every=2": InterleavedConfig(every=2),
}
#: Their classes, and fields of their configs.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "BERT": ("BertForMaskedLM", {}),
    "GPT-2": ("GPT2LMHeadModel", {"bos_token_id": None, "eos_token_id": None}),
    "BERT without a head": ("BertModel", {}),
    "T5": ("T5ForConditionalGeneration", {"num_decoder_layers": 2, "max_position_embeddings": 128}),
}
_INT8 = (("quantize", True),)
_ONNX = (
    Runtime("ONNX Runtime", "onnx", "prefill", _INT8),
    Runtime("ONNX Runtime, decoding", "onnx", "decode", _INT8),
    Runtime("ONNX Runtime, int8", "onnx", "decode", _INT8, of="int8"),
)
_Q8 = (("dtype", "q8_0"),)
_TRANSFORMERS = (Runtime("transformers", "stock", "prefill"), Runtime("transformers, decoding", "stock", "decode"))
_OWN_CODE = Runtime("transformers, remote code", "remote_code", "prefill")
_LLAMA_CPP = (
    Runtime("llama.cpp", "gguf", "prefill", _Q8, "f32"),
    Runtime("llama.cpp, decoding", "gguf", "decode", _Q8, "f32"),
    Runtime("llama.cpp, Q8_0", "gguf", "decode", _Q8, "q8_0"),
)
#: Engines with a plug-in of this package, and whether their kernels take the slopes of ALiBi. They are not run here.
ENGINES = {"vllm": VLLM, "sglang": SGLANG}
RUNTIMES: dict[str, tuple[Runtime, ...]] = {
    "Llama": (*_TRANSFORMERS, _OWN_CODE, *_ONNX, *_LLAMA_CPP, Runtime("vLLM", "vllm"), Runtime("SGLang", "sglang")),
    "BERT": (_TRANSFORMERS[0], _OWN_CODE, _ONNX[0]),
    "GPT-2": (*_TRANSFORMERS, *_LLAMA_CPP),
    "BERT without a head": (_LLAMA_CPP[0], Runtime("llama.cpp, Q8_0", "gguf", "prefill", _Q8, "q8_0")),
    "T5": (_TRANSFORMERS[0], *_LLAMA_CPP),
}


def patched(model: str, scheme: str) -> PreTrainedModel:
    """A tiny model with the first variant of a scheme, whose parameters are large enough to matter."""
    torch.manual_seed(0)
    name, options = MODELS[model]
    stock = tiny(name, vocab_size=VOCABULARY, **options)
    with torch.no_grad():
        for weight in stock.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    hf_posenc.patch_model(stock, SCHEMES[scheme])
    with torch.no_grad():
        for weight in stock.position_encoding.parameters():
            if weight.ndim == 2 and weight.std() < 0.1:
                weight.normal_(std=0.3)
    return stock.eval()


def outcome(model: str, scheme: str, runtime: Runtime) -> dict[str, Any]:
    """`{"carrier": ..., "checks": [...]}` of an export, or `{"refused": [reason, ...]}`. Other errors are raised."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        try:
            given = patched(model, scheme)
        except PositionEncodingError as refusal:
            return {"refused": [str(refusal)], "because": UNPATCHED}
        place, options = Path(folder, "export"), dict(runtime.options)
        try:
            if runtime.target in ENGINES:
                sites_for_engine(given, ENGINES[runtime.target])
                return {"carrier": PLUG_IN, "checks": []}
            report = hf_posenc.export_model(given, place, to=runtime.target, tokenizer=byte_tokenizer(), **options)
        except hf_posenc.UnsupportedError as refusal:
            return {"refused": getattr(refusal, "reasons", [str(refusal)]), "because": mechanism(given)}
        found = report.to_dict()
        return {"carrier": found["carrier"], "checks": found["checks"]}


def mechanism(model: PreTrainedModel) -> str:
    """What a scheme does that is not one rotation by fixed frequencies, in the words of the page."""
    parts = ModelParts(model)
    needs = parts.needs()
    names = ["vectors"] * (Need.VECTORS in needs) + ["map"] * (Need.MAP in needs and not _only_rotates(parts))
    names += ["bias"] * any(kind in needs for kind in (*BIASES, Need.ROTATION_BY_INPUT)) + ["scale"] * (
        Need.SCALE in needs
    )
    return " + ".join(names) or "rotation"


def _only_rotates(parts: ModelParts) -> bool:
    try:
        return bool([rotation_of(layer) for layer in parts.layers])
    except hf_posenc.UnsupportedError:
        return False


def _form(check: dict[str, Any]) -> str:
    """The precision after the name of a runtime, if there is one: "onnxruntime 1.32.0, int8"."""
    return str(check["runtime"]).partition(", ")[2]


def shown(found: dict[str, Any], runtime: Runtime) -> str:
    """What a column shows of an outcome: the difference, or why there is no export."""
    if "refused" in found:
        return f"no: {found['because']}"
    checks = [one for one in found["checks"] if (one["mode"], _form(one)) == (runtime.mode, runtime.of)]
    # llama.cpp returns probabilities; other programs return the outputs themselves.
    differences = [one["difference"] for one in checks if one["quantity"] != "logits" or len(checks) == 1]
    if not differences:
        return str(found["carrier"])
    return f"{max(differences):.0e}" if max(differences) else "0"
