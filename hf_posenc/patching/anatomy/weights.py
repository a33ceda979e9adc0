"""The weights of a model: where they are, and samples that identify those that a scheme was trained on.

Weights may be offloaded to the CPU or to disk by accelerate, be on another device than the input, or be partitioned:
with ZeRO-3 of DeepSpeed, each process keeps a part of a weight, and the parameter of the model is empty.

A fingerprint consists of a few values of many tensors. The same base model is accepted in another dtype, or quantised
(its unquantised tensors are compared: embeddings and norms). Another checkpoint with the same shapes is refused, even
if it was fine-tuned from the same model.

- Compared: the parameters of the base model, including native tables and biases that a scheme disables.
- Not compared: heads and poolers (stock code initialises them at random if a checkpoint lacks them), and the parameters
  of the scheme.

PEFT moves, copies, replicates and changes modules. While a model contains PEFT modules, its base is known by samples
that were taken before (`SchemeRecord.base_weights`). Only weights that are trained outside of PEFT are read again.
"""

from __future__ import annotations

import base64
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.entry import ATTRIBUTE

Module = TypeVar("Module", bound=nn.Module)
#: Attributes that accelerate's hooks set on a module.
_HOOKED = ("_hf_hook", "_old_forward", "forward")


@contextmanager
def onload_weights(part: nn.Module) -> Iterator[None]:
    """Context manager in which the weights of a part are whole, on its execution device.

    Hooks of accelerate and DeepSpeed do this around `forward` only, and a patched model calls other methods too.

    Args:
        part: the part whose methods are called in the block.
    """
    # Most parts have no submodules, and iterating over `modules()` in every layer slows decoding down.
    modules = part.modules() if part._modules else (part,)
    hooked = [module for module in modules if "_hf_hook" in module.__dict__]
    with gathered(part.parameters()):
        for module in hooked:
            module.__dict__["_hf_hook"].pre_forward(module)
        try:
            yield
        finally:
            for module in hooked:
                module.__dict__["_hf_hook"].post_forward(module, None)


def copied_to(part: Module, device: torch.device) -> Module:
    """A copy of a part that computes with copies of its weights on `device`.

    Gradients flow back through the copies. A copy does not outlive the forward call for which it is made, because the
    weights may change after it.
    """
    with onload_weights(part):
        return copied(part, lambda weight: weight.to(device))


def copied(module: Module, change: Callable[[Tensor], Tensor]) -> Module:
    """A copy of a module, and of those inside it, with changed weights. Weights can be set on it alone."""
    made = copy.copy(module)
    state: dict[str, Any] = dict(module.__dict__)
    made.__dict__ = state
    if "_hf_hook" in state:
        for name in _HOOKED:
            state.pop(name, None)
    if getattr(state.get("forward"), "__self__", None) is module:
        # accelerate does not delete this attribute when it removes a hook.
        del state["forward"]
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: None if weight is None else change(weight) for name, weight in state[kind].items()}
    children = module._modules.items()
    state["_modules"] = {name: None if child is None else copied(child, change) for name, child in children}
    return made


def execution_device(module: nn.Module) -> torch.device:
    """The device of a module; for weights offloaded by accelerate, the device on which they are executed."""
    for inner in module.modules():
        device = getattr(inner.__dict__.get("_hf_hook"), "execution_device", None)
        if device is not None:
            return torch.device(device)
    devices = [parameter.device for parameter in module.parameters()] or [torch.device("cpu")]
    # In a model that is built without memory, DiffLlama's `torch.normal` makes its numbers on the CPU.
    return next((device for device in devices if device.type == "meta"), devices[0])


def stored(module: nn.Module, name: str = "weight") -> Tensor:
    """A weight of a module; if it is offloaded or partitioned, a parameter with its values."""
    weight: Tensor = getattr(module, name)
    values = _offloaded(module, name) if weight.is_meta else _gathered(weight) if is_partitioned(weight) else None
    return weight if values is None else nn.Parameter(values, weight.requires_grad)


def is_partitioned(weight: Tensor) -> bool:
    """Whether a parameter is empty because DeepSpeed has partitioned it (ZeRO-3)."""
    return hasattr(weight, "ds_shape") and weight.shape != weight.ds_shape


def has_partitioned(model: nn.Module) -> bool:
    """Whether weights of a model are partitioned."""
    return any(hasattr(weight, "ds_shape") and is_partitioned(weight) for weight in model.parameters())


