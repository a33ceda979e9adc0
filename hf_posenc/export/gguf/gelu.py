"""Models with GELU, which llama.cpp computes less precisely than everything else.

On a CPU, llama.cpp looks GELU up in a table of its tanh form, with arguments and values in float16. Such a model is
therefore compared twice: as it is, with a wide limit, and without what the activations contribute, with a narrow one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import GgufForm

#: The forms of GELU (erf, tanh, and other roundings of its constants) differ by less than 5e-4. QuickGELU, ReLU and
#: SiLU differ from it by more than 1e-2.
_SAME_FUNCTION = 1e-3


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
def silent_activations(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context manager in which activations of a model are zero.

    Args:
        model: the model.
        names: its modules that compute an activation.
    """
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, inputs, output: torch.zeros_like(output))
        for name in names
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def without_activations(form: GgufForm) -> GgufForm:
    """The same model in which activations do not matter: the matrices that they are multiplied with are zero."""
    tensors = {
        name: tensor.new_zeros(1).expand_as(tensor) if name.endswith(".ffn_down.weight") else tensor
        for name, tensor in form.tensors.items()
    }
    return dataclasses.replace(form, tensors=tensors)
