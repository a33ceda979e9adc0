"""Wrappers of functions in other libraries that load weight files and check only names and shapes.

Each wrapper refuses weights of another scheme before anything is copied. For models and weights without a scheme it
calls the stock function.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hf_posenc.entry import find_marks
from hf_posenc.wrapping import Call, wrap

#: Whether the marks of the files that accelerate reads were compared with the model.
_COMPARED: ContextVar[bool] = ContextVar("hf_posenc_compared_marks", default=False)


def install() -> None:
    """Wraps the functions. Calling it again changes nothing."""
    wrap(
        "accelerate.utils.modeling",
        {"load_state_dict": _read_state_dict, "load_checkpoint_in_model": _load_checkpoint},
    )
    wrap("transformers.trainer_utils", {"load_sharded_checkpoint": _load_shards})
    wrap("safetensors.torch", {"load_model": _load_file})
    wrap("optimum.quanto.quantize", {"requantize": _requantize})
    wrap("torch.distributed.checkpoint.state_dict_loader", {"_load_state_dict": _load_distributed})


def _load_distributed(call: Call) -> Any:
    # This needs torch, which importing this package must not load.
    from hf_posenc.checkpoint.distributed_checkpoint import load

    return load(call)


def _load_checkpoint(call: Call) -> Any:
    from hf_posenc.checkpoint.atomic_folder import finish_saving
    from hf_posenc.checkpoint.stored_weights import named_schemes

    if os.path.isdir(call["checkpoint"]):
        finish_saving(call["checkpoint"])
    file = _read_by_accelerate(Path(call["checkpoint"]))
    if file is not None:
        named_schemes(file).check(call["model"])
    token = _COMPARED.set(True)
    try:
        return call.run()
    finally:
        _COMPARED.reset(token)


def _read_by_accelerate(checkpoint: Path) -> Path | None:
    """Returns the file, or index of files, that accelerate reads; `None` if accelerate reports that there is none."""
    if checkpoint.is_file():
        return checkpoint
    found = [checkpoint / name for name in ("pytorch_model.bin", "model.safetensors")]
    return next((file for file in (*found, *checkpoint.glob("*.index.json")) if file.is_file()), None)


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
        from hf_posenc.checkpoint.stored_weights import named_schemes
        from hf_posenc.patching.place.record import NOT_STRICT

        named_schemes(Path(file)).check(call["model"], f" {NOT_STRICT}.")
    return call.run()


def _requantize(call: Call) -> Any:
    from hf_posenc.checkpoint.agreement import NamedSchemes

    NamedSchemes.of(call["state_dict"]).check(call["model"])
    return call.run()
