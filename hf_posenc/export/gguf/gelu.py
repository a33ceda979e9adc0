"""llama.cpp's GELU, which is not that of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError

#: Names of GELU and of its approximations in configs. llama.cpp computes all of them in the same way.
GELU_NAMES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")
#: The forms of GELU (erf, tanh, and other roundings of its constants) differ by less than 5e-4. QuickGELU, ReLU and
#: SiLU differ from it by more than 1e-2.
_SAME_FUNCTION = 1e-3
#: llama.cpp returns 0 below the negative of this, and its argument above it.
_LIMIT = 10.0


def has_gelu(model: PreTrainedModel) -> bool:
    """Whether a model has a GELU, in any of its forms."""
    return any(map(_is_gelu, model.modules()))


def _is_gelu(module: nn.Module) -> bool:
    return "gelu" in type(module).__name__.lower() and not any(module.children())


def refuse_other_activations(model: nn.Module, names: Sequence[str]) -> None:
    """Refuses activations other than GELU.

    Args:
        model: the model.
        names: its modules that compute an activation.

    Raises:
        UnsupportedError: with the difference.
    """
    grid = torch.linspace(-12.0, 12.0, 2401)
    expected = nn.functional.gelu(grid)
    for name in names:
        difference = float((model.get_submodule(name)(grid) - expected).abs().max())
        if not difference < _SAME_FUNCTION:
            kind = type(model.get_submodule(name)).__name__
            raise UnsupportedError(
                f"{type(model).__name__} has the activation {kind}, which differs from GELU by up to {difference:.2g}; "
                "these blocks of llama.cpp have GELU"
            )


@contextmanager
def gelu_of_llama_cpp(model: PreTrainedModel) -> Iterator[None]:
    """The model computes GELU as llama.cpp does on a CPU: by a table of float16 with the form that uses tanh.

    This changes hidden states by about 1e-3, which is as much as some wrong positions do. With the same GELU on both
    sides, a comparison shows everything else.
    """
    with ExitStack() as hooks:
        for module in filter(_is_gelu, model.modules()):
            hook = module.register_forward_hook(lambda _module, arguments, _output: table_gelu(arguments[0]))
            hooks.enter_context(hook)
        yield


def table_gelu(x: Tensor) -> Tensor:
    """GELU of a float32 tensor as in llama.cpp's table (`ggml_vec_gelu_f32`)."""
    rounded = nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -_LIMIT, 0.0, torch.where(x >= _LIMIT, x, rounded))
