"""`save_pretrained` of a patched model: what is saved comes back as what it was, or is not saved at all."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError

from hf_posenc.checkpoint.atomic_folder import replaced_as_a_whole
from hf_posenc.checkpoint.peft_hooks import scheme_beside_adapters
from hf_posenc.entry import MARK, find_mark, read_entry
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.apply import encodings, runs_a_scheme


def save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Transformers' `save_pretrained`, as a whole: a process that is killed leaves the folder with one model in it.

    Where every rank writes files of its own (`distributed_checkpoint=True`), transformers has the order of it.

    Raises:
        UnsupportedError: for a model whose config says something else than the scheme it runs.
    """
    entry = read_entry(model.config)
    if entry is not None and not runs_a_scheme(model):
        raise UnsupportedError(
            f"This {type(model).__name__} runs its stock positions, but its config names the scheme "
            f"{entry['scheme']!r}: it shares the config with a model that was patched, and would come back with "
            "that model's positions. Give it a config of its own first: model.config = copy.deepcopy(model.config) "
            "while the other one is unpatched; or build each model from its own config."
        )
    if entry is None and runs_a_scheme(model):
        raise UnsupportedError(
            f"This {type(model).__name__} runs a position encoding that its config does not carry: it shares its "
            "layers with a model that was patched, or a part of it was. Saved as it is, it would come back with "
            "the stock positions. Save the model that was patched, or unpatch that one and patch this one."
        )
    call = inspect.signature(original).bind(model, *args, **kwargs)
    given = call.arguments
    if getattr(model, "_hf_peft_config_loaded", False):
        # Adapters inside a transformers model: the adapter alone is saved.
        main = given.get("is_main_process", True)
        with scheme_beside_adapters(model, [Path(given["save_directory"])], main, given.get("state_dict")):
            return original(*call.args, **call.kwargs)
    if entry is None:
        return original(model, *args, **kwargs)
    if given.get("state_dict") is not None:
        given["state_dict"] = _marked(model, given["state_dict"])
    folder = given["save_directory"]
    if given.get("distributed_checkpoint") or os.path.isfile(folder):
        return original(*call.args, **call.kwargs)
    if given.get("push_to_hub"):
        # Transformers names the repository after the folder it writes to.
        given.setdefault("kwargs", {}).setdefault("repo_id", Path(folder).name)
    refused: Exception | None = None
    with replaced_as_a_whole(Path(folder)) as draft:
        given["save_directory"] = str(draft)
        try:
            original(*call.args, **call.kwargs)
        except HfHubHTTPError as error:
            refused = error  # The last step is the upload: the files are complete.
    if refused is not None:
        raise refused
    return None


def _marked(model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict that names the scheme, which those gathered from shards do not (FSDP, ZeRO)."""
    if find_mark(state_dict) is not None:
        return state_dict
    (encoding,) = encodings(model)
    (path,) = [name for name, module in model.named_modules() if module is encoding][:1]
    return {**state_dict, f"{path}.{MARK}": encoding.get_extra_state()}
