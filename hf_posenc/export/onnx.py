"""The target "onnx": a graph for onnxruntime and other programs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import SequenceLengthError, UnsupportedError, UsageError
from hf_posenc.export.carriers import Form
from hf_posenc.export.comparison import accepted, difference_at_real_tokens, largest, random_ids, spans
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.onnx_graph import Past, cached, export_graph, run_decoder
from hf_posenc.export.programs import ProgramExport, padded, plain_checks
from hf_posenc.export.records import Check
from hf_posenc.preserve import quiet

#: Largest difference at which graph and model count as equal, in float32; relative for outputs larger than 1. They sum
#: in another order: the 30 layers of SmolLM2 differ by 4e-6 in short texts, and by 1.3e-5 at position 16,384.
TOLERANCE = 5e-5
#: Tokens of one comparison after a long cache.
_TAIL = 32
#: Tokens of the text whose cache is repeated for comparisons after a longer one.
_SAMPLE = 256
#: Longer sequences are not compared.
_FARTHEST = 2**14
_FILE, _QUANTIZED, _WEIGHTS = "model.onnx", "model_quantized.onnx", "model.onnx_data"
#: Protobuf limits a file to 2 GB. Larger weights go to a separate file.
_LARGEST_FILE = int(1.5 * 2**30)
#: Weights that share a scale, and onnxruntime's number for products with activations that are int8 in blocks too.
_BLOCK, _INT8_PRODUCTS = 32, 4


@dataclass
class OnnxExport(ProgramExport):
    """Writes `model.onnx` in float32, with the names that optimum uses.

    A model that generates gets `input_ids`, `attention_mask` and the cache of every layer, and returns `logits` and the
    new cache. Positions are counted over the mask, so a prompt, one token after it, and padding on the left are all
    the same graph. Other models get `input_ids`, `attention_mask` and, if they have any, `token_type_ids`.

    Args:
        opset_version: version of the ONNX operators; `None` for the newest that the exporter writes.
        quantize: whether to also write `model_quantized.onnx`, whose matrices are int8 in blocks of 32, for onnxruntime
            alone (its operator MatMulNBits). Tables of embeddings stay float32. Its measured difference is reported,
            and any is accepted.

    Raises:
        UsageError: for an option that is not a truth value, or not a version.
    """

    opset_version: int | None = None
    quantize: bool = False
    program = "its own ONNX graph"

    def __post_init__(self) -> None:
        if not isinstance(self.quantize, bool):
            raise UsageError(f"quantize is {self.quantize!r}; expected True or False.")
        if self.opset_version is not None and type(self.opset_version) is not int:
            raise UsageError(f"opset_version is {self.opset_version!r}; expected a number, such as 20.")

    def write(self, form: Form) -> None:
        """Writes the graph.

        Raises:
            UnsupportedError: if the model cannot be traced with open lengths.
            UsageError: if transformers is too old.
        """
        import onnx_ir

        program = export_graph(self.reference, self.opset_version)
        tensors = (value.const_value for value in program.graph.initializers.values())
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        onnx_ir.save(program, str(self.draft / _FILE), external_data=_WEIGHTS if size > _LARGEST_FILE else None)
        self.save_configs()

    def checks(self, form: Form, file: str = _FILE) -> Iterator[Check]:
        """Compares lengths that were not used in tracing, several rows, padding on the left, and positions beyond a
        sliding window or the original length of a scaling; with a cache also token by token.

        Raises:
            UnsupportedError: if onnxruntime cannot run the file.
        """
        model, session, ends = self.reference, Session(self.draft / file), _ends(self.parts)
        if not model.can_generate():
            # Encoders are padded on the right.
            masks = [mask.flip(-1) for mask in (padded(3), padded(24, 0, 5, 11), *map(padded, ends))]
            yield from plain_checks(model, masks, lambda inputs, _: session(inputs, []), session.runtime, TOLERANCE)
            return
        sample = _sample_cache(model)
        prefills = [(1, padded(1)), (40, padded(40)), (24, padded(24, 0, 5, 11))]
        after = [(1, padded(34, 0, 4)), (6, padded(39, 0, 4)), *((min(end, _TAIL), padded(end)) for end in ends)]
        for mode, calls in (("prefill", prefills), ("decode", after)):
            for length, mask in calls:
                yield from _in_a_call(model, session, sample, length, mask, mode)
        yield _step_by_step(model, session, sample)

    def finished(self, form: Form, checks: tuple[Check, ...]) -> tuple[Check, ...]:
        """Writes the quantised graph next to the other one, if it was requested."""
        if not self.quantize:
            return checks
        quantize(self.draft / _FILE)
        return checks + accepted(largest(self.checks(form, _QUANTIZED)))

    def usage(self, form: Form) -> str:
        """Python that runs it."""
        return "\n".join(("```python", _LOAD, _GENERATE if self.model.can_generate() else _ENCODE, "```"))


def quantize(path: Path) -> None:
    """Writes a copy of a graph with int8 matrices next to its file."""
    import onnx

    # Its import calls `logging.basicConfig`, which changes nothing if the root logger has a handler.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        with quiet():
            from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    finally:
        root.removeHandler(handler)
    # A scale for each block: with one for a whole matrix, its outliers round all other weights, and one for a whole
    # activation does the same to tokens.
    quantizer = MatMulNBitsQuantizer(
        onnx.load(path), bits=8, block_size=_BLOCK, is_symmetric=True, accuracy_level=_INT8_PRODUCTS
    )
    with quiet():
        quantizer.process()
    size = sum(len(tensor.raw_data) for tensor in quantizer.model.model.graph.initializer)
    target = str(path.with_name(_QUANTIZED))
    quantizer.model.save_model_to_file(target, use_external_data_format=size > _LARGEST_FILE)


class Session:
    """An ONNX file in onnxruntime.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.runtime = f"onnxruntime {onnxruntime.__version__}{', int8' if path.name == _QUANTIZED else ''}"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise UnsupportedError(f"{self.runtime} cannot load the graph: {error}") from error
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def __call__(self, tensors: dict[str, Tensor], past: Past) -> dict[str, Tensor]:
        """Runs it. Inputs that the graph does not read are left out."""
        names = ("key", "value")
        layers = [(index, zip(names, pair, strict=True)) for index, pair in enumerate(past)]
        cached = {f"past_key_values.{index}.{name}": tensor for index, layer in layers for name, tensor in layer}
        given = tensors | cached
        feed = {name: np.ascontiguousarray(given[name].numpy()) for name in self.inputs}
        try:
            outputs = self.session.run(None, feed)
        except Exception as error:
            shapes = {name: value.shape for name, value in feed.items() if name in tensors}
            raise UnsupportedError(f"{self.runtime} cannot run the graph on {shapes}: {error}") from error
        return dict(zip(self.outputs, map(torch.from_numpy, outputs), strict=True))


