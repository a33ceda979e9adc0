"""A model in the terms of llama.cpp, and the code that writes it to a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Precision
from gguf.lazy import LazyNumpyTensor
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.errors import UnsupportedError
from hf_posenc.export.carriers import Form

#: Precision of the matrices, by the option `dtype`: how they are stored, and llama.cpp's name of such a file.
PRECISIONS = {
    "f32": (Precision.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Precision.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (Precision.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
#: Tables of positions, token types and biases, and the routers of experts.
_PRECISE = ("position_embd.weight", "token_types.weight", "attn_rel_b.weight", "ffn_gate_inp.weight")
#: Hyperparameters, by their keys without the name of the architecture ("block_count").
Metadata = dict[str, int | float | str | bool]
_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}


@dataclass(frozen=True)
class GgufForm(Form):
    """A model, before it is rounded to the precision of a file.

    Args:
        architecture: name of the architecture in llama.cpp.
        metadata: its hyperparameters.
        tensors: weights by their names in llama.cpp, `(out, in)` for matrices.
        tokenizer: metadata of the tokenizer that the architecture needs, without the prefix "tokenizer.".
    """

    architecture: str
    metadata: Metadata
    tensors: dict[str, Tensor]
    tokenizer: dict[str, int] = field(default_factory=dict)

    def is_encoder(self) -> bool:
        """Whether llama.cpp returns hidden states for this architecture."""
        return self.architecture == "t5encoder" or self.metadata.get("attention.causal") is False


def named_weights(
    model: PreTrainedModel, architecture: str, layers: int, without: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Returns a model's weights by their names in llama.cpp, without those of the scheme and without a tied output.

    Matrices are `(out, in)`.

    Args:
        model: the model.
        architecture: the architecture in llama.cpp.
        layers: number of layers.
        without: names of modules whose weights are left out.

    Raises:
        UnsupportedError: for a weight that the architecture does not have.
    """
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], layers)
    name_of = partial(names.get_name, try_suffixes=(".weight", ".bias"))
    transposed = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)}
    named: dict[str, Tensor] = {}
    for key, tensor in _with_experts_apart(model.state_dict()):
        if not {ATTRIBUTE, *without}.isdisjoint(key.split(".")):
            continue
        # The list of names has some classes with the prefix of the base model and some without.
        spellings = (key, key.removeprefix(f"{model.base_model_prefix}."))
        name = next(filter(None, map(name_of, spellings)), None)
        if name is None and any(tensor.data_ptr() == other.data_ptr() for other in named.values()):
            continue  # A second name of the same weight.
        if name is None:
            raise UnsupportedError(f"the architecture {architecture!r} of llama.cpp has no weight like {key}")
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"  # Experts are parameters, not modules.
        named[name] = tensor.detach().T if key in transposed else tensor.detach()
    output, embedding = named.get("output.weight"), named["token_embd.weight"]
    if output is not None and output.data_ptr() == embedding.data_ptr():
        del named["output.weight"]  # llama.cpp then uses the embeddings.
    return named


def _with_experts_apart(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights, with the two projections that transformers stores as one in experts: `(experts, 2 * out, in)`."""
    for key, tensor in state.items():
        stem = key.removesuffix(".gate_up_proj")
        if stem == key:
            yield key, tensor
        else:
            yield from zip((f"{stem}.gate_proj", f"{stem}.up_proj"), tensor.chunk(2, dim=1), strict=True)


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
    for key, tensor in form.tensors.items():
        kind = _precision(key, tensor, dtype)
        # Computed when it is written.
        shape = LazyNumpyTensor.meta_with_dtype_and_shape(np.float32, tuple(tensor.shape))
        later = LazyNumpyTensor(
            meta=shape, args=(tensor,), func=lambda each: np.ascontiguousarray(each.float().cpu().numpy())
        )
        writer.add_tensor(key, gguf.quantize(later, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _precision(name: str, tensor: Tensor, dtype: str) -> Precision:
    """Vectors, tables that are added to something, and routers stay float32, as in files that llama.cpp quantises. A
    matrix whose rows do not divide into blocks of Q8_0 is stored as float16.
    """
    wanted = PRECISIONS[dtype][0]
    if tensor.ndim < 2 or name.endswith(_PRECISE):
        return Precision.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if tensor.shape[-1] % block == 0 else Precision.F16


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if type(value) is int and not 0 <= value < 2**32:
        raise UnsupportedError(
            f"{key} of a GGUF file is a number of 32 bits, from 0 to 4294967295, and this model has {value}. Change "
            "that field of its config."
        )
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    getattr(writer, f"add_{kinds.get(type(value), 'array')}")(key, value)
