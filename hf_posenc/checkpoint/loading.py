"""Loading patched checkpoints through transformers' own `from_pretrained`.

`install` wraps six methods, once per process. Each wrapper looks for an entry and, where there is none, is
the stock method:

- `PreTrainedConfig.get_config_dict` turns the form of `config.json` into the one in memory;
- `PreTrainedConfig.__post_init__` gives a config built with an entry the class that also saves it;
- `PreTrainedModel.from_pretrained` and `_from_config` build the model with its scheme already in place, so
  that weights, dtypes, shards, device maps and low-memory loading are handled by the stock code;
- `PreTrainedModel.__init__` refuses an entry that reaches it, because the stock class would ignore it;
- `PreTrainedModel.save_pretrained` refuses a model whose config says something else than the scheme it runs.

What only patched models need is imported by the functions that use it: `import hf_posenc` stays cheap.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.checkpoint import peft_hooks
from hf_posenc.checkpoint.wrapping import wrap
from hf_posenc.entry import ATTRIBUTE, MODEL_TYPE, is_on_disk_form, read_entry
from hf_posenc.errors import UnsupportedError


class EntryIgnoredError(UnsupportedError):
    """A model class was called with a config whose position encoding it would ignore."""

    def __init__(self, model_class: type, scheme: str) -> None:
        self.model_class = model_class
        name = model_class.__name__
        super().__init__(
            f"{name}(config) builds the stock architecture, but this config carries the position encoding "
            f"{scheme!r}, which would be lost. Use {name}._from_config(config) or AutoModel*.from_config(config) to "
            "build the patched model, or remove `position_encoding` with unpatch_model(model) first to build the "
            "stock one."
        )


def install() -> None:
    """Wraps the loading methods of transformers. Calling it again changes nothing."""
    wrap(PreTrainedConfig, "get_config_dict", _get_config_dict)
    wrap(PreTrainedConfig, "__post_init__", _config_post_init)
    wrap(PreTrainedModel, "from_pretrained", _from_pretrained)
    wrap(PreTrainedModel, "_from_config", _from_config)
    wrap(PreTrainedModel, "__init__", _model_init)
    wrap(PreTrainedModel, "save_pretrained", _save_pretrained)
    peft_hooks.install()


def _get_config_dict(original: Callable[..., Any], config_class: Any, source: Any, **kwargs: Any) -> Any:
    config, unused = original(config_class, source, **kwargs)
    if is_on_disk_form(config):
        from hf_posenc.checkpoint.configuration import check_not_sliced, from_disk

        config = from_disk(config, str(source))
        check_not_sliced(config_class, config, str(source))
    return config, unused


def _config_post_init(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> None:
    original(config, *args, **kwargs)
    entry = read_entry(config)
    if entry is not None:
        from hf_posenc.patching.config_entry import attach_entry

        attach_entry(config, entry)


def _model_init(original: Callable[..., Any], model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    entry = read_entry(config)
    if entry is not None:
        raise EntryIgnoredError(type(model), entry["scheme"])
    original(model, config, *args, **kwargs)


def _save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if "hf_posenc.patching" in sys.modules:
        from hf_posenc.patching.apply import runs_a_scheme

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
    if not getattr(model, "_hf_peft_config_loaded", False):
        return original(model, *args, **kwargs)
    # Adapters inside a transformers model: the adapter alone is saved.
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    folder, state = Path(given["save_directory"]), given.get("state_dict")
    with peft_hooks.scheme_beside_adapters(model, [folder], given.get("is_main_process", True), state):
        return original(model, *args, **kwargs)


def _from_config(original: Callable[..., Any], model_class: Any, config: Any, **kwargs: Any) -> Any:
    if read_entry(config) is None:
        return original(model_class, config, **kwargs)
    return original(patching_proxy(model_class), config, **kwargs)


def _from_pretrained(
    original: Callable[..., Any], model_class: Any, source: Any, *model_args: Any, **kwargs: Any
) -> Any:
    if is_scheme_name(source):
        from hf_posenc.checkpoint.rebuilding import rebuilt

        return rebuilt(functools.partial(_from_pretrained, original, model_class), source, model_args, kwargs)
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig) and read_entry(config) is None:
        _refuse_stock_config(source, config, kwargs)
        return original(model_class, source, *model_args, **kwargs)
    if not isinstance(config, PreTrainedConfig) and not _is_patched(source if config is None else config, kwargs):
        try:
            return original(model_class, source, *model_args, **kwargs)
        except EntryIgnoredError as error:
            # What could not be told from files on this machine: a first download, or an adapter's base model.
            if error.model_class is not model_class:
                raise
    with_info = kwargs.pop("output_loading_info", False)
    built: list[_Built] = []
    proxy = patching_proxy(model_class, built)
    model, info = original(proxy, source, *model_args, output_loading_info=True, **kwargs)
    _check_loaded(model, info, str(source))
    built.pop().follow(model)
    if _is_patched(str(model.config._name_or_path), kwargs):
        from hf_posenc.patching.scheme_name import unmark_names

        unmark_names(model.position_encoding)
    return (model, info) if with_info else model


def patching_proxy(model_class: Any, built: list[_Built] | None = None) -> Any:
    """A class that transformers can call like `model_class`, and that returns a patched `model_class`.

    The instance is not one of the proxy, so Python does not initialise it a second time, and nothing that
    is keyed by the class of a model can tell the difference.
    """

    def __new__(cls: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
        from hf_posenc.patching import patch_model
        from hf_posenc.patching.config_entry import detach_entry
        from hf_posenc.schemes import scheme_from_dict

        entry = read_entry(config)
        if entry is None:
            return model_class(config, *args, **kwargs)
        config = copy.deepcopy(config)
        detach_entry(config)
        model = model_class(config, *args, **kwargs)
        # Transformers builds models on the meta device and under another default dtype. Constants of a scheme
        # are computed for real and in float32; `patch_model` then moves its parameters to where the model is.
        with torch.device("cpu"), _default_dtype(torch.float32):
            patch_model(model, scheme_from_dict(entry))
        if built is not None:
            built.append(_Built(model))
        return model

    namespace = {
        "__new__": __new__,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "__doc__": model_class.__doc__,
        "config_class": model_class.config_class,
    }
    return type(model_class)(model_class.__name__, (model_class,), namespace)


class _Built:
    """Objects of a model without weights that a patch refers to, and that transformers replaces while it loads.

    Args:
        model: patched, without weights yet.
    """

    def __init__(self, model: Any) -> None:
        self.generation_config = getattr(model, "generation_config", None)

    def follow(self, model: Any) -> None:
        """Applies what the patch did to the old objects to the new ones, and lets its journal undo it there."""
        for change in model.position_encoding.journal.changes:
            if change.kind == "frozen":
                change.target._parameters[change.attribute].requires_grad_(False)
            elif change.target is self.generation_config:
                change.target = model.generation_config
                change.target.__dict__[change.attribute] = self.generation_config.__dict__[change.attribute]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_loaded(model: Any, info: dict[str, Any], source: str) -> None:
    """A scheme must not run on weights that nobody trained."""
    from hf_posenc.checkpoint.configuration import CheckpointError

    own = {name for name, _ in model.named_parameters() if _is_position_weight(name)}
    mismatched = {key[0] if isinstance(key, tuple) else key for key in info.get("mismatched_keys", ())}
    absent = sorted(own & (set(info.get("missing_keys", ())) | mismatched))
    entry = read_entry(model.config) or {}
    if absent:
        raise CheckpointError(
            f"{source} has no weights, or none of the right shape, for its position encoding "
            f"{entry.get('scheme')!r}: {', '.join(absent[:5])}{' ...' if len(absent) > 5 else ''}. It would run on "
            "fresh random ones. Save the model again, or load the stock weights and call patch_model to train "
            "the scheme anew."
        )
    surplus = sorted(key for key in info.get("unexpected_keys", ()) if _is_position_weight(key))
    if surplus:
        raise CheckpointError(
            f"{source} holds weights that its position encoding {entry.get('scheme')!r} does not have: "
            f"{', '.join(surplus[:5])}{' ...' if len(surplus) > 5 else ''}. The entry in config.json and the "
            "weights are from different models."
        )


def _is_position_weight(name: str) -> bool:
    return ATTRIBUTE in name.split(".")


def _refuse_stock_config(source: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    if source is not None and not kwargs.get("gguf_file") and _is_patched(source, kwargs):
        raise UnsupportedError(
            f"The model in {source} has a position encoding of hf_posenc, but the {type(config).__name__} passed as "
            "`config` does not carry it, so the weights would run with other positions than they were trained "
            "with. Pass no config, or change the one from AutoConfig.from_pretrained; for the stock positions, "
            "load the model as it is and call unpatch_model. (A text-only class cannot read a part of a composite "
            "checkpoint: load the whole.)"
        )


def is_scheme_name(source: Any) -> bool:
    """Whether `source` is the name of a model that was patched in memory; plain strings are told without imports."""
    if type(source) is str or "hf_posenc.patching.scheme_name" not in sys.modules:
        return False
    from hf_posenc.patching.scheme_name import SchemeName

    return isinstance(source, SchemeName)


def _is_patched(source: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the `config.json` that `source` names on this machine, if any, is that of a patched model.

    Looks at local folders and at the hub's cache only: no request is ever sent.
    """
    path = local_config(source, kwargs)
    if path is None:
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    if f'"{MODEL_TYPE}"' not in text:
        return False
    try:
        config = json.loads(text)
    except json.JSONDecodeError:
        return False  # the stock code reports the broken file
    return is_on_disk_form(config)


def local_config(source: Any, kwargs: dict[str, Any]) -> Path | None:
    """The `config.json` that `source` names, if it is on this machine. No request is ever sent."""
    if not isinstance(source, str | os.PathLike):
        return None
    subfolder = kwargs.get("subfolder") or ""
    if os.path.isfile(source):
        return Path(source) if str(source).endswith(".json") else None
    if os.path.isdir(source):
        path = Path(source, subfolder, "config.json")
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    filename = f"{subfolder}/config.json" if subfolder else "config.json"
    try:
        cached = try_to_load_from_cache(
            str(source), filename, cache_dir=kwargs.get("cache_dir"), revision=kwargs.get("revision")
        )
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
