"""The target "onnx": a graph for onnxruntime and other programs."""

from __future__ import annotations

import copy
from pathlib import Path

import transformers

from hf_posenc.errors import UsageError
from hf_posenc.export.onnx.program import LARGEST_FILE, export_program, quiet, save_program
from hf_posenc.export.onnx.verify import TOLERANCE, compare
from hf_posenc.export.records import Check, Written
from hf_posenc.export.request import Request
from hf_posenc.patching.place.config_entry import detach_entry, find_lengths, write_lengths

_FILE, _QUANTIZED = "model.onnx", "model_quantized.onnx"
#: Weights that share a scale, and onnxruntime's number for products with activations that are int8 in blocks too.
_BLOCK, _INT8_PRODUCTS = 32, 4


def write(request: Request, *, opset_version: int | None = None, quantize: bool = False) -> Written:
    """Writes `model.onnx` in float32, with the names that optimum uses.

    A model that generates gets `input_ids`, `attention_mask` and the cache of every layer, and returns `logits` and the
    new cache. Positions are counted over the mask, so a prompt, one token after it, and padding on the left are all
    the same graph. Other models get `input_ids`, `attention_mask` and, if they have any, `token_type_ids`.

    Args:
        request: the model and where to write it.
        opset_version: version of the ONNX operators; `None` for the newest that the exporter writes.
        quantize: whether to also write `model_quantized.onnx`, whose matrices are int8 in blocks of 32, for onnxruntime
            alone (its operator MatMulNBits). Tables of embeddings stay float32. Its measured difference is reported,
            and any is accepted.

    Raises:
        UnsupportedError: if the model cannot be traced with open lengths, or onnxruntime computes other numbers.
        UsageError: if transformers is too old, or for an option that is no truth value, or no version.
    """
    if not isinstance(quantize, bool):
        raise UsageError(f"quantize is {quantize!r}; expected True or False.")
    if opset_version is not None and type(opset_version) is not int:
        raise UsageError(f"opset_version is {opset_version!r}; expected a number, such as 20.")
    # Tracing extends buffers and may choose another attention implementation.
    reference = copy.deepcopy(request.model).float().cpu().eval()
    path = request.draft / _FILE
    save_program(export_program(reference, opset_version), path)
    checks = compare(reference, path, TOLERANCE)
    if quantize:
        checks += _quantized(reference, path)
    save_configs(request)
    usage = "\n".join(("```python", _LOAD, _GENERATE if reference.can_generate() else _ENCODE, "```"))
    return Written("its own ONNX graph", checks, usage)


def _quantized(reference: transformers.PreTrainedModel, path: Path) -> tuple[Check, ...]:
    import onnx

    with quiet():
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    # A scale for each block: with one for a whole matrix, its outliers round all other weights, and one for a whole
    # activation does the same to tokens.
    quantizer = MatMulNBitsQuantizer(
        onnx.load(path), bits=8, block_size=_BLOCK, is_symmetric=True, accuracy_level=_INT8_PRODUCTS
    )
    with quiet():
        quantizer.process()
    target = path.with_name(_QUANTIZED)
    size = sum(len(one.raw_data) for one in quantizer.model.model.graph.initializer)
    quantizer.model.save_model_to_file(str(target), use_external_data_format=size > LARGEST_FILE)
    return tuple(
        Check(f"{check.runtime}, int8", check.mode, check.quantity, check.difference, check.allowed)
        for check in compare(reference, target, None)
    )


def save_configs(request: Request) -> None:
    """Saves the configs without the scheme, which other programs could not read. The graph contains it.

    The lengths are those of the graph, not those of the stock model.
    """
    config = copy.deepcopy(request.model.config)
    lengths = find_lengths(config, [getattr(config, key, None) for key in config.sub_configs])
    detach_entry(config)
    write_lengths(config, lengths)
    config.save_pretrained(request.draft)
    generation = getattr(request.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(request.draft)


_LOAD = """import numpy as np
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
session = onnxruntime.InferenceSession("{folder}/model.onnx")"""

_ENCODE = """batch = tokenizer(["The dog chased another dog."], padding=True, return_tensors="np")
names = [one.name for one in session.get_inputs()]
outputs = session.run(None, {name: batch[name].astype(np.int64) for name in names})"""

_GENERATE = """prompt = tokenizer("The dog chased", return_tensors="np")
ids, mask = prompt["input_ids"].astype(np.int64), prompt["attention_mask"].astype(np.int64)
caches = [one for one in session.get_inputs() if one.name.startswith("past_key_values")]
past = {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in caches}
tokens = []
for _ in range(32):
    logits, *present = session.run(None, {"input_ids": ids, "attention_mask": mask, **past})
    past = dict(zip(past, present))
    ids = logits[:, -1:].argmax(-1)
    mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
    tokens.append(ids.item())
print(tokenizer.decode(tokens))"""
