"""`adapter_config.json` of a PEFT adapter that was trained on a patched model.

A process without this package must not load such an adapter into a model with stock positions, but PEFT ignores unknown
files and keys. Therefore the adapter type is a sentence: PEFT does not know this type and shows it in its error. Fields
that other programs read without checking the type (rank, target modules) are moved into a nested entry.

The config and the weights of an adapter can be loaded separately, with functions that do not get the folder. All of
these functions create adapter layers from the config. A config that was read keeps the scheme of its adapter, and both
the scheme and the modules that a config would train are compared with the model there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_posenc.checkpoint.atomic_folder import replace_file
from hf_posenc.checkpoint.configuration import check_format, damaged
from hf_posenc.checkpoint.position_files import ADAPTER_WEIGHTS, JSON_FILE, check_hash, hash_of
from hf_posenc.entry import ADAPTER_CONFIG, ADAPTER_SCHEME, ATTRIBUTE, INSTALL, find_file
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.place.encoding import encodings
from hf_posenc.schemes import scheme_from_dict

FORMAT = 1
SENTENCE = (
    "hf_posenc: this adapter was trained on a model with a position encoding of the package hf_posenc, which this "
    f"process did not import. Install it (`{INSTALL}`), and `import hf_posenc` before loading the adapter"
)
#: The fields that programs read to find the base model.
_TOP_LEVEL_FIELDS = ("base_model_name_or_path", "revision")


def is_marked(config: Any) -> bool:
    """Whether the contents of `adapter_config.json` belong to an adapter of a patched model.

    Without the sentence, it may have been edited: PEFT would read its default options.
    """
    if not isinstance(config, dict):
        return False
    entry = config.get(ATTRIBUTE)
    return str(config.get("peft_type")).startswith("hf_posenc:") or (isinstance(entry, dict) and "adapter" in entry)


def unmarked(disk: dict[str, Any], source: str) -> dict[str, Any]:
    """Restores the config that PEFT wrote. Top-level fields take precedence, so that edits of the base model's name
    work.

    Raises:
        CheckpointError: for a file that is damaged or in a newer format.
    """
    entry = disk.get(ATTRIBUTE)
    config = entry.get("adapter") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        problem = f"a {ATTRIBUTE!r} entry without the config of the adapter"
        raise damaged(Path(source).parent, problem, file=ADAPTER_CONFIG)
    check_format(entry, FORMAT, Path(source).parent, ADAPTER_CONFIG)
    return config | {name: disk[name] for name in _TOP_LEVEL_FIELDS if name in disk}


def scheme_of(disk: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the scheme in a marked config; empty if an older version wrote it.

    Raises:
        CheckpointError: if it was edited.
    """
    scheme, expected = disk[ATTRIBUTE].get("scheme"), disk[ATTRIBUTE].get("sha256")
    scheme = scheme if isinstance(scheme, dict) else {}
    if expected is not None:
        check_hash(scheme, expected, source)
    return scheme


