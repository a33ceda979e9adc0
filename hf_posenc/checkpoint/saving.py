"""`save_pretrained` of patched models or into their folders, uploads, and the cards that other code writes for them.

A save raises if the saved model could not be loaded again. The folder has a card with a section about the scheme. If an
upload fails, the error says what to do. Before any model was patched, the wrappers here import nothing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.atomic_folder import atomic_replacement, clear_drafts, is_place_for_folder, variant_of
from hf_posenc.checkpoint.peft_hooks import scheme_saved_with_adapters
from hf_posenc.entry import ADAPTER_CONFIG, MARK, find_mark, is_patched, read_entry
from hf_posenc.errors import UnsupportedError
from hf_posenc.wrapping import Call


def save_pretrained(call: Call) -> Any:
    """Calls transformers' `save_pretrained` atomically: an interrupted save leaves one complete model in the folder.

    If every rank writes its own files (`distributed_checkpoint=True`), transformers controls the order.

    Raises:
        UnsupportedError: if the model's config does not match its scheme, or another copy of this package patched it.
    """
    if "hf_posenc.patching" not in sys.modules:
        return call.run()
    from hf_posenc.checkpoint.cards import has_section, write_card
    from hf_posenc.patching.place.encoding import refuse_changed

    model, folder, main = call["self"], call["save_directory"], call["is_main_process"]
    entry = read_entry(model.config)
    refuse_changed(model)
    if not is_place_for_folder(folder):
        return call.run()  # Transformers says what is wrong with it.
    # Otherwise, the remaining files of an interrupted save would later overwrite the files of this one.
    clear_drafts(folder)
    if getattr(model, "_hf_peft_config_loaded", False):
        # For adapters inside a transformers model, only the adapter is saved.
        with scheme_saved_with_adapters(model, [Path(folder)], main, call["state_dict"]):
            result = call.run()
        if main:
            write_card(model, Path(folder))
        return result
    if entry is None:
        if not is_patched(folder, {}) and not has_section(Path(folder)):
            return call.run()
        _refuse_other_variants(model, folder, call["variant"])
    elif call["state_dict"] is not None:
        call = call.changed(state_dict=_marked(model, call["state_dict"]))
    if Path(folder, ADAPTER_CONFIG).is_file():
        raise UnsupportedError(
            f"{os.fspath(folder)} contains {ADAPTER_CONFIG}: transformers would add this adapter to the saved "
            f"{type(model).__name__} when it is loaded. Save it to another folder, or remove the adapter first."
        )
    if call["distributed_checkpoint"]:
        result = call.run()
        if main:
            write_card(model, Path(folder))
        return result
    upload = None
    if call["push_to_hub"]:
        # The upload starts after the files are in place, so that they are kept if it fails.
        options = dict(call["kwargs"])
        if model.should_save_on_this_rank(main):
            upload = _prepared_upload(model, folder, call["token"], options)
        call = call.changed(push_to_hub=False, kwargs=options)
    with atomic_replacement(Path(folder)) as draft:
        call.run(save_directory=str(draft))
        writes = any(draft.iterdir())  # Other ranks do not.
        if entry is not None and any(draft.glob("*.index*.json")):
            from hf_posenc.checkpoint.agreement import record_shards

            record_shards(draft)
    if writes:
        write_card(model, Path(folder))
    if upload is not None:
        upload()
    return None


def _refuse_other_variants(model: Any, folder: Any, variant: str | None) -> None:
    """Refuses to give a folder a stock config in which weights of a patched model would remain."""
    remaining = [name for name in os.listdir(folder) if variant_of(name) not in (None, variant or "")]
    if remaining:
        raise UnsupportedError(
            f"{os.fspath(folder)} has a patched model, and this save would leave its weights {sorted(remaining)} "
            f"next to the config of this {type(model).__name__}, which would run them with its stock positions. Save "
            "it to another folder, or remove these files first."
        )


def _prepared_upload(model: Any, folder: Any, token: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Creates the repository, as `save_pretrained` does before it writes, and returns a function that uploads the
    files. The options of the upload are removed from those of `save_pretrained`.
    """
    from transformers import modeling_utils

    from hf_posenc.checkpoint.cards import README, is_of_transformers

    token_option = {} if token is None else {"token": token}
    message, create_pr = options.pop("commit_message", None), options.pop("create_pr", False)
    name = options.pop("repo_id", os.fspath(folder).split(os.path.sep)[-1])
    repository = modeling_utils.hf_api().create_repo(name, exist_ok=True, **options, **token_option).repo_id
    before = model._get_files_timestamps(folder) if os.path.isdir(folder) else {}

    def upload() -> None:
        with upload_of(folder, repository):
            card = modeling_utils.create_and_tag_model_card(repository, model.model_tags, token=token)
            if not is_of_transformers(str(card)):
                card.save(os.path.join(folder, README))
            model._upload_modified_files(
                folder, repository, before, commit_message=message, token=token, create_pr=create_pr
            )

    return upload


def _marked(model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Adds the scheme to a state dict, because state dicts gathered from shards (FSDP, ZeRO) do not name it."""
    if find_mark(state_dict) is not None:
        return state_dict
    from hf_posenc.patching.place.encoding import encodings

    (encoding,) = encodings(model)
    (path,) = [name for name, module in model.named_modules() if module is encoding][:1]
    return {**state_dict, f"{path}.{MARK}": encoding.get_extra_state()}


@contextlib.contextmanager
def upload_of(folder: str | os.PathLike[str], repository: str) -> Iterator[None]:
    """Adds a note to an exception in the block: the folder is complete, and how to upload it later."""
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"The upload to {repository!r} failed, but {os.fspath(folder)} is complete. To upload it later, run: "
            f"hf upload {repository} {shlex.quote(os.fspath(folder))}"
        )
        raise


def upload_modified_files(call: Call) -> Any:
    """Gives an uploaded model a card that describes its scheme. Tokenizers and configs are uploaded in the same way."""
    if hasattr(call["self"], "modules"):
        _describe(call["self"], call["working_dir"], call["repo_id"])
    return call.run()


def create_trainer_card(call: Call) -> Any:
    """Adds the section about the scheme to the card of a trainer."""
    result, trainer = call.run(), call["self"]
    if trainer.is_world_process_zero():
        _describe(trainer.accelerator.unwrap_model(trainer.model), trainer.args.output_dir, trainer.hub_model_id)
    return result


def create_card(call: Call, folder: str) -> Any:
    """Adds the section about the scheme to a card that another library has written into the folder of an argument."""
    result = call.run()
    _describe(call["self"], call[folder])
    return result


def _describe(model: Any, folder: Any, name: str | None = None) -> None:
    if "hf_posenc.patching" in sys.modules:
        from hf_posenc.checkpoint.cards import write_card

        write_card(model, Path(folder), name=name)