def _ends(parts: ModelParts) -> list[int]:
    """Lengths to compare at: those of every target, and beyond the native length if the scheme reaches further."""
    ends = {stop for _, stop in spans(parts.model)}
    lengths = None if parts.placed is None else parts.placed.lengths
    if lengths is not None and lengths.native is not None:
        beyond = lengths.native + 16
        if beyond <= min(lengths.reach.length or _FARTHEST, _FARTHEST):
            ends.add(beyond)
    return sorted(ends)


def _in_a_call(
    model: PreTrainedModel, session: Session, sample: Past, length: int, mask: Tensor, mode: str
) -> Iterator[Check]:
    """The difference at the last tokens under a mask; none if it is too long for the scheme.

    The cache contains a short text, repeated to its length. Random numbers would not have the size
    of real keys, and would hide differences in the new tokens or exaggerate them.
    """
    rows, before = len(mask), mask.shape[1] - length
    past, ids = _repeated(sample, rows, before), random_ids(model, length, rows)
    try:
        expected = run_decoder(model, ids, mask, past).logits
    except SequenceLengthError:
        return
    logits = session({"input_ids": ids, "attention_mask": mask}, past)["logits"]
    difference = difference_at_real_tokens(logits, expected, mask[:, before:])
    yield Check(session.runtime, mode, "logits", difference, TOLERANCE, f" of {length} tokens after {before}")


def _sample_cache(model: PreTrainedModel) -> Past:
    length = _SAMPLE
    while True:
        ids = random_ids(model, length)
        try:
            return cached(run_decoder(model, ids, torch.ones_like(ids), []))
        except SequenceLengthError:
            length //= 2


def _repeated(sample: Past, rows: int, length: int) -> Past:
    """A cache of some rows and length."""
    repeats = -(-length // sample[0][0].shape[2]) or 1

    def of_size(tensor: Tensor) -> Tensor:
        return tensor.repeat(rows, 1, repeats, 1)[:, :, :length].contiguous()

    return [(of_size(key), of_size(value)) for key, value in sample]


def _step_by_step(model: PreTrainedModel, session: Session, sample: Past) -> Check:
    """The difference over a prompt and the tokens after it, each with its own cache of the steps before."""
    prompt, steps = 9, 6
    mask = padded(prompt + steps, 0, 3)
    ids, past = random_ids(model, prompt + steps, len(mask)), _repeated(sample, len(mask), 0)
    expected = run_decoder(model, ids, mask, []).logits
    logits, start = [], 0
    for stop in range(prompt, prompt + steps + 1):
        output = session({"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}, past)
        logits.append(output["logits"])
        present = [value for name, value in output.items() if name.startswith("present")]
        past, start = list(zip(present[::2], present[1::2], strict=True)), stop
    difference = difference_at_real_tokens(torch.cat(logits, 1), expected, mask)
    return Check(session.runtime, "decode", "logits", difference, TOLERANCE, " token by token")


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
