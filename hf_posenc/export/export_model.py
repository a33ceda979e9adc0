"""`export_model`: one call for every target, with the card of what it has written and its upload to the hub."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from hf_posenc.checkpoint.atomic_folder import atomic_replacement, refuse_used_folder
from hf_posenc.checkpoint.cards import card_data, card_text, hub_name, scheme_names, scheme_section, versions_section
from hf_posenc.checkpoint.saving import upload_of
from hf_posenc.checkpoint.stored_schemes import WEIGHTS
from hf_posenc.entry import ADAPTER_CONFIG
from hf_posenc.errors import UnknownNameError, UsageError, warn_user
from hf_posenc.export.carriers import carry
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.models import model_to_export, refuse_unsuited, unknown_tokens
from hf_posenc.export.records import MANIFEST, ExportReport, checks_table, files_in, serving_commands
from hf_posenc.export.targets import OF_TRANSFORMERS, find_target
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.preserve import PROCESS, evaluation_mode


def send(
    report: ExportReport,
    repository: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> None:
    """Uploads all files of an export in one commit, so that the repository never has a part of it.

    An exception gets a note that says how to upload the folder later.

    Args:
        report: the export.
        repository: hub id. It is created if it does not exist.
        private: whether a new repository is private; `None` for the default of its owner.
        token: access token; `None` for the stored one.
        revision: branch, which is created if it does not exist; `None` for the default branch.
        create_pr: whether to open a pull request instead of a commit to the branch.
        commit_message: its title.
    """
    api = HfApi(token=token)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=report.folder / name) for name in report.files
    ]
    message = commit_message or f"Export of {report.scheme} to {report.target}"
    with upload_of(report.folder, repository):
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        earlier: set[str] = set()
        with contextlib.suppress(RemoteEntryNotFoundError):
            earlier = files_in(Path(api.hf_hub_download(name, MANIFEST, revision=revision)))
        if earlier:  # Some programs would load files that belong to an earlier export only.
            outdated = earlier.intersection(api.list_repo_files(name, revision=revision)) - set(report.files)
            operations += [CommitOperationDelete(path) for path in sorted(outdated)]
        api.create_commit(name, operations, commit_message=message, revision=revision, create_pr=create_pr)


def export_model(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    to: str = "stock",
    tokenizer: Any = None,
    overwrite: bool = False,
    merge_adapters: bool = False,
    approximate: bool = False,
    push_to_hub: str | bool = False,
    hub_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ExportReport:
    """Writes a model in a form that runs without this package, and checks that it gives the same numbers there.

        report = export_model(model, "smollm2-yarn-gguf", to="gguf", tokenizer=tokenizer)
        print(report)  # what carries the scheme, and the measured differences

    The folder appears only after the check. It contains a model card and `export.json`, the report. A scheme that the
    target cannot express is refused with the reason.

    Args:
        model: a patched model, a stock model, or a PEFT model around one. It is not changed.
        folder: a new folder, or an empty one.
        to: the target: "stock" (a plain transformers checkpoint), "remote_code" (a checkpoint with a file of code for
            `trust_remote_code=True`), "gguf" (llama.cpp), "onnx" (ONNX Runtime) or "executorch".
        tokenizer: saved with the model, or built into its file.
        overwrite: whether `folder` may contain files. Files of an earlier export and weights
            of the same variant are replaced or removed, others kept. A folder with PEFT adapters is refused.
        merge_adapters: whether adapters of a PEFT model are merged into the weights of a copy.
        approximate: whether to write the nearest form if none is exact. The report has the measured difference.
        push_to_hub: hub id of a repository to upload the folder to, or `True` for one with the name of the folder.
            It is created if it does not exist. If the upload fails, the folder is complete, and the exception says how
            to upload it later.
        hub_options: `private`, `token`, `revision`, `create_pr` and `commit_message` of the upload, as in
            `push_to_hub` of a transformers model.
        **options: options of the target.

    Returns:
        What was written, with the measured differences.

    Raises:
        UnsupportedError: if the target cannot express the scheme, gives different numbers, or would lose the images or
            the sound that the model reads.
        FileExistsError: if the folder is not empty, or is a file.
        FileNotFoundError: for an empty path.
        UnknownNameError: for an unknown target, option or option of the upload.
        UsageError: if a package that the target needs is not installed, or for `hub_options` without `push_to_hub`.
        TypeError: for something that is not a transformers model.
        MeasurementError: if the model computes NaN or infinity.
    """
    target = find_target(to)
    if os.fspath(folder) == "":
        raise FileNotFoundError("The folder is ''. Give the path of a folder, or '.' for the current one.")
    place = Path(folder)
    refuse_used_folder(place, overwrite)
    export = target.export(options)
    hub_options = hub_options or {}
    repository = _repository(place.resolve().name if push_to_hub is True else push_to_hub, hub_options)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(
            f"tokenizer is {tokenizer!r:.100}, which cannot be saved. Load it: AutoTokenizer.from_pretrained(name)."
        )
    outdated: set[str] = set()
    with contextlib.ExitStack() as context:
        # Exports run one after another: they change a model for a time, which several may share.
        context.enter_context(PROCESS)
        inner = model_to_export(model, merge_adapters)
        refuse_unsuited(inner, target)
        context.enter_context(evaluation_mode(inner))
        draft = context.enter_context(atomic_replacement(place, outdated))
        parts = ModelParts(inner)
        form, checks = carry(export.of(parts, draft, tokenizer), target, approximate)
        if tokenizer is not None:
            if problem := unknown_tokens(tokenizer, getattr(inner.config.get_text_config(), "vocab_size", None)):
                warn_user(problem)
            tokenizer.save_pretrained(draft)
        card, manifest = draft / "README.md", draft / MANIFEST
        names = [path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file()]
        files = tuple(sorted({*names, card.name, manifest.name}))
        usage = export.usage(form)
        report = ExportReport(place, target.name, parts.label, form.carrier, checks, files, serving_commands(usage))
        export_card(inner, report, usage, repository).save(card)
        manifest.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        # Another process may have written there since the first look.
        refuse_used_folder(place, overwrite, draft.name)
        outdated |= _outdated_in(place, files)
    if repository is not None:
        send(report, repository, **hub_options)
    return report


def _outdated_in(place: Path, files: Collection[str]) -> set[str]:
    """The files of an earlier export, and files that new ones replace; refuses other files in their place.

    The new files are moved into place one by one. If the process is killed in between, no file may be left that would
    make a model together with new ones: programs that load the export do not know that it is incomplete.
    """
    weights = [name for name in files if name.endswith(".safetensors")]
    if weights and (place / ADAPTER_CONFIG).exists():
        raise FileExistsError(
            f"{place} contains {ADAPTER_CONFIG}: transformers would add these adapters to the exported model. Export "
            "it to another folder."
        )
    if weights and not any(re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name) for name in weights):
        # The export has a variant, and without its name transformers would load the other weights with the new config.
        earlier = _files_of(place)
        others = [name for name in WEIGHTS if (place / name).exists() and name not in earlier]
        if others:
            raise FileExistsError(
                f"{place} contains {others[0]}, which transformers would load with the config of this export unless "
                "the variant is named. Export it to another folder."
            )
    for name in files:
        if (place / name).is_dir():
            raise FileExistsError(f"{place / name} is a folder, where the export writes a file. Remove or rename it.")
    return {*files, *_files_of(place)}


def _files_of(place: Path) -> set[str]:
    """Files of an earlier export in a folder. Names that lead out of the folder are ignored."""
    inside = place.resolve()
    files = {name for name in files_in(place / MANIFEST) if "\0" not in name and (place / name).is_file()}
    return {name for name in files if (place / name).parent.resolve().is_relative_to(inside)}


def _repository(name: Any, options: Mapping[str, Any]) -> str | None:
    """The hub id with its owner: a name without one belongs to the owner of the token. `None` for no upload."""
    known = inspect.getfullargspec(send).kwonlyargs
    for option in options:
        if option not in known:
            raise UnknownNameError("option", option, known, owner="hub_options")
    if name is False or name is None:
        if options:
            raise UsageError("hub_options are only used with push_to_hub. Give it the hub id of a repository.")
        return None
    if not isinstance(name, str):
        raise TypeError(f'push_to_hub is {name!r}; expected the hub id of a repository, such as "me/my-model".')
    validate_repo_id(name)
    return name if "/" in name else HfApi(token=options.get("token")).get_full_repo_name(name)


def export_card(model: PreTrainedModel, report: ExportReport, usage: str, repository: str | None) -> ModelCard:
    """Creates the card of an export.

    Args:
        model: the exported model.
        report: what was written.
        usage: Markdown with the code that runs it; `{folder}` stands for its folder or hub id.
        repository: hub id, if it is uploaded.
    """
    folder, class_name, encoding = report.folder.resolve().name, type(model).__name__, current_encoding(model)
    name, base = repository or folder, hub_name(model)
    data = card_data(
        name, class_name, "stock" if encoding is None else scheme_names(encoding.config), tags=[report.target],
        library_name="transformers" if report.target in OF_TRANSFORMERS else report.target,
        base_model=None if base == repository else base,
    )  # fmt: skip
    scheme = f"The position encoding of a stock `{class_name}`."
    if encoding is not None:
        scheme = scheme_section(encoding.config.to_dict(), class_name)
    text = card_text(
        data,
        f"# {name}",
        f"A `{class_name}` with the position encoding `{report.scheme}`, exported for "
        f"{find_target(report.target).program}. It runs without the package `hf_posenc`.",
        f"## How to run it\n\n{_how_to_run(usage, report, repository)}",
        f"## Position encoding\n\n{scheme}\n\nThe export expresses it through {report.carrier}.",
        f"## Measured difference\n\nThe export was run on the same tokens as the original model:\n\n```\n"
        f"{checks_table(report.checks)}\n```",
        f"### Framework versions\n\n{versions_section()}",
    )
    return ModelCard(text, ignore_metadata_errors=False)


def _how_to_run(usage: str, report: ExportReport, repository: str | None) -> str:
    """The usage, with a name for `{folder}`. Only transformers takes the name of a repository as a folder."""
    if repository is None:
        return usage.replace("{folder}", report.folder.resolve().name)
    if report.target in OF_TRANSFORMERS:
        return usage.replace("{folder}", repository)
    local = repository.rpartition("/")[2]
    download = f"```bash\nhf download {repository} --local-dir {local}\n```"
    return f"{download}\n\n{usage.replace('{folder}', local)}"