def write_marked(draft: Path, folder: Path, scheme: dict[str, Any]) -> None:
    """Writes the marked form of a config that PEFT has saved to a draft. The file is replaced atomically."""
    config = json.loads((draft / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    entry = {"format": FORMAT, "file": JSON_FILE, "scheme": scheme, "sha256": hash_of(scheme), "adapter": config}
    visible = {name: config[name] for name in _TOP_LEVEL_FIELDS if name in config}
    disk = {"peft_type": SENTENCE, **visible, ATTRIBUTE: entry}
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ADAPTER_CONFIG, json.dumps(disk, indent=2, sort_keys=True).encode())


def names_a_scheme(source: str | os.PathLike[str], hub: Mapping[str, Any]) -> bool:
    """Whether a folder or hub id holds an adapter of a patched model."""
    path = find_file(source, ADAPTER_CONFIG, hub, download=True)
    if path is None:
        return False
    try:
        return is_marked(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:
        return False  # PEFT reports the broken file


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a local folder has the weights or the config of a PEFT adapter."""
    return any(Path(folder, name).is_file() for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS))


def check_scheme(model: Any, config: Any) -> None:
    """Compares the scheme stored in a PEFT config with the scheme of the model that gets the adapter.

    Args:
        model: a transformers model, a PEFT model around one, or a module that holds one.
        config: a PEFT config. A config that was not read from a marked adapter is valid for every model.

    Raises:
        UnsupportedError: if the model has its stock positions, or another scheme.
    """
    scheme = getattr(config, ADAPTER_SCHEME, None)
    if scheme is None:
        return
    expected = scheme_from_dict(scheme) if scheme else None
    schemes = [encoding.config for encoding in encodings(model)]
    if schemes and expected in (None, *schemes):
        return
    trained = "a position encoding" if expected is None else f"the position encoding {expected!r}"
    kind, present = type(config).__name__, repr(schemes[0]) if schemes else "its stock positions"
    raise UnsupportedError(
        f"This {kind} was read from an adapter that was trained with {trained}, but this {type(model).__name__} has "
        f"{present}. The adapter only works with the positions it was trained with. Load the adapter with "
        "PeftModel.from_pretrained(model, folder) or hf_posenc.load_position_adapter(model, folder), which apply the "
        "scheme, or call patch_model with the scheme first. To train a new adapter with the same settings, create a "
        f"new config: {kind}(**config.to_dict())."
    )


def check_targets(model: Any, config: Any) -> None:
    """Refuses a PEFT config that would train native weights without effect, or copy or wrap parts of a scheme.

    Linear layers among them that `target_modules="all-linear"` would include are excluded in the config.

    Args:
        model: the model that gets the adapter.
        config: a PEFT config.

    Raises:
        UnsupportedError: naming the module, and what to do.
    """
    placed = encodings(model)
    if not placed:
        return
    changes = [change for encoding in placed for change in encoding.record.journal.changes if change.kind == "frozen"]
    unused = {(id(change.target), change.attribute) for change in changes}
    inside = {id(module) for encoding in placed for module in encoding.modules()}
    kind, scheme = type(config).__name__, placed[0].config.name
    records = [record for encoding in placed for record in encoding.record.stacks.values()]
    attentions = {id(module) for record in records for module in (*record.attentions, *record.across)}
    for path, module in model.named_modules():
        if _selects(config, "modules_to_save", path) and not attentions.isdisjoint(map(id, module.modules())):
            raise UnsupportedError(
                f"modules_to_save of this {kind} names {path}, which computes attention with the scheme {scheme!r}. "
                "PEFT would train a copy of it, but the scheme and its parameters belong to the original. Name smaller "
                "modules, such as the projections of queries, keys and values."
            )
        names = {name for name, _ in module.named_parameters(recurse=False)}
        without_effect = {name for name in names if (id(module), name) in unused}
        if id(module) not in inside and not without_effect:
            continue
        whole = id(module) in inside or (without_effect == names and not module._modules)
        field = next(_fields(config, path, module, without_effect or names, whole), None)
        if field is None:
            continue
        if id(module) in inside:
            raise UnsupportedError(
                f"{field} of this {kind} names {path}, a part of the scheme {scheme!r}, which PEFT cannot save. The "
                f"scheme is saved next to every adapter. Leave it out of {field}; to train the scheme too, use "
                f"hf_posenc.recipes.add_lora(model, config), or set requires_grad on the parameters of "
                f"model.{ATTRIBUTE} after get_peft_model."
            )
        raise UnsupportedError(
            f"{field} of this {kind} names {path}, which has no effect in this model: the scheme {scheme!r} replaces "
            f"it, so training it would change nothing. Give {field} names that do not select it. To train the scheme, "
            "use hf_posenc.recipes.add_lora(model, config). To train native positions, call unpatch_model(model) first."
        )


def _selects(config: Any, field: str, path: str) -> bool:
    """Whether a field of a PEFT config that holds the ends of names selects a module."""
    chosen = getattr(config, field, None) or ()
    return not isinstance(chosen, str) and any(isinstance(end, str) and path.endswith(end) for end in chosen)


def _fields(config: Any, path: str, module: Any, parameters: set[str], whole: bool) -> Iterator[str]:
    """The fields of a PEFT config that select a module, or some of its parameters. PEFT decides what a name selects."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    names = [f"{path}.{name}" for name in parameters]
    targets = getattr(config, "target_parameters", None) or ()
    if any(f".{name}".endswith(f".{target}") for name in names for target in targets):
        yield "target_parameters"
    if not whole:
        return
    for field in ("modules_to_save", "trainable_token_indices"):
        if _selects(config, field, path):
            yield field
    targets = getattr(config, "target_modules", None)
    if not targets:
        return
    if targets == "all-linear":
        excluded = getattr(config, "exclude_modules", None) or ()
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(excluded, str) and path not in excluded:
            config.exclude_modules = [*excluded, path]
        return
    decides = getattr(PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type), "_check_target_module_exists", None)
    if decides is not None and decides(config, path):
        yield "target_modules"


def check_swap(model: Any, config: Any) -> None:
    """Checks an adapter whose weights replace those of another adapter, if only its config is available.

    Raises:
        UnsupportedError: as `check_scheme`, and if the scheme has parameters, because they cannot be compared.
    """
    check_scheme(model, config)
    if getattr(config, ADAPTER_SCHEME, None) is None:
        return
    if any(next(encoding.parameters(), None) is not None for encoding in encodings(model)):
        raise UnsupportedError(
            "The scheme of this model has parameters, but the given weights do not include the parameters that the "
            "new adapter was trained with. Call peft.utils.hotswap.hotswap_adapter(model, folder, name), which "
            "hf_posenc extends to compare them."
        )


def check_second(model: Any, name: str) -> None:
    """Checks that the scheme does not change under an adapter that is added to others.

    Args:
        model: a PEFT model.
        name: of the new adapter.

    Raises:
        UnsupportedError: if parameters of the scheme are trained, because the adapters of a model share them.
    """
    others = [other for other in getattr(model, "peft_config", ()) if other != name]
    if not others:
        return
    for encoding in encodings(model):
        if any(parameter.requires_grad for parameter in encoding.parameters()):
            raise UnsupportedError(
                f"The parameters of the scheme {encoding.config.name!r} are being trained, and all adapters of a model "
                f"share them: training {others[0]!r} would change the new adapter {name!r} too. If a trainer of TRL "
                "adds it as its reference model, pass the trainer "
                "ref_model=AutoModelForCausalLM.from_pretrained(model.config._name_or_path) instead. Otherwise freeze "
                "the scheme first: model.get_base_model().position_encoding.requires_grad_(False)."
            )
