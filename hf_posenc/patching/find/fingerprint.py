"""Which weights a scheme was trained on: a few values of many tensors, by which the same base is known again.

The same base in another dtype, or quantised (what is left unquantised tells: embeddings and norms), is accepted.
Another checkpoint of the same shape is not, be it a fine-tuned sibling. What is compared exactly:

- parameters of the base model, which include the native tables and biases that a scheme put out of action;
- not: heads, poolers and `modules_to_save` (stock code initialises those at random where a checkpoint has none), the
  scheme's own parameters, adapters, and weights that an adapter changed in place.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.entry import ATTRIBUTE

_MATRICES, _VECTORS, _VALUES = 64, 32, 8
#: Ways to start LoRA that leave the base as it is. Others (PiSSA, OLoRA, CorDA, LoftQ) change the weights below.
_HARMLESS_STARTS = ("gaussian", "orthogonal", "eva")

_HALVES = (torch.bfloat16, torch.float16)

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
        By name: `shape`, `values` as base64 of little-endian float32, and the `dtype` they had, if that is a half.
    """
    return {
        name: {"shape": list(sample.shape), **_encode(sample)}
        for name, sample in samples(model, adapters, state).items()
    }


def samples(
    model: PreTrainedModel,
    adapters: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
    *,
    read_offloaded: bool = True,
) -> dict[str, Sample]:
    """What a fingerprint is made of: a few milliseconds, unless weights have to be read from where they are offloaded.

    Args:
        model: the transformers model, with or without adapters inside.
        adapters: configs of the PEFT adapters inside, which say what they changed in place.
        state: a full state dict of the model, for one whose own parameters are sharded.
        read_offloaded: whether weights that accelerate keeps elsewhere are read.
    """
    configs = list((adapters or {}).values())
    biases = any(getattr(config, "bias", "none") != "none" for config in configs)
    starts = {getattr(config, "init_lora_weights", True) for config in configs}
    mutated = any(isinstance(start, str) and start not in _HARMLESS_STARTS for start in starts)
    found = {}
    for name, place in _base_parameters(model, skip_adapted=mutated):
        tensor = place.tensor(state, read_offloaded)
        if tensor is not None and not (biases and "bias" in name):
            found[name] = tensor
    matrices = [name for name, tensor in found.items() if tensor.dim() > 1]
    vectors = [name for name, tensor in found.items() if tensor.dim() == 1]
    chosen = [*_spread(matrices, _MATRICES), *_spread(vectors, _VECTORS)]
    return {name: _sample(found[name], tuple(found[name].shape)) for name in chosen}


def difference(saved: Fingerprint, model: PreTrainedModel) -> str | None:
    """What distinguishes a model's weights from those a fingerprint was taken of; `None` if they are the same.

    Args:
        saved: what `fingerprint` returned.
        model: the model that should have these weights, in any dtype, quantised or not.

    Returns:
        A clause for an error message, such as "embed_tokens.weight has the shape [48, 32] and not [64, 32]".
    """
    differing, comparable = _compare({name: _decode(entry) for name, entry in saved.items()}, model)
    if differing:
        return f"{differing[0]} ({len(differing)} of {len(saved)} tensors differ)"
    if not comparable:
        return (
            f"none of the {len(saved)} tensors that were recorded can be compared: they are quantised, sharded or "
            "offloaded here, or the same in every model"
        )
    return None


def changed(before: Mapping[str, Sample], model: PreTrainedModel) -> str | None:
    """What distinguishes a model's weights from what they were; `None` if nothing shows a difference.

    Args:
        before: what `samples` returned.
        model: the same model, later.
    """
    differing, _ = _compare(before, model)
    return f"{differing[0]} ({len(differing)} of {len(before)} tensors differ)" if differing else None


def _compare(saved: Mapping[str, Sample], model: PreTrainedModel) -> tuple[list[str], bool]:
    """A clause for each tensor that differs, and whether any could tell a model from another one."""
    places = dict(_base_parameters(model))
    tensors = {name: place.tensor(None) for name, place in places.items()}
    # Quantised layers may keep their weight under another name.
    incomplete = any(tensor is None for tensor in tensors.values()) or getattr(model, "is_quantized", False)
    embedding = model.get_input_embeddings()
    table = None if embedding is None else getattr(embedding, "weight", None)
    shapes, pairs = [], {}
    for name, expected in saved.items():
        tensor = tensors.get(name)
        if tensor is None:
            if name not in places and not incomplete:
                shapes.append(f"it has no {name}")
            continue
        shape = expected.shape
        # Tokens may have been added to the embeddings since, or taken away; their rows come last.
        resized = places[name].parameter is table and tensor.shape[0] >= shape[0] // 2
        if tuple(tensor.shape) != shape and not (resized and tuple(tensor.shape[1:]) == shape[1:]):
            shapes.append(f"{name} has the shape {list(tensor.shape)} and not {list(shape)}")
            continue
        found = _sample(tensor, shape)
        if len(found) != len(expected):
            shapes.append(f"{name} was recorded with {len(expected)} values and not {len(found)}")
        else:
            pairs[name] = (expected, found)
    comparable = any((expected.values != expected.values[0]).any() for expected, _ in pairs.values())
    return shapes + _differing_values(pairs), comparable


