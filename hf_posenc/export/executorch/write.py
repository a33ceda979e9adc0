"""The target "executorch": a program for phones and other small devices."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError, UsageError
from hf_posenc.export.executorch.program import LEAST, compare, example, save_program
from hf_posenc.export.onnx.graphs import run_plain
from hf_posenc.export.onnx.write import save_configs
from hf_posenc.export.records import Written
from hf_posenc.export.request import Request, refuse_encoder_decoder
from hf_posenc.patching.place.config_lengths import find_lengths
from hf_posenc.patching.place.encoding import current_encoding

_FILE = "model.pte"
#: Longest sequence by default. ExecuTorch plans memory for attention over all pairs of tokens.
_DEFAULT_LENGTH = 512


def write(request: Request, *, max_length: int | None = None) -> Written:
    """Writes `model.pte` in float32 for XNNPACK, ExecuTorch's backend for CPUs.

    The program takes one sequence of 1 to `max_length` tokens: `input_ids`, `attention_mask` and, if the model has
    them, `token_type_ids`, each `(1, length)` int64 and in this order. It has no cache. For a model that generates, it
    returns the logits of all tokens, and each new token costs a run over the whole text.

    Args:
        request: the model and where to write it.
        max_length: longest sequence, in tokens. ExecuTorch reserves memory for it. `None` for the length of the model,
            at most 512.

    Raises:
        UnsupportedError: for an encoder-decoder model, if the model cannot run `max_length` tokens or cannot be traced
            with an open length, or if ExecuTorch computes other numbers.
        UsageError: if `max_length` is not a whole number of at least 16, transformers is too old, or a dependency of
            ExecuTorch is missing.
    """
    refuse_encoder_decoder(request.model)
    longest = _default_length(request.model) if max_length is None else max_length
    if type(longest) is not int or longest < LEAST:
        raise UsageError(f"max_length is {longest!r}; expected a whole number of tokens, at least {LEAST}.")
    # The exporter freezes the weights and needs them on the CPU.
    reference = copy.deepcopy(request.model).float().cpu()
    outputs = _outputs(reference, longest)
    path = request.draft / _FILE
    save_program(reference, path, longest)
    checks = compare(reference, path, longest)
    save_configs(request)
    carrier = f"its own ExecuTorch program for sequences of up to {longest} tokens, without a cache"
    return Written(carrier, checks, _usage(reference, longest, outputs))


def _default_length(model: PreTrainedModel) -> int:
    encoding = current_encoding(model)
    if encoding is not None and encoding.lengths is not None:
        known = [encoding.lengths.current, encoding.lengths.reach.length]
    else:
        known = list(find_lengths(model.config.get_text_config()).values())
    return min([length for length in known if length is not None] + [_DEFAULT_LENGTH])


@torch.no_grad()
def _outputs(model: PreTrainedModel, longest: int) -> list[str]:
    """The names of the outputs, from a run of the longest sequence."""
    try:
        return list(run_plain(model, example(model, longest)))
    except (IndexError, RuntimeError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot run {longest} tokens, the longest sequence of the program: {error} Use a "
            "smaller max_length."
        ) from error


def _usage(model: PreTrainedModel, longest: int, outputs: list[str]) -> str:
    names = list(example(model, LEAST))
    text = (
        f"The inputs are {_listed(names)}, int64, `(1, length)` with up to {longest} tokens. The outputs are "
        f"{_listed(outputs)}. There is no cache"
    )
    if model.can_generate():
        text += ": each new token needs a run over the whole text"
    results = f"({outputs[0]},)" if len(outputs) == 1 else ", ".join(outputs)
    code = _CODE.replace("{names}", repr(names)).replace("{outputs}", results)
    return f"{text}.\n\n{code}"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_CODE = """```python
import torch
from executorch.runtime import Runtime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
program = Runtime.get().load_program("{folder}/model.pte")
method = program.load_method("forward")
batch = tokenizer("The dog chased another dog.", return_tensors="pt")
names = {names}
inputs = [batch[name] if name in batch else torch.zeros_like(batch["input_ids"]) for name in names]
{outputs} = method.execute(inputs)
```"""