def shape_of(weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight, also of one that is partitioned."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


@contextmanager
def gathered(weights: Iterable[Tensor]) -> Iterator[None]:
    """Context manager in which weights that are partitioned have their values. All processes must enter it."""
    partitioned = list(filter(is_partitioned, weights))
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        yield


def _gathered(weight: Tensor) -> Tensor:
    with gathered([weight]):
        return weight.detach().clone()


@contextmanager
def gathered_in_forwards(model: nn.Module) -> Iterator[None]:
    """Context manager in which every module gathers the partitioned weights of itself and its children for its forward.

    The hooks of DeepSpeed's engine do this, but a model that was only loaded has no engine.
    """
    modules = [*model.modules()] if has_partitioned(model) and not has_engine(model) else []
    running: list[ExitStack] = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append(ExitStack())
        owners = (module, *module.children())
        running[-1].enter_context(gathered(weight for owner in owners for weight in owner.parameters(recurse=False)))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop().close()

    with ExitStack() as handles:
        for module in modules:
            handles.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            handles.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def has_engine(model: nn.Module) -> bool:
    """Whether an engine of DeepSpeed runs a model with ZeRO-3."""
    return any(type(module._parameters).__name__ == "ZeROOrderedDict" for module in model.modules())


def computed_buffers(scheme: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """The buffers of custom parts that are computed and not saved: the module of each, its name, and its values."""
    places = ((module, name) for module in scheme.modules() for name in module._non_persistent_buffers_set)
    return [(module, name, buffer) for module, name in places if (buffer := module._buffers[name]) is not None]


#: Children of modules that are not compared.
_LEFT_OUT = (ATTRIBUTE, "pooler")
_MATRICES, _VECTORS, _VALUES = 64, 32, 8
#: Merging an adapter and taking it out again leaves a rounding in float32, relative to the largest sampled value.
_ROUNDING = 2.0**-19
_HALF_DTYPES = (torch.bfloat16, torch.float16)
Fingerprint = dict[str, dict[str, Any]]


def fingerprint(
    model: PreTrainedModel, recorded: Mapping[str, Sample] | None = None, state: Mapping[str, Tensor] | None = None
) -> Fingerprint:
    """A few values of many tensors of a model; a few kilobytes as JSON.

    Args:
        model: the transformers model, with or without PEFT adapters.
        recorded: the samples that were taken before PEFT touched it.
        state: a full state dict of the model, if its own parameters are sharded.

    Returns:
        By name: `shape`, `values` as base64 of little-endian float32, and their `dtype` if it is a half-precision one.
    """
    recent = samples(model, state, gather=False)
    if touched_by_peft(model):
        places = _base_parameters(model)
        trained = {name: sample for name, sample in recent.items() if places[name].parameter.requires_grad}
        recent = {**(recent if state else {}), **(recorded or {}), **trained}
    return {name: {"shape": list(sample.shape), **_encode(sample)} for name, sample in recent.items()}


def samples(
    model: PreTrainedModel,
    state: Mapping[str, Tensor] | None = None,
    *,
    read_offloaded: bool = True,
    gather: bool = True,
) -> dict[str, Sample]:
    """The samples that a fingerprint consists of. Takes a few milliseconds, unless offloaded weights have to be read.

    Args:
        model: the transformers model. PEFT's modules in it are left out.
        state: a full state dict of the model, if its own parameters are sharded.
        read_offloaded: whether to read weights that accelerate has offloaded.
        gather: whether to read weights that are partitioned. All processes must do this.
    """
    # Replicated layers share their parameters: the first name is that of the base model.
    places = {id(place.parameter): (name, place) for name, place in reversed(_base_parameters(model).items())}
    tensors = {name: place.tensor(state, read_offloaded, gather) for name, place in reversed(places.values())}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in present.items()}
    matrices = [name for name, shape in shapes.items() if len(shape) > 1 and 0 not in shape]
    vectors = [name for name, shape in shapes.items() if len(shape) == 1 and 0 not in shape]
    chosen = [*_spread(matrices, _MATRICES), *_spread(vectors, _VECTORS)]
    return {name: _sample(present[name], shapes[name]) for name in chosen}


def difference(saved: Fingerprint, model: PreTrainedModel, recorded: Mapping[str, Sample] | None = None) -> str | None:
    """Describes how a model's base weights differ from those of a fingerprint; `None` if they are the same.

    Args:
        saved: the result of `fingerprint`.
        model: the model that should have these weights, in any dtype, quantised or not, with or without PEFT adapters.
        recorded: the samples that were taken before PEFT touched it.

    Returns:
        A clause for an error message, such as "embed_tokens.weight has the shape [48, 32] instead of [64, 32]".
    """
    expected = {name: _decode(entry) for name, entry in saved.items()}
    differing, compared = _compare(expected, model, recorded or {}, gather=True)
    if differing:
        return f"{differing[0]} ({len(differing)} of {len(saved)} tensors differ)"
    # Norms of ones are no evidence, unless nothing else was left to record.
    varying = {name for name, sample in expected.items() if (sample.values != sample.values[0]).any()}
    if not compared or (varying and compared.isdisjoint(varying)):
        return (
            f"none of the {len(saved)} recorded tensors can be compared: in this model they are quantised, sharded or "
            "offloaded, or they have constant values"
        )
    return None


def touched_by_peft(model: nn.Module) -> bool:
    """Whether a model contains modules of PEFT."""
    return bool(_classes_of_peft(model))


def changed(before: Mapping[str, Sample], model: PreTrainedModel) -> str | None:
    """Describes how a model's weights have changed; `None` if no change was found."""
    differing, _ = _compare(before, model, {}, gather=False)
    return f"{differing[0]} ({len(differing)} of {len(before)} tensors differ)" if differing else None


def _compare(
    saved: Mapping[str, Sample], model: PreTrainedModel, recorded: Mapping[str, Sample], *, gather: bool
) -> tuple[list[str], set[str]]:
    """A clause for each tensor that differs, and the names of those whose values were compared."""
    places = _base_parameters(model)
    tensors = {name: place.tensor(None, gather=gather) for name, place in places.items()}
    touched = touched_by_peft(model)
    # Quantised layers may store their weight under another name.
    incomplete = touched or any(tensor is None for tensor in tensors.values()) or getattr(model, "is_quantized", False)
    embedding = model.get_input_embeddings()
    table = None if embedding is None else getattr(embedding, "weight", None)
    shapes, pairs = [], {}
    for name, expected in saved.items():
        tensor = tensors.get(name)
        trained = name in places and places[name].parameter.requires_grad
        before = recorded.get(name) if touched and not (trained and tensor is not None) else None
        source = tensor if before is None else before
        if source is None:
            if name not in places and not incomplete:
                shapes.append(f"it has no {name}")
            continue
        shape, present = expected.shape, shape_of(source) if isinstance(source, Tensor) else source.shape
        # The embeddings may have been resized since then, which adds or removes rows at the end.
        resized = before is not None or (places[name].parameter is table and present[0] >= shape[0] // 2)
        if present != shape and not (resized and present[1:] == shape[1:]):
            shapes.append(f"{name} has the shape {list(present)} instead of {list(shape)}")
        elif isinstance(source, Tensor) or present == shape:
            sample = _sample(source, shape) if isinstance(source, Tensor) else source
            if len(sample) != len(expected):
                shapes.append(f"{name} was recorded with {len(expected)} values instead of {len(sample)}")
            else:
                pairs[name] = (expected, sample)
    return shapes + _differing_values(pairs), set(pairs)


@dataclass(frozen=True)
class Sample:
    """Some values of a tensor in float32, and the original dtype and shape of the tensor."""

    values: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.values)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """The values rounded to `dtype`, in float32."""
        return self.values.to(dtype).float()


def _differing_values(pairs: Mapping[str, tuple[Sample, Sample]]) -> list[str]:
    """A clause for each pair of samples that differs by more than a rounding to half precision on one side.

    A sample counts as rounded if it has a half-precision dtype, or if this dtype can represent all samples of its model
    (a model that was loaded in half precision and converted). A single representable value (1.0) is no evidence.
    """
    whole = {
        (side, dtype): all(torch.equal(pair[side].rounded(dtype), pair[side].values) for pair in pairs.values())
        for side in (0, 1)
        for dtype in _HALF_DTYPES
    }
    differing = []
    for name, pair in pairs.items():
        halves = [{each for each in _HALF_DTYPES if pair[side].dtype == each or whole[side, each]} for side in (0, 1)]
        expected, present = (sample.values for sample in pair)
        rounding = _ROUNDING * float(expected.abs().max()) if len(expected) else 0.0
        same = torch.allclose(expected, present, rtol=0, atol=rounding) or any(
            torch.equal(pair[0].rounded(dtype), pair[1].rounded(dtype)) for dtype in halves[0] | halves[1]
        )
        # bfloat16 rounds by at most 2**-9 of a value's power of two, float16 by 2**-12, or 2**-25 near zero.
        crossed = bool(halves[0] and halves[1]) and halves[0] != halves[1]
        if not same and not (crossed and torch.allclose(expected, present, rtol=2**-8 + 2**-11, atol=2**-24)):
            worst = int((expected - present).abs().argmax())
            differing.append(f"{name} has the value {present[worst]:.6g} instead of {expected[worst]:.6g}")
    return differing


class _Place(NamedTuple):
    """A parameter of a base model, its name in the state dict of the model, and the module that holds it."""

    parameter: Tensor
    path: str
    module: nn.Module
    attribute: str

    def tensor(
        self, state: Mapping[str, Tensor] | None, read_offloaded: bool = True, gather: bool = False
    ) -> Tensor | None:
        """Its values; `None` if it is quantised, or not available in this process. The parameter if it is gathered."""
        tensor = self.parameter if state is None else state.get(self.path, self.parameter)
        if type(tensor) not in (nn.Parameter, Tensor) or not tensor.is_floating_point() or tensor.element_size() < 2:
            return None
        if tensor.device.type == "meta":
            return _offloaded(self.module, self.attribute) if read_offloaded else None
        if hasattr(tensor, "ds_shape") and is_partitioned(tensor):
            return tensor if gather else None
        return tensor.detach()


def _base_parameters(model: PreTrainedModel) -> dict[str, _Place]:
    """The parameters of the base model that PEFT does not own, by name."""
    base = model.base_model
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    # PEFT can train and save the biases of layers that it does not wrap.
    skips_biases = touched_by_peft(base)
    return {
        f"{path}{attribute}": _Place(parameter, f"{prefix}{path}{attribute}", module, attribute)
        for path, module in _own_modules(base)
        for attribute, parameter in module._parameters.items()
        if parameter is not None and not (skips_biases and "bias" in attribute)
    }


def _own_modules(base: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a base model that neither PEFT nor a scheme has added, each after the start of its paths."""
    of_peft = _classes_of_peft(base)
    modules, pending = [], [("", base)]
    while pending:
        path, module = pending.pop()
        modules.append((path, module))
        children = [(f"{path}{name}.", child) for name, child in module._modules.items() if name not in _LEFT_OUT]
        pending.extend(
            (inside, child) for inside, child in reversed(children) if child is not None and type(child) not in of_peft
        )
    return modules


def _classes_of_peft(model: nn.Module) -> set[type]:
    """The classes of modules that are of PEFT, or derived from one of its classes."""
    kinds = {type(module) for module in model.modules()}
    return {kind for kind in kinds if any(base.__module__.partition(".")[0] == "peft" for base in kind.__mro__)}


def _offloaded(module: nn.Module, attribute: str) -> Tensor | None:
    """The values of a weight that accelerate has offloaded."""
    hook = module.__dict__.get("_hf_hook")
    maps = (getattr(inner, "weights_map", None) for inner in getattr(hook, "hooks", (hook,)))
    return next((weights[attribute] for weights in maps if weights is not None and attribute in weights), None)


def _spread(names: list[str], most: int) -> list[str]:
    count = min(len(names), most)
    return [names[index * len(names) // count] for index in range(count)]


def _sample(tensor: Tensor, shape: tuple[int, ...]) -> Sample:
    """Values at indices that depend only on `shape`, in the first half of the rows (new tokens come last)."""
    with gathered([tensor]) if hasattr(tensor, "ds_shape") else nullcontext():
        values = tensor.detach()[tuple(torch.from_numpy(places).to(tensor.device) for places in _places(shape))]
        return Sample(values.to("cpu", torch.float32), tensor.dtype, shape)


@functools.cache
def _places(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rows = max(1, shape[0] // 2) if len(shape) > 1 else shape[0]
    size = rows * int(np.prod(shape[1:], dtype=np.int64))
    # Multiples of the golden ratio are spread evenly over rows and columns.
    places = sorted({((index + 1) * 2654435769 % 2**32) * size >> 32 for index in range(min(_VALUES, size))})
    return tuple(np.asarray(part) for part in np.unravel_index(places, shape))


def _encode(sample: Sample) -> dict[str, str]:
    values = base64.b64encode(sample.values.numpy().astype("<f4").tobytes()).decode("ascii")
    half = {"dtype": str(sample.dtype).removeprefix("torch.")} if sample.dtype in _HALF_DTYPES else {}
    return {"values": values} | half


def _decode(entry: Mapping[str, Any]) -> Sample:
    values = np.frombuffer(base64.b64decode(entry["values"], validate=True), dtype="<f4").astype(np.float32)
    return Sample(torch.from_numpy(values), getattr(torch, entry.get("dtype", "float32")), tuple(entry["shape"]))


def check_entry(entry: Any) -> None:
    """Raises a ValueError for something that is not an entry of a fingerprint."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    sizes = isinstance(shape, list) and bool(shape) and all(type(size) is int and size > 0 for size in shape)
    dtypes = ("float32", *(str(dtype).removeprefix("torch.") for dtype in _HALF_DTYPES))
    if not sizes or not isinstance(entry.get("values"), str) or entry.get("dtype", "float32") not in dtypes:
        raise ValueError(f"{entry!r} lacks a valid shape, values or dtype")
    _decode(entry)


def parameter_count(module: nn.Module) -> int:
    """Number of scalars in the parameters of a module, frozen ones included."""
    return sum(parameter.numel() for parameter in module.parameters())
