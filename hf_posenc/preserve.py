"""Running a model without side effects: everything that a run could change is restored afterwards."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

#: Held while the library changes something that all threads share and restores it afterwards. If two threads did this
#: at once, the second would save, and later restore, what the first has changed.
PROCESS = threading.RLock()
#: Whether warnings and messages of the running code are hidden.
hidden: ContextVar[bool] = ContextVar("hidden", default=False)
#: Packages whose messages are hidden.
_TALKING = ("transformers", "torch.onnx", "onnxscript", "onnx_ir", "onnxruntime.quantization")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
#: Packages whose hooks move or compute weights, without which a module cannot run, and our own observers.
_NEEDED = (
    *("torch.distributed", "torch.nn.utils", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes"),
    "hf_posenc",
)
#: Contents of a module that sharding moves during a run, and moves back itself.
_MOVED = "_parameters"
_CONTAINERS = (dict, OrderedDict, list, set)
#: Buffers with more elements are quantised weights, which a forward call does not change.
_LARGEST_COPY = 2**24


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards, every module is back in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def attention_implementation(model: Any, name: str, unless: Sequence[str] = ()) -> Iterator[None]:
    """Switches to another attention implementation, and restores that of the model afterwards.

    Args:
        model: a transformers model.
        name: as in `attn_implementation`, such as "eager".
        unless: implementations that are kept.
    """
    before = model.config._attn_implementation
    if before in (name, *unless):
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Sets torch's seed, and afterwards restores its random state on the CPU and every CUDA device in use, and those of
    Python and NumPy, which a few models use.

    Other threads wait at this function, because all threads draw from the same generators.
    """
    # Uninitialised CUDA has no state to keep, and a measurement must not initialise it.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with PROCESS, torch.random.fork_rng(devices=devices):
        python, numpy = random.getstate(), np.random.get_state()
        torch.random.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode for a run on the library's own inputs, without effects on the caller.

    Hooks do not run, except those that move or compute weights. Compiled layers run without graphs, which would count
    towards torch's limit. The context of the caller (autocast, inference mode, a default device) does not apply.
    Afterwards, attributes, containers and buffers of every module, fields of configs and the states of random
    generators are as before. Warnings and messages about the inputs are not shown.

    Args:
        model: the model. Modules inside it may be run.
        device: where the inputs are.
    """
    with ExitStack() as context:
        context.enter_context(quiet())
        context.enter_context(_kept_modules(list(model.modules())))
        context.enter_context(isolated_rng(0))
        context.enter_context(ordinary_context())
        context.enter_context(torch.compiler.set_stance("force_eager"))
        if torch.amp.is_autocast_available(device.type):
            context.enter_context(torch.autocast(device.type, enabled=False))
        context.enter_context(torch.no_grad())
        yield


@contextmanager
def ordinary_context() -> Iterator[None]:
    """Disables global hooks, inference mode, a default device of the caller, and `deepspeed.zero.Init`.

    Tensors created in inference mode could not be trained later, and a default device may be "meta". Inside
    `deepspeed.zero.Init`, new modules lose their weights, and `torch.arange` may return half precision.
    """
    with PROCESS, ExitStack() as context:
        context.enter_context(_without_hooks([getattr(global_hooks, f"_global{name}") for name in _HOOKS]))
        if torch.get_default_device().type != "cpu":
            context.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            context.enter_context(torch.inference_mode(False))
        partitioning = getattr(
            sys.modules.get("deepspeed.runtime.zero.partition_parameters"), "top_level_context", None
        )
        if partitioning is not None and partitioning.patched:
            partitioning.unpatch_init_and_builtins()
            context.callback(partitioning.patch_init_and_builtins)
        yield


@contextmanager
def _without_hooks(registered: list[dict[int, Any]]) -> Iterator[None]:
    """Empties dictionaries of hooks, except for those that a module needs."""
    before = [(hooks, hooks.copy()) for hooks in registered]
    try:
        for hooks, _ in before:
            for number in [number for number, hook in hooks.items() if not _is_needed(hook)]:
                del hooks[number]
        yield
    finally:
        for hooks, all_hooks in before:
            hooks.clear()
            hooks.update(all_hooks)


class _WhileHidden(type):
    def __subclasscheck__(cls, category: type) -> bool:
        return hidden.get()


class _Hidden(Warning, metaclass=_WhileHidden):
    """A category for a filter. It fits all warnings of a thread that hides them, and none of other threads."""


@contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings of this thread, and messages of transformers and of exporters.

    Messages that transformers shows once are still shown later.
    """
    if hidden.get():
        yield
        return
    with PROCESS:
        kind, names = logging.Logger, ("warning_once", "info_once")
        once = {name: vars(kind)[name] for name in names if name in vars(kind)}
        levels = {logger: logger.level for logger in map(logging.getLogger, _TALKING)}
        token = hidden.set(True)
        try:
            for logger in levels:
                logger.setLevel(logging.ERROR)
            for name, function in once.items():
                setattr(kind, name, _unless_hidden(function))
            warnings.simplefilter("ignore", _Hidden)
            yield
        finally:
            hidden.reset(token)
            for logger, level in levels.items():
                logger.setLevel(level)
            for name, function in once.items():
                setattr(kind, name, function)
            with contextlib.suppress(ValueError):  # Another thread may have replaced the list of filters.
                warnings.filters.remove(("ignore", None, _Hidden, None, 0))  # type: ignore[attr-defined]


def _unless_hidden(function: Any) -> Any:
    return lambda *args, **kwargs: None if hidden.get() else function(*args, **kwargs)


@contextmanager
def _kept_modules(modules: list[nn.Module]) -> Iterator[None]:
    """Evaluation mode without the caller's hooks. Restores attributes, containers, buffers and configs."""
    configs = {id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")}
    owners = [*map(vars, modules), *map(vars, configs.values())]
    inside = [each for owner in owners for name, each in owner.items() if name != _MOVED and type(each) in _CONTAINERS]
    contents = [(value, value.copy()) for value in (*owners, *inside)]
    present = [buffer for module in modules for buffer in module._buffers.values() if type(buffer) is Tensor]
    small = [buffer for buffer in present if not buffer.is_meta and buffer.numel() <= _LARGEST_COPY]
    buffers = [(buffer, buffer.detach().clone()) for buffer in small]
    try:
        for attributes in map(vars, modules):
            attributes["training"] = False
            if "_old_forward" in attributes and not _is_of_accelerate(attributes.get("_hf_hook")):
                attributes["forward"] = attributes["_old_forward"]
        with _without_hooks([vars(module)[name] for module in modules for name in _HOOKS]):
            yield
    finally:
        for value, before in contents:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for buffer, values in buffers:
            if not torch.equal(buffer, values):
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(values)


def _is_of_accelerate(hook: Any) -> bool:
    """Whether a hook in accelerate's wrapper of a forward is accelerate's own, and not the caller's."""
    return all(type(inner).__module__.startswith("accelerate.") for inner in getattr(hook, "hooks", (hook,)))


def _is_needed(hook: Any) -> bool:
    """Whether a hook comes from a package whose hooks a module needs."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    origin = getattr(hook, "__module__", None) or ""
    return any(origin == name or origin.startswith(f"{name}.") for name in _NEEDED)
