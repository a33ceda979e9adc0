"""Which modules of a model compute softmax attention, from their code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

_FUSED = frozenset(("ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention", "multi_head_attention_forward"))
_SOFTMAX = frozenset(("softmax", "Softmax", "XSoftmax", "stable_softmax"))


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules whose forward calls an attention function, or a softmax if they are named attention."""
    for path, module in model.named_modules():
        names = _names(module)
        named = "ttention" in type(module).__name__
        if names & _FUSED or isinstance(module, nn.MultiheadAttention) or (named and names & _SOFTMAX):
            yield path, module


def _names(module: nn.Module) -> set[str]:
    """Names in the code of a module's methods of its own class."""
    found: set[str] = set()
    for name, method in vars(type(module)).items():
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        if code is not None and not name.startswith("__init"):
            found |= set(code.co_names)
    return found


#: Parts of class names of what mixes tokens or pixels without softmax attention, and what it is.
_MIXERS = {
    "Mamba": "a state space",
    "Rwkv": "a linear recurrence",
    "xLSTM": "a recurrence",
    "Fourier": "a Fourier transform",
    "Mixer": "a mixing MLP",
    "Conv": "convolution",
}


def structural_reason(model: nn.Module) -> str:
    """What a model without softmax attention has instead; empty if it has softmax attention."""
    if any(True for _ in attention_modules(model)):
        return ""
    names = {type(module).__name__ for module in model.modules()}
    found = next((word for part, word in _MIXERS.items() if any(part in name for name in names)), "")
    return found or "other modules"
