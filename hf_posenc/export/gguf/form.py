"""The content of a GGUF file, before it is rounded to the precision of the file."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GgufForm:
    """A model in the terms of llama.cpp.

    Args:
        architecture: name of the architecture in llama.cpp.
        metadata: its hyperparameters, by key without the name of the architecture ("block_count").
        tensors: weights by their names in llama.cpp, `(out, in)` for matrices.
        carrier: what carries the scheme, in a few words.
        gelu: names of the modules of the model that compute a GELU, if it has that activation.
    """

    architecture: str
    metadata: dict[str, int | float | str | bool]
    tensors: dict[str, Tensor]
    carrier: str
    gelu: tuple[str, ...] = ()
