"""llama.cpp's GELU, which is read from a table of float16 numbers on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError

#: The forms of GELU (erf, tanh, and other roundings of its constants) differ by less than 5e-4. QuickGELU, ReLU and SiLU
#: differ by more than 1e-2.
_SAME_FUNCTION = 1e-3
#: Outside of this interval, llama.cpp's GELU is 0 or the number itself.
_END_OF_TABLE = 10.0


def table_gelu(values: Tensor) -> Tensor:
    """GELU in its tanh form, of a float16 number and rounded to float16, as in ggml's CPU backend (GGML_GELU_FP16).

    Args:
        values: float32, of any shape.
    """
    looked_up = nn.functional.gelu(values.half().float(), approximate="tanh").half().float()
    inside = looked_up.where(values > -_END_OF_TABLE, 0.0)
    return inside.where(values < _END_OF_TABLE, values)


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
def with_table_gelu(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context manager in which some activations of a model are llama.cpp's GELU.

    Args:
        model: the model in float32.
        names: its modules that compute a GELU.
    """
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, inputs, output: table_gelu(inputs[0]))
        for name in names
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
