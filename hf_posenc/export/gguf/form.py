"""The content of a GGUF file, before it is rounded to the precision of the file."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

#: Hyperparameters, by their keys without the name of the architecture ("block_count").
Metadata = dict[str, int | float | str | bool]


@dataclass(frozen=True)
class GgufForm:
    """A model in the terms of llama.cpp.

    Args:
        architecture: name of the architecture in llama.cpp.
        metadata: its hyperparameters.
        tensors: weights by their names in llama.cpp, `(out, in)` for matrices.
        carrier: what carries the scheme, in a few words.
        tokenizer: metadata of the tokenizer that the architecture needs, without the prefix "tokenizer.".
    """

    architecture: str
    metadata: Metadata
    tensors: dict[str, Tensor]
    carrier: str
    tokenizer: dict[str, int] = field(default_factory=dict)


def is_encoder(form: GgufForm) -> bool:
    """Whether llama.cpp returns hidden states for this architecture."""
    return form.architecture == "t5encoder" or form.metadata.get("attention.causal") is False
