"""Names of weights in llama.cpp."""

from __future__ import annotations

import gguf
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.errors import UnsupportedError

_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}


def named_weights(
    model: PreTrainedModel, architecture: str, layers: int, without: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Returns a model's weights by their names in llama.cpp, without those of the scheme and without a tied output.

    Args:
        model: the model.
        architecture: the architecture in llama.cpp.
        layers: number of layers.
        without: names of modules whose weights are left out.

    Raises:
        UnsupportedError: for a weight that the architecture does not have.
    """
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], layers)
    found: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if not {ATTRIBUTE, *without}.isdisjoint(key.split(".")):
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None and any(tensor.data_ptr() == other.data_ptr() for other in found.values()):
            continue  # A second name of the same weight.
        if name is None:
            raise UnsupportedError(f"the architecture {architecture!r} of llama.cpp has no weight like {key}")
        found[name] = tensor.detach()
    output, embedding = found.get("output.weight"), found["token_embd.weight"]
    if output is not None and output.data_ptr() == embedding.data_ptr():
        del found["output.weight"]  # llama.cpp then uses the embeddings.
    return found