@dataclass(frozen=True)
class Sample:
    """Values of a tensor in float32, the dtype they had, and the shape of the tensor."""

    values: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.values)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """The values as a model in this dtype would have them, in float32."""
        return self.values.to(dtype).float()


def _differing_values(pairs: Mapping[str, tuple[Sample, Sample]]) -> list[str]:
    """Which samples are not the same numbers, apart from a rounding to half precision on one side.

    A tensor counts as rounded if it has that dtype, or if every number of its model is one that this dtype has (a model
    that was loaded in half precision and converted): a 1.0 that happens to be one proves nothing.
    """
    whole = {
        (side, dtype): all(torch.equal(pair[side].rounded(dtype), pair[side].values) for pair in pairs.values())
        for side in (0, 1)
        for dtype in _HALVES
    }
    differing = []
    for name, pair in pairs.items():
        halves = [{dtype for dtype in _HALVES if pair[side].dtype == dtype or whole[side, dtype]} for side in (0, 1)]
        expected, found = (one.values for one in pair)
        same = torch.equal(expected, found) or any(
            torch.equal(pair[0].rounded(dtype), pair[1].rounded(dtype)) for dtype in halves[0] | halves[1]
        )
        # bfloat16 rounds by at most 2**-9 of a value's power of two, float16 by 2**-12, or 2**-25 near zero.
        crossed = bool(halves[0] and halves[1]) and halves[0] != halves[1]
        if not same and not (crossed and torch.allclose(expected, found, rtol=2**-8 + 2**-11, atol=2**-24)):
            worst = int((expected - found).abs().argmax())
            differing.append(f"{name} has {found[worst]:.6g} where {expected[worst]:.6g} was")
    return differing


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

    def tensor(self, state: Mapping[str, Tensor] | None, read_offloaded: bool = True) -> Tensor | None:
        """Its values; `None` if it is quantised, or not at hand in this process."""
        tensor = self.parameter if state is None else state.get(self.path, self.parameter)
        if type(tensor) not in (nn.Parameter, Tensor) or not tensor.is_floating_point() or tensor.element_size() < 2:
            return None
        if tensor.device.type == "meta":
            return _offloaded(self.module, self.attribute) if read_offloaded else None
        return tensor.detach()


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


def _sample(tensor: Tensor, shape: tuple[int, ...]) -> Sample:
    """Values at places that depend on `shape` only, in the first half of the rows (added tokens come last)."""
    values = tensor[tuple(torch.from_numpy(places).to(tensor.device) for places in _places(shape))]
    return Sample(values.to("cpu", torch.float32), tensor.dtype, shape)


@functools.cache
def _places(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rows = max(1, shape[0] // 2) if len(shape) > 1 else shape[0]
    size = rows * int(np.prod(shape[1:], dtype=np.int64))
    # Multiples of the golden ratio spread over rows and columns alike.
    places = sorted({((index + 1) * 2654435769 % 2**32) * size >> 32 for index in range(min(_VALUES, size))})
    return tuple(np.asarray(part) for part in np.unravel_index(places, shape))


def _encode(sample: Sample) -> dict[str, str]:
    values = base64.b64encode(sample.values.numpy().astype("<f4").tobytes()).decode("ascii")
    return {"values": values} | ({"dtype": str(sample.dtype).removeprefix("torch.")} if sample.dtype in _HALVES else {})


def _decode(entry: Mapping[str, Any]) -> Sample:
    values = np.frombuffer(base64.b64decode(entry["values"], validate=True), dtype="<f4").astype(np.float32)
    return Sample(torch.from_numpy(values), getattr(torch, entry.get("dtype", "float32")), tuple(entry["shape"]))


def check_entry(entry: Any) -> None:
    """Raises a ValueError for something that is not an entry of a fingerprint."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    sizes = isinstance(shape, list) and bool(shape) and all(type(size) is int and size > 0 for size in shape)
    dtypes = ("float32", *(str(dtype).removeprefix("torch.") for dtype in _HALVES))
    if not sizes or not isinstance(entry.get("values"), str) or entry.get("dtype", "float32") not in dtypes:
        raise ValueError(f"{entry!r} has no shape, values and dtype")
    _decode(entry)
