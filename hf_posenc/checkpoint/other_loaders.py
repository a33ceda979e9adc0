"""Wrappers of functions in other libraries that load weight files and check only names and shapes.

`install` wraps, once per process and as soon as their modules are imported:

- `accelerate.load_checkpoint_in_model`, and with it `load_checkpoint_and_dispatch` and `load_and_quantize_model`;
- `transformers.trainer_utils.load_sharded_checkpoint` and `safetensors.torch.load_model`, if strict;
- `optimum.quanto.requantize`, and with it `QuantizedModelForCausalLM.from_pretrained`;
- `torch.distributed.checkpoint.load` (`distributed_checkpoint.py`).

Each wrapper refuses weights of another scheme before anything is copied. For models and weights without a scheme it
calls the stock function.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_posenc.checkpoint.wrapping import wrap
from hf_posenc.entry import find_marks
from hf_posenc.when_imported import when_imported

#: Whether the marks of the files that accelerate reads were compared with the model.
_COMPARED: ContextVar[bool] = ContextVar("hf_posenc_compared_marks", default=False)


def install() -> None:
    """Wraps the functions. Calling it again changes nothing."""
    when_imported("accelerate.utils.modeling", _wrap_accelerate)
    when_imported("transformers.trainer_utils", _wrap_trainer_utils)
    when_imported("safetensors.torch", _wrap_safetensors)
    when_imported("optimum.quanto.quantize", _wrap_quanto)
    when_imported("torch.distributed.checkpoint.state_dict_loader", _wrap_distributed)


def _wrap_accelerate(module: ModuleType) -> None:
    wrap(module, "load_state_dict", _read_state_dict)
    wrap(module, "load_checkpoint_in_model", _load_checkpoint)


def _wrap_trainer_utils(module: ModuleType) -> None:
    wrap(module, "load_sharded_checkpoint", _load_shards)


def _wrap_safetensors(module: ModuleType) -> None:
    wrap(module, "load_model", _load_file)


def _wrap_quanto(module: ModuleType) -> None:
    wrap(module, "requantize", _requantize)


def _wrap_distributed(module: ModuleType) -> None:
    # This needs torch, which is already imported here. Importing this package must not load it.
    from hf_posenc.checkpoint.distributed_checkpoint import wrap_loader

    wrap_loader(module)


def _load_checkpoint(original: Callable[..., Any], model: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    from hf_posenc.checkpoint.agreement import check_file
    from hf_posenc.checkpoint.atomic_folder import finish_saving

    if os.path.isdir(checkpoint):
        finish_saving(checkpoint)
    file = _read_by_accelerate(Path(checkpoint))
    if file is not None:
        check_file(model, file)
    token = _COMPARED.set(True)
    try:
        return original(model, checkpoint, *args, **kwargs)
    finally:
        _COMPARED.reset(token)


def _read_by_accelerate(checkpoint: Path) -> Path | None:
    """Returns the file, or index of files, that accelerate reads; `None` if accelerate reports that there is none."""
    if checkpoint.is_file():
        return checkpoint
    found = [checkpoint / name for name in ("pytorch_model.bin", "model.safetensors")]
    return next((file for file in (*found, *checkpoint.glob("*.index.json")) if file.is_file()), None)


def _read_state_dict(original: Callable[..., Any], file: Any, device_map: Any = None, *args: Any, **kw: Any) -> Any:
    state_dict = original(file, device_map, *args, **kw)
    if _COMPARED.get() and device_map is not None:
        # With a device map, accelerate sets each entry separately and supports only parameters and buffers.
        for key in find_marks(state_dict):
            del state_dict[key]
    return state_dict


def _load_shards(
    original: Callable[..., Any], model: Any, folder: Any, strict: bool = True, prefer_safe: bool = True, **kwargs: Any
) -> Any:
    if strict:
        from hf_posenc.checkpoint.agreement import check_file
        from hf_posenc.patching.place.mark import NOT_STRICT

        names = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
        indices = [Path(folder, name) for name in (names if prefer_safe else reversed(names))]
        index = next((file for file in indices if file.is_file()), None)
        if index is not None:
            check_file(model, index, f" {NOT_STRICT}.")
    return original(model, folder, strict, prefer_safe, **kwargs)


def _load_file(
    original: Callable[..., Any], model: Any, filename: Any, strict: bool = True, *args: Any, **kw: Any
) -> Any:
    if strict and os.path.isfile(filename):
        from hf_posenc.checkpoint.agreement import check_file
        from hf_posenc.patching.place.mark import NOT_STRICT

        check_file(model, filename, f" {NOT_STRICT}.")
    return original(model, filename, strict, *args, **kw)


def _requantize(original: Callable[..., Any], model: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    from hf_posenc.checkpoint.agreement import check_state_dict

    check_state_dict(model, state_dict, remedy="")
    return original(model, state_dict, *args, **kwargs)
