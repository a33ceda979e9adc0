"""Which weights a scheme was trained on: a few values of many tensors, by which the same base is known again.

The same base in another dtype, or quantised (what is left unquantised tells: embeddings and norms), is accepted.
Another checkpoint of the same shape is not, be it a fine-tuned sibling. What is compared exactly:

- parameters of the base model, which include the native tables and biases that a scheme put out of action;
- not: heads, poolers and `modules_to_save` (stock code initialises those at random where a checkpoint has none), the
  scheme's own parameters, adapters, and weights that an adapter changed in place.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.entry import ATTRIBUTE

_MATRICES, _VECTORS, _VALUES = 64, 32, 8
#: Ways to start LoRA that leave the base as it is. Others (PiSSA, OLoRA, CorDA, LoftQ) change the weights below.
_HARMLESS_STARTS = ("gaussian", "orthogonal", "eva")

Fingerprint = dict[str, dict[str, Any]]


def fingerprint(
    model: PreTrainedModel, adapters: Mapping[str, Any] | None = None, state: Mapping[str, Tensor] | None = None
) -> Fingerprint:
    """A few values of many tensors of a model, a few kilobytes as JSON.

    Args:
        model: the transformers model, with or without adapters inside.
        adapters: configs of the PEFT adapters inside, which say what they changed in place.
        state: a full state dict of the model, for one whose own parameters are sharded.

    Returns:
        By name: `shape`, and `values` as base64 of little-endian float32.
    """
    configs = list((adapters or {}).values())
    biases = any(getattr(config, "bias", "none") != "none" for config in configs)
    starts = {getattr(config, "init_lora_weights", True) for config in configs}
    mutated = any(isinstance(start, str) and start not in _HARMLESS_STARTS for start in starts)
    found = {}
    for name, place in _base_parameters(model, skip_adapted=mutated):
        tensor = place.tensor(state)
        if tensor is not None and not (biases and "bias" in name):
            found[name] = tensor
    matrices = [name for name, tensor in found.items() if tensor.dim() > 1]
    vectors = [name for name, tensor in found.items() if tensor.dim() == 1]
    chosen = [*_spread(matrices, _MATRICES), *_spread(vectors, _VECTORS)]
    return {
        name: {"shape": list(found[name].shape), "values": _encode(_sample(found[name], tuple(found[name].shape)))}
        for name in chosen
    }


def difference(saved: Fingerprint, model: PreTrainedModel) -> str | None:
    """What distinguishes a model's weights from those a fingerprint was taken of; `None` if they are the same.

    Args:
        saved: what `fingerprint` returned.
        model: the model that should have these weights, in any dtype, quantised or not.

    Returns:
        A clause for an error message, such as "embed_tokens.weight has the shape [48, 32] and not [64, 32]".
    """
    places = dict(_base_parameters(model))
    tensors = {name: place.tensor(None) for name, place in places.items()}
    # Quantised layers may keep their weight under another name.
    incomplete = any(tensor is None for tensor in tensors.values()) or getattr(model, "is_quantized", False)
    embedding = model.get_input_embeddings()
    table = None if embedding is None else getattr(embedding, "weight", None)
    telling, differing = 0, []
    for name, entry in saved.items():
        tensor = tensors.get(name)
        if tensor is None:
            if name not in places and not incomplete:
                differing.append(f"it has no {name}")
            continue
        expected, shape = _decode(entry["values"]), tuple(entry["shape"])
        # Tokens may have been added to the embeddings since, or taken away; their rows come last.
        resized = places[name].parameter is table and tensor.shape[0] >= shape[0] // 2
        if tuple(tensor.shape) != shape and not (resized and tuple(tensor.shape[1:]) == shape[1:]):
            differing.append(f"{name} has the shape {list(tensor.shape)} and not {list(shape)}")
            continue
        values = _sample(tensor, shape)
        if values.shape != expected.shape:
            differing.append(f"{name} was recorded with {len(expected)} values and not {len(values)}")
        elif not _same(expected, values):
            worst = int((expected - values).abs().argmax())
            differing.append(f"{name} has {values[worst]:.6g} where {expected[worst]:.6g} was")
        elif bool((expected != expected[0]).any()):
            telling += 1
    if differing:
        return f"{differing[0]} ({len(differing)} of {len(saved)} tensors differ)"
    if not telling:
        return (
            f"none of the {len(saved)} tensors that were recorded can be compared: they are quantised, sharded or "
            "offloaded here, or the same in every model"
        )
    return None


class _Place:
    """Where a parameter of a base model is.

    Args:
        path: its name in the state dict of the model.
        module: what holds it.
        attribute: its name there.
    """

    def __init__(self, path: str, module: nn.Module, attribute: str) -> None:
        self.path, self.module, self.attribute = path, module, attribute
        self.parameter: Tensor = module._parameters[attribute]  # type: ignore[assignment]

    def tensor(self, state: Mapping[str, Tensor] | None) -> Tensor | None:
        """Its values; `None` if it is quantised, or not at hand in this process."""
        tensor = self.parameter if state is None else state.get(self.path, self.parameter)
        if type(tensor) not in (nn.Parameter, Tensor) or not tensor.is_floating_point() or tensor.element_size() < 2:
            return None
        return _offloaded(self.module, self.attribute) if tensor.device.type == "meta" else tensor.detach()


def _base_parameters(model: PreTrainedModel, skip_adapted: bool = False) -> Iterator[tuple[str, _Place]]:
    base = model.base_model
    prefix = next((name for name, module in model.named_modules() if module is base), "")
    yield from _walk(base, "", f"{prefix}." if prefix else "", skip_adapted)


def _walk(module: nn.Module, name: str, path: str, skip_adapted: bool) -> Iterator[tuple[str, _Place]]:
    """Parameters by the names they have in a stock model: through what PEFT wraps, without what it adds."""
    below = module._modules
    if isinstance(below.get("modules_to_save"), nn.Module):
        return
    for wrapped in ("base_layer", "original_module", "token_adapter"):
        inner = below.get(wrapped)
        if isinstance(inner, nn.Module):
            if not (wrapped == "base_layer" and (skip_adapted or getattr(module, "merged", False))):
                yield from _walk(inner, name, f"{path}{wrapped}.", skip_adapted)
            return
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{name}{attribute}", _Place(f"{path}{attribute}", module, attribute)
    for child, inner in below.items():
        if isinstance(inner, nn.Module) and child not in (ATTRIBUTE, "pooler"):
            yield from _walk(inner, f"{name}{child}.", f"{path}{child}.", skip_adapted)


def _offloaded(module: nn.Module, attribute: str) -> Tensor | None:
    """The values of a weight that accelerate keeps elsewhere."""
    hook = module.__dict__.get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        weights = getattr(one, "weights_map", None)
        if weights is not None and attribute in weights:
            return weights[attribute]
    return None


def _spread(names: list[str], most: int) -> list[str]:
    count = min(len(names), most)
    return [names[index * len(names) // count] for index in range(count)]


def _sample(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values at places that depend on `shape` only, in the first half of the rows (added tokens come last)."""
    rows = max(1, shape[0] // 2) if len(shape) > 1 else shape[0]
    size = rows * int(np.prod(shape[1:], dtype=np.int64))
    # Multiples of the golden ratio spread over rows and columns alike.
    places = sorted({((index + 1) * 2654435769 % 2**32) * size >> 32 for index in range(min(_VALUES, size))})
    positions = [torch.tensor(part) for part in np.unravel_index(places, shape)]
    return tensor[tuple(position.to(tensor.device) for position in positions)].to("cpu", torch.float32)


def _same(expected: Tensor, found: Tensor) -> bool:
    """Whether two samples are the same numbers, one of them possibly rounded to a half precision."""
    if torch.equal(expected, found):
        return True
    rounded = {}
    for dtype in (torch.bfloat16, torch.float16):
        ends = [values.to(dtype).float() for values in (expected, found)]
        rounded[dtype] = [torch.equal(end, values) for end, values in zip(ends, (expected, found), strict=True)]
        if any(rounded[dtype]) and torch.equal(*ends):
            return True
    crossed = rounded[torch.bfloat16][0] and rounded[torch.float16][1]
    crossed |= rounded[torch.float16][0] and rounded[torch.bfloat16][1]
    # Rounded to bfloat16 (by at most 2**-9 of the value's power of two) there, and to float16 (2**-12) here.
    return crossed and torch.allclose(expected, found, rtol=2**-8 + 2**-11, atol=2**-24)


def _encode(values: Tensor) -> str:
    return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").astype(np.float32))
