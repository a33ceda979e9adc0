"""Names of weights in llama.cpp."""

from __future__ import annotations

import gguf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.errors import UnsupportedError

_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}


def named_weights(
    model: PreTrainedModel, architecture: str, layers: int, without: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Returns a model's weights by their names in llama.cpp, without those of the scheme and without a tied output.

    Matrices are `(out, in)`.

    Args:
        model: the model.
        architecture: the architecture in llama.cpp.
        layers: number of layers.
        without: names of modules whose weights are left out.

    Raises:
        UnsupportedError: for a weight that the architecture does not have.
    """
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], layers)
    transposed = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)}
    found: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if not {ATTRIBUTE, *without}.isdisjoint(key.split(".")):
            continue
        # The list of names has some classes with the prefix of the base model and some without.
        spellings = (key, key.removeprefix(f"{model.base_model_prefix}."))
        name = next(filter(None, (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in spellings)), None)
        if name is None and any(tensor.data_ptr() == other.data_ptr() for other in found.values()):
            continue  # A second name of the same weight.
        if name is None:
            raise UnsupportedError(f"the architecture {architecture!r} of llama.cpp has no weight like {key}")
        found[name] = tensor.detach().T if key in transposed else tensor.detach()
    output, embedding = found.get("output.weight"), found["token_embd.weight"]
    if output is not None and output.data_ptr() == embedding.data_ptr():
        del found["output.weight"]  # llama.cpp then uses the embeddings.
    return found
