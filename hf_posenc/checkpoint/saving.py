"""`save_pretrained` of a patched model: what is saved comes back as what it was, or is not saved at all."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import modeling_utils

from hf_posenc.checkpoint.atomic_folder import clear_drafts, replaced_as_a_whole
from hf_posenc.checkpoint.peft_hooks import scheme_beside_adapters
from hf_posenc.entry import MARK, find_mark, read_entry
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.place.in_force import encodings, has_patched_layers, refuse_missing_sites
from hf_posenc.patching.place.mark import described, same_scheme


def save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Transformers' `save_pretrained`, as a whole: a process that is killed leaves the folder with one model in it.

    Where every rank writes files of its own (`distributed_checkpoint=True`), transformers has the order of it.

    Raises:
        UnsupportedError: for a model whose config says something else than the scheme it runs, or that another copy of
            this package patched.
    """
    found, entry = encodings(model), read_entry(model.config)
    if entry is not None and not has_patched_layers(model):
        raise UnsupportedError(
            f"This {type(model).__name__} runs its stock positions, but its config names the scheme "
            f"{entry['scheme']!r}: it shares the config with a model that was patched, and would come back with "
            "that model's positions. Give it a config of its own first: model.config = copy.deepcopy(model.config) "
            "while the other one is unpatched; or build each model from its own config."
        )
    if entry is None and has_patched_layers(model):
        raise UnsupportedError(
            f"This {type(model).__name__} runs a position encoding that its config does not carry: it shares its "
            "layers with a model that was patched, or a part of it was. Saved as it is, it would come back with "
            "the stock positions. Save the model that was patched, or unpatch that one and patch this one."
        )
    refuse_missing_sites(model)
    for encoding in found:
        if entry is not None and not same_scheme(entry, encoding.config):
            raise UnsupportedError(
                f"This {type(model).__name__} runs the position encoding {described(encoding.config.to_dict())}, but "
                f"its config names {described(entry)}, with which its weights could not be loaded again: the config "
                "is shared with another patched model, or its entry was edited. Give each model a config of its own, "
                "model.config = copy.deepcopy(model.config), and call patch_model with the scheme that is meant."
            )
    call = inspect.signature(original).bind(model, *args, **kwargs)
    given = call.arguments
    folder = given["save_directory"]
    if isinstance(folder, str | os.PathLike) and os.path.isdir(folder):
        # What an earlier save left would be put over the files of this one.
        clear_drafts(folder)
    if getattr(model, "_hf_peft_config_loaded", False):
        # Adapters inside a transformers model: the adapter alone is saved.
        main = given.get("is_main_process", True)
        with scheme_beside_adapters(model, [Path(given["save_directory"])], main, given.get("state_dict")):
            return original(*call.args, **call.kwargs)
    if entry is None:
        return original(model, *args, **kwargs)
    if given.get("state_dict") is not None:
        given["state_dict"] = _marked(model, given["state_dict"])
    if given.get("distributed_checkpoint") or os.path.isfile(folder):
        return original(*call.args, **call.kwargs)
    upload = None
    if given.get("push_to_hub"):
        # The upload comes after the files are in place, so that they stay whatever it raises.
        given["push_to_hub"] = False
        if model.should_save_on_this_rank(given.get("is_main_process", True)):
            upload = _prepared_upload(model, folder, given.get("token"), given.setdefault("kwargs", {}))
    with replaced_as_a_whole(Path(folder)) as draft:
        given["save_directory"] = str(draft)
        original(*call.args, **call.kwargs)
    if upload is not None:
        upload()
    return None


def _prepared_upload(model: Any, folder: Any, token: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Makes the repository, as `save_pretrained` does before it writes; what is returned uploads the written files.

    Args:
        model: to be saved.
        folder: where to.
        token: argument of `save_pretrained`.
        options: its further keyword arguments; those that concern the upload are taken out.
    """
    token_option = {} if token is None else {"token": token}
    message, create_pr = options.pop("commit_message", None), options.pop("create_pr", False)
    name = options.pop("repo_id", os.fspath(folder).split(os.path.sep)[-1])
    repository = modeling_utils.hf_api().create_repo(name, exist_ok=True, **options, **token_option).repo_id
    before = model._get_files_timestamps(folder) if os.path.isdir(folder) else {}

    def upload() -> None:
        card = modeling_utils.create_and_tag_model_card(repository, model.model_tags, token=token)
        card.save(os.path.join(folder, "README.md"))
        model._upload_modified_files(
            folder, repository, before, commit_message=message, token=token, create_pr=create_pr
        )

    return upload


def _marked(model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict that names the scheme, which those gathered from shards do not (FSDP, ZeRO)."""
    if find_mark(state_dict) is not None:
        return state_dict
    (encoding,) = encodings(model)
    (path,) = [name for name, module in model.named_modules() if module is encoding][:1]
    return {**state_dict, f"{path}.{MARK}": encoding.get_extra_state()}
