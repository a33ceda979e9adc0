"""llama.cpp's GELU, which is not that of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

#: Names of GELU and of its approximations in configs. llama.cpp computes all of them in the same way.
GELU_NAMES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")
_GELU: tuple[type[nn.Module], ...] = (nn.GELU, *(type(ACT2FN[name]) for name in GELU_NAMES))
#: llama.cpp returns 0 below the negative of this, and its argument above it.
_LIMIT = 10.0


def has_gelu(model: PreTrainedModel) -> bool:
    """Whether a model has a GELU, in any of its forms."""
    return any(isinstance(module, _GELU) for module in model.modules())


@contextmanager
def gelu_of_llama_cpp(model: PreTrainedModel) -> Iterator[None]:
    """The model computes GELU as llama.cpp does on a CPU: by a table of float16 with the form that uses tanh.

    This changes hidden states by about 1e-3, which is as much as some wrong positions do. With the same GELU on both
    sides, a comparison shows everything else.
    """
    hooks = [
        module.register_forward_hook(lambda _module, arguments, _output: table_gelu(arguments[0]))
        for module in model.modules()
        if isinstance(module, _GELU)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def table_gelu(x: Tensor) -> Tensor:
    """GELU of a float32 tensor as in llama.cpp's table (`ggml_vec_gelu_f32`)."""
    rounded = nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -_LIMIT, 0.0, torch.where(x >= _LIMIT, x, rounded))
