"""Writes a form and a tokenizer to a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Precision
from torch import Tensor

from hf_posenc.export.gguf.form import GgufForm

#: Precision of the matrices, by the option `dtype`: how they are stored, and llama.cpp's name of such a file.
PRECISIONS = {
    "f32": (Precision.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Precision.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (Precision.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
#: Tables of positions, token types and biases.
_ADDED = ("position_embd.weight", "token_types.weight", "attn_rel_b.weight")


def write_file(path: Path, form: GgufForm, vocabulary: dict[str, Any], dtype: str, name: str) -> None:
    """Writes a file. Only one weight at a time is in memory a second time.

    Args:
        path: of the file.
        form: the model.
        vocabulary: the tokenizer, as metadata.
        dtype: precision of the matrices; vectors and small tables are float32.
        name: of the model, for programs that show it.
    """
    writer = gguf.GGUFWriter(path, form.architecture)
    writer.add_name(name)
    writer.add_file_type(PRECISIONS[dtype][1])
    for key, value in form.metadata.items():
        _add(writer, f"{form.architecture}.{key}", value)
    for key, value in {**vocabulary, **form.tokenizer}.items():
        _add(writer, f"tokenizer.{key}", value)
    kinds = {key: _precision(key, tensor, dtype) for key, tensor in form.tensors.items()}
    for key, tensor in form.tensors.items():
        stored = gguf.quant_shape_to_byte_shape(tuple(tensor.shape), kinds[key])
        kind = {Precision.F32: np.float32, Precision.F16: np.float16}.get(kinds[key], np.uint8)
        size = int(np.prod(stored))
        if kind is np.uint8:
            writer.add_tensor_info(key, stored, np.dtype(kind), size, raw_dtype=kinds[key])
        else:
            writer.add_tensor_info(key, tuple(tensor.shape), np.dtype(kind), size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, tensor in form.tensors.items():
        array = np.ascontiguousarray(tensor.float().cpu().numpy())
        writer.write_tensor_data(gguf.quantize(array, kinds[key]))
    writer.close()


def _precision(name: str, tensor: Tensor, dtype: str) -> Precision:
    """Vectors and tables that are added to something stay float32, as in files that llama.cpp quantises. A matrix whose
    rows do not divide into blocks of Q8_0 is stored as float16.
    """
    wanted = PRECISIONS[dtype][0]
    if tensor.ndim < 2 or name.endswith(_ADDED):
        return Precision.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if tensor.shape[-1] % block == 0 else Precision.F16


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    getattr(writer, f"add_{kinds.get(type(value), 'array')}")(key, value)
