"""Wrappers of functions that load weight files and check only names and shapes: of other libraries, and of `Trainer`.

Each wrapper refuses weights of another scheme before anything is copied. For models and weights without a scheme it
calls the stock function. A device map needs no entries for the parts of a scheme: they are placed on the devices of
the layers that use them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.entry import ADAPTER_CONFIG, ATTRIBUTE, MARK, find_mark, find_marks
from hf_posenc.wrapping import Call, setting, wrap

if TYPE_CHECKING:
    from torch import nn

#: Whether the marks of the files that accelerate reads were compared with the model.
_COMPARED: ContextVar[bool] = ContextVar("hf_posenc_compared_marks", default=False)
#: Where accelerate keeps weights that it loads for each call. The parts of a scheme are too small for that.
_OFFLOADED = ("cpu", "disk")
_ONLY_WEIGHTS = (
    " To load only the weights, pass planner=DefaultLoadPlanner(allow_partial_load=True) from "
    "torch.distributed.checkpoint."
)
_OLDER_ADAPTER = (
    " If its adapter was trained with the scheme, but saved by an older hf_posenc that did not store it, load it "
    "with PeftModel.from_pretrained(patched_model, checkpoint), and save it there again with save_pretrained."
)


def install() -> None:
    """Wraps the functions. Calling it again changes nothing."""
    wrap(
        "accelerate.utils.modeling",
        {"load_state_dict": _read_state_dict, "load_checkpoint_in_model": _load_checkpoint},
    )
    wrap("transformers.modeling_utils", {"PreTrainedModel.load_state_dict": _load_state_dict})
    wrap(
        "transformers.trainer",
        {"Trainer._load_from_checkpoint": _load_from_checkpoint, "Trainer._load_best_model": _load_best_model},
    )
    wrap("transformers.trainer_utils", {"load_sharded_checkpoint": _load_shards})
    wrap("safetensors.torch", {"load_model": _load_file})
    wrap("accelerate.big_modeling", {"dispatch_model": _dispatch})
    wrap("transformers.integrations.accelerate", {"_get_device_map": lambda call: completed(call["model"], call.run())})
    wrap("optimum.quanto.quantize", {"requantize": _requantize})
    wrap("torch.distributed.checkpoint.state_dict_loader", {"_load_state_dict": _load_distributed})


def _load_state_dict(call: Call) -> Any:
    state_dict, patching = call["state_dict"], "hf_posenc.patching" in sys.modules
    if call["strict"] and isinstance(state_dict, Mapping) and (patching or find_mark(state_dict) is not None):
        from hf_posenc.checkpoint.agreement import NamedSchemes
        from hf_posenc.patching.place.record import NOT_STRICT

        NamedSchemes.of(state_dict).check(call["self"], f" {NOT_STRICT}.")
    return call.run()


def _load_checkpoint(call: Call) -> Any:
    from hf_posenc.checkpoint.stored_schemes import named_schemes

    finish_saving(call["checkpoint"])
    file = _read_by_accelerate(Path(call["checkpoint"]))
    if file is not None:
        named_schemes(file).check(call["model"])
    with setting(_COMPARED, True):
        return _with_parts(call).run()


def _read_by_accelerate(checkpoint: Path) -> Path | None:
    """Returns the file, or index of files, that accelerate reads; `None` if accelerate reports that there is none."""
    if checkpoint.is_file():
        return checkpoint
    files = [checkpoint / name for name in ("pytorch_model.bin", "model.safetensors")]
    return next((file for file in (*files, *checkpoint.glob("*.index.json")) if file.is_file()), None)


def _read_state_dict(call: Call) -> Any:
    state_dict = call.run()
    if _COMPARED.get() and call["device_map"] is not None:
        # With a device map, accelerate sets each entry separately and supports only parameters and buffers.
        for key in find_marks(state_dict):
            del state_dict[key]
    return state_dict


def _load_shards(call: Call) -> Any:
    names = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
    indices = [Path(call["folder"], name) for name in (names if call["prefer_safe"] else reversed(names))]
    return _load_strictly(call, next((file for file in indices if file.is_file()), None))


def _load_file(call: Call) -> Any:
    return _load_strictly(call, call["filename"] if os.path.isfile(call["filename"]) else None)


def _load_strictly(call: Call, file: Any) -> Any:
    if call["strict"] and file is not None:
        from hf_posenc.checkpoint.stored_schemes import named_schemes
        from hf_posenc.patching.place.record import NOT_STRICT

        named_schemes(Path(file)).check(call["model"], f" {NOT_STRICT}.")
    return call.run()


def _requantize(call: Call) -> Any:
    from hf_posenc.checkpoint.agreement import NamedSchemes

    NamedSchemes.of(call["state_dict"]).check(call["model"])
    return call.run()


def _load_from_checkpoint(call: Call) -> Any:
    check_checkpoint(call["self"], call["resume_from_checkpoint"], call["model"])
    return call.run()


def _load_best_model(call: Call) -> Any:
    check_checkpoint(call["self"], call["self"].state.best_model_checkpoint)
    return call.run()


def check_checkpoint(trainer: Any, folder: str | Path, model: Any = None) -> None:
    """Compares the scheme of a checkpoint with the scheme of the model that it will be loaded into.

    `Trainer` loads weights with `strict=False`, so it would load those of another scheme silently.
    A callback that changes the scheme during training has a method `match_checkpoint(model, step)`. It is called first,
    and patches the model with the scheme it had after that number of steps.

    Args:
        trainer: the `Trainer`.
        folder: folder of the checkpoint.
        model: the model that `Trainer` loads it into; `None` for its own model.

    Raises:
        SchemeMismatchError: if they differ, before anything is loaded; names both schemes.
    """
    from hf_posenc.checkpoint.stored_schemes import schemes_of_checkpoint

    model, folder = trainer.model if model is None else model, Path(folder)
    finish_saving(folder)
    named, state = schemes_of_checkpoint(folder), folder / "trainer_state.json"
    if named is None:
        return
    if state.is_file():
        step = int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
        for callback in trainer.callback_handler.callbacks:
            if hasattr(callback, "match_checkpoint"):
                callback.match_checkpoint(model, step)
    adapter = (folder / ADAPTER_CONFIG).is_file() and not named.schemes
    named.check(model, f" Pass Trainer the model that the training started with.{_OLDER_ADAPTER if adapter else ''}")


def _load_distributed(call: Call) -> Any:
    """Wraps the function that all functions which load distributed checkpoints call.

    torch reads only the entries of the state dict to fill and ignores all others, so it would load the weights of a
    patched model into a stock model. The marks of a checkpoint are listed in its metadata and read separately.
    """
    state_dict = call["state_dict"]
    if getattr(call["planner"], "allow_partial_load", False):
        # Only the weights are requested. Marks of two schemes differ in size, which torch would refuse.
        with _without_marks(state_dict):
            return call.run()
    _compare_marks(call)
    return call.run()


@contextmanager
def _without_marks(state_dict: dict[str, Any]) -> Iterator[None]:
    """Removes the marks from a state dict, also from nested ones, and restores them afterwards."""
    marks = [(entries, key, entries[key]) for entries, key, name in _entries(state_dict) if find_marks([name])]
    for entries, key, _ in marks:
        del entries[key]
    try:
        yield
    finally:
        for entries, key, mark in marks:
            entries[key] = mark


def _metadata(call: Call) -> Any:
    """The metadata of a checkpoint, or of the part of this process if it was saved without collectives.

    `None` if it cannot be read. A reader of any class may raise any error; torch then fails on all processes.
    """
    import torch

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized() and not call["no_dist"]
    rank = torch.distributed.get_rank(call["process_group"]) if distributed else 0
    for of_process in ({}, {"rank": rank}):
        with suppress(Exception):
            if metadata := call["storage_reader"].read_metadata(**of_process):
                return metadata
    return None


def _compare_marks(call: Call) -> None:
    """Refuses a checkpoint whose marks differ from those of the state dict to fill."""
    here = {name: entries[key] for entries, key, name in _entries(call["state_dict"])}
    metadata = _metadata(call)
    if metadata is None:
        return
    stored = metadata.state_dict_metadata
    shared = here.keys() & stored.keys()

    def has_weights(mark: str) -> bool:
        model = mark.removesuffix(f"{ATTRIBUTE}.{MARK}")
        return any(name.startswith(model) and name != mark for name in shared)

    saved, placed = ([name for name in find_marks(names) if has_weights(name)] for names in (stored, here))
    if not saved and not placed:
        return
    import torch

    from hf_posenc.checkpoint.agreement import NamedSchemes
    from hf_posenc.schemes.registry import scheme_from_dict

    marks: dict[str, Any] = {name: torch.empty(stored[name].size, dtype=torch.uint8) for name in saved}
    if marks:
        call.run(state_dict=marks, planner=None)
    wanted = NamedSchemes.of({name: here[name] for name in placed}).schemes
    NamedSchemes.of(marks, "this checkpoint").compare(
        {name: scheme_from_dict(scheme) for name, scheme in wanted.items()}, "this state dict", _ONLY_WEIGHTS
    )


def _entries(state_dict: Any, before: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """The entries, also of nested dictionaries: where each is, its key, and the name under which torch saves it."""
    for key, value in state_dict.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{before}{key}.")
        else:
            yield state_dict, key, f"{before}{key}"


def _with_parts(call: Call) -> Call:
    """Returns a call with `model` and `device_map` in which the map is completed."""
    device_map = completed(call["model"], call["device_map"])
    return call if device_map is call["device_map"] else call.changed(device_map=device_map)


def completed(model: nn.Module, device_map: Any) -> Any:
    """A device map of the stock model, with entries for the parts of the scheme instead of those that it may have.

    Args:
        model: the model.
        device_map: devices by the names of modules. Anything else is returned as it is, and so is the map of a model
            without a scheme, or on one device.
    """
    if "hf_posenc.patching" not in sys.modules or not isinstance(device_map, Mapping) or "" in device_map:
        return device_map
    from hf_posenc.patching.place.encoding import current_encoding

    encoding = current_encoding(model)
    if encoding is None:
        return device_map
    names = {id(module): name for name, module in model.named_modules()}
    prefix = names[id(encoding)]
    stock = {name: device for name, device in device_map.items() if not f"{name}.".startswith(f"{prefix}.")}
    # Without an accelerator, accelerate executes on the CPU what it reads from disk.
    first = next((device for device in stock.values() if device not in _OFFLOADED), "cpu")
    scheme_map = {prefix: first}
    for stack in encoding.record.stacks.values():
        for attention, layer in zip(stack.attentions, stack.encoding.layers, strict=True):
            name = names[id(attention)]
            while name and name not in stock:  # The longest name in the map that leads to the layer counts.
                name = name.rpartition(".")[0]
            device = stock.get(name)
            for module in (module for part in layer.parts for module in part.modules()):
                if id(module) in names:
                    scheme_map.setdefault(names[id(module)], first if device in _OFFLOADED else device)
    return stock | scheme_map


def _dispatch(call: Call) -> Any:
    dispatched = (changed := _with_parts(call)).run()
    if changed is not call:
        from accelerate.hooks import remove_hook_from_module

        from hf_posenc.patching.place.encoding import current_encoding

        # The parts are where they are used, and so are their inputs.
        remove_hook_from_module(current_encoding(call["model"]), recurse=True)
    return dispatched
