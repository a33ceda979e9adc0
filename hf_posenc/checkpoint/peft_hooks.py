"""PEFT adapters of patched models: the scheme is saved with the adapter and applied before the adapter is loaded.

`install` wraps these functions, once per process and as soon as PEFT is imported:

- `PeftConfig.save_pretrained` and `from_json_file`, which write and read the marked form of `adapter_config.json`, and
  `from_pretrained`, which stores the scheme in the config;
- `PeftModel.save_pretrained`, which writes the scheme's files next to the adapter;
- functions that create adapter layers from a config, or swap their weights: they refuse a config with another scheme;
- the creation of adaption prompts, which do not work in a patched model;
- `PeftModel.from_pretrained`, `PeftModel.load_adapter`, `hotswap_adapter` and transformers' own `load_adapter`, which
  patch a stock base before PEFT uses it, accept a base with the same scheme, and refuse a wrong base.

If neither the model nor the adapter has a scheme, each calls the stock method.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_posenc.checkpoint.atomic_folder import is_place_for_folder
from hf_posenc.checkpoint.wrapping import wrap
from hf_posenc.when_imported import when_imported

#: The scheme to mark adapter configs with while they are saved.
_MARKS: ContextVar[dict[str, Any] | None] = ContextVar("hf_posenc_marks_adapter_configs", default=None)
#: The scheme found in the adapter config that is being read.
_FOUND: ContextVar[dict[str, Any] | None] = ContextVar("hf_posenc_found_scheme", default=None)
#: Whether the scheme of the swapped-in adapter was compared with the model's scheme.
_COMPARED: ContextVar[bool] = ContextVar("hf_posenc_compared_schemes", default=False)
_NO_SCHEME: ContextVar[bool] = ContextVar("hf_posenc_found_no_scheme", default=False)


def install() -> None:
    """Wraps the methods. Calling it again changes nothing."""
    when_imported("transformers.integrations.peft", _wrap_transformers)
    when_imported("peft.config", _wrap_config)
    when_imported("peft.tuners.tuners_utils", _wrap_tuners)
    when_imported("peft.peft_model", _wrap_model)
    when_imported("peft.mixed_model", _wrap_mixed_model)
    when_imported("peft.utils.hotswap", _wrap_hotswap)
    when_imported("peft.tuners.adaption_prompt.model", _wrap_adaption_prompts)


def _wrap_transformers(module: ModuleType) -> None:
    wrap(module.PeftAdapterMixin, "load_adapter", _load_into_transformers)


def _wrap_config(module: ModuleType) -> None:
    wrap(module.PeftConfigMixin, "save_pretrained", _save_config)
    wrap(module.PeftConfigMixin, "from_json_file", _read_config)
    wrap(module.PeftConfigMixin, "from_pretrained", _load_config)


def _wrap_tuners(module: ModuleType) -> None:
    wrap(module.BaseTuner, "inject_adapter", _inject_adapter)


def _wrap_model(module: ModuleType) -> None:
    wrap(module.PeftModel, "__init__", _make_model)
    wrap(module.PeftModel, "add_adapter", _add_adapter)
    wrap(module.PeftModel, "save_pretrained", _save_model)
    wrap(module.PeftModel, "from_pretrained", _load_model)
    wrap(module.PeftModel, "load_adapter", _load_adapter)


def _wrap_mixed_model(module: ModuleType) -> None:
    wrap(module.PeftMixedModel, "from_pretrained", _load_model)
    wrap(module.PeftMixedModel, "load_adapter", _load_adapter)


def _wrap_hotswap(module: ModuleType) -> None:
    wrap(module, "hotswap_adapter", _hotswap)
    # This is looked up at each call, so it also affects a hotswap_adapter that was imported by name before.
    wrap(module, "hotswap_adapter_from_state_dict", _hotswap_weights)


def _wrap_adaption_prompts(module: ModuleType) -> None:
    wrap(module.AdaptionPromptModel, "__init__", _make_adaption_prompts)


def _make_adaption_prompts(original: Callable[..., Any], tuner: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    target = _transformers_model(model)
    if target is not None and _encoding(target) is not None:
        from hf_posenc.patching.place.model_checks import recomputed_queries_error

        raise recomputed_queries_error(target)
    original(tuner, model, *args, **kwargs)


# Saving


def _save_config(original: Callable[..., Any], config: Any, save_directory: Any, **kwargs: Any) -> None:
    scheme = _MARKS.get()
    if scheme is None:
        original(config, save_directory, **kwargs)
        return
    from hf_posenc.checkpoint.adapter_config import CONFIG_FILE, write_marked

    # The stock form must never be readable in the folder, not even for a moment.
    Path(save_directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adapter-", dir=save_directory) as draft:
        original(config, draft, **kwargs)
        write_marked(Path(draft, CONFIG_FILE), scheme)
        os.replace(Path(draft, CONFIG_FILE), Path(save_directory, CONFIG_FILE))


def _save_model(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    given = _bound(original, (model, *args), kwargs)
    names = list(model.peft_config) if given["selected_adapters"] is None else given["selected_adapters"]
    if not is_place_for_folder(given["save_directory"]):
        return original(model, *args, **kwargs)  # PEFT says what is wrong with it.
    folder = Path(given["save_directory"])
    folders = [folder if name == "default" else folder / name for name in names]
    with scheme_saved_with_adapters(model, folders, given["is_main_process"], given.get("state_dict")):
        return original(model, *args, **kwargs)


@contextmanager
def scheme_saved_with_adapters(
    model: Any, folders: list[Path], is_main_process: bool = True, state: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Writes the files of the model's scheme, and marks the configs of adapters saved in the `with` block.

    For a model without a scheme, removes the files that an earlier save of an adapter left in the folders.

    Args:
        model: a PEFT model, or a transformers model with adapters inside.
        folders: the folders of the adapters.
        is_main_process: whether this process writes files.
        state: its full state dict, if its own parameters are sharded.
    """
    target = _transformers_model(model)
    encoding = None if target is None else _encoding(target)
    if target is None or encoding is None:
        if is_main_process:
            _remove_scheme(folders)
        yield
        return
    from hf_posenc.checkpoint.adapter_config import CONFIG_FILE
    from hf_posenc.checkpoint.position_adapters import adapters_of, collect
    from hf_posenc.checkpoint.position_files import JSON_FILE

    files = None
    if is_main_process:
        prefix = next((f"{name}." for name, module in model.named_modules() if module is target and name), "")
        inner = None if state is None else {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        files = collect(target, encoding, adapters_of(model), inner)
        for folder in folders:
            # Until both are written again, nothing in the folder can be loaded.
            for name in (CONFIG_FILE, JSON_FILE):
                Path(folder, name).unlink(missing_ok=True)
    token = _MARKS.set(encoding.config.to_dict())
    try:
        yield
    finally:
        _MARKS.reset(token)
    if files is not None:
        for folder in folders:
            files.write(folder, beside_adapter=True)


def _remove_scheme(folders: list[Path]) -> None:
    from hf_posenc.checkpoint.adapter_config import CONFIG_FILE, holds_adapter
    from hf_posenc.checkpoint.position_files import JSON_FILE, TENSORS_FILE

    for folder in folders:
        # Files without an adapter come from save_position_adapter and must not be removed here.
        if Path(folder, JSON_FILE).is_file() and holds_adapter(folder):
            # The marked config is removed last: as long as it exists, the adapter cannot be loaded without its scheme.
            for name in (JSON_FILE, TENSORS_FILE, CONFIG_FILE):
                Path(folder, name).unlink(missing_ok=True)


# Loading


def _load_config(original: Callable[..., Any], config_class: Any, *args: Any, **kwargs: Any) -> Any:
    token = _FOUND.set(None)
    try:
        config = original(config_class, *args, **kwargs)
        scheme = _FOUND.get()
    finally:
        _FOUND.reset(token)
    if scheme is not None:
        from hf_posenc.checkpoint.adapter_guard import remember

        remember(config, scheme)
    return config


def _read_config(original: Callable[..., Any], config_class: Any, path: Any, **kwargs: Any) -> Any:
    from hf_posenc.checkpoint.adapter_config import is_marked, scheme_of, unmarked
    from hf_posenc.checkpoint.configuration import CheckpointError

    config = original(config_class, path, **kwargs)
    if not is_marked(config):
        return config
    if _NO_SCHEME.get():
        raise CheckpointError(
            f"{path} belongs to an adapter that was trained on a patched model, but the file could not be found a "
            "moment before: the hub did not respond, or the file was written in between. Load the adapter again."
        )
    stock_form = unmarked(config, str(path))
    _FOUND.set(scheme_of(config, str(path)))
    return stock_form


def _make_model(original: Callable[..., Any], peft_model: Any, *args: Any, **kwargs: Any) -> None:
    from hf_posenc.checkpoint.adapter_guard import check_scheme

    given = _bound(original, (peft_model, *args), kwargs)
    check_scheme(given["model"], given["peft_config"])
    original(peft_model, *args, **kwargs)


def _add_adapter(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    from hf_posenc.checkpoint.adapter_guard import check_scheme, check_second

    given = _bound(original, (model, *args), kwargs)
    check_scheme(model, given["peft_config"])
    check_second(model, given["adapter_name"])
    return original(model, *args, **kwargs)


def _inject_adapter(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    from hf_posenc.checkpoint.adapter_guard import check_scheme

    given = _bound(original, (tuner, *args), kwargs)
    check_scheme(given["model"], tuner.peft_config[given["adapter_name"]])
    return original(tuner, *args, **kwargs)


def _load_model(original: Callable[..., Any], peft_class: Any, model: Any, model_id: Any, *args: Any, **kw: Any) -> Any:
    with _placed(model, model_id, kw):
        return original(peft_class, model, model_id, *args, **kw)


def _load_adapter(
    original: Callable[..., Any], model: Any, model_id: Any, adapter_name: str, *args: Any, **kw: Any
) -> Any:
    with _placed(model, model_id, kw, adapter_name):
        return original(model, model_id, adapter_name, *args, **kw)


def _hotswap(original: Callable[..., Any], model: Any, model_id: Any, adapter_name: str, *args: Any, **kw: Any) -> Any:
    token = _COMPARED.set(True)
    try:
        with _placed(model, model_id, kw, adapter_name):
            return original(model, model_id, adapter_name, *args, **kw)
    finally:
        _COMPARED.reset(token)


def _hotswap_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _COMPARED.get():
        from hf_posenc.checkpoint.adapter_guard import check_swap

        given = _bound(original, args, kwargs)
        check_swap(given["model"], given["config"])
    return original(*args, **kwargs)


def _load_into_transformers(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    given = _bound(original, (model, *args), kwargs)
    loading = given["load_config"]
    source = given["peft_model_id"] or getattr(loading, "pretrained_model_name_or_path", None)
    hub = {**(getattr(loading, "download_kwargs", None) or {}), **(given["adapter_kwargs"] or {})}
    hub |= {name: kwargs[name] for name in ("revision", "subfolder", "token", "cache_dir") if name in kwargs}
    if source is None:
        from hf_posenc.checkpoint.adapter_guard import check_scheme

        check_scheme(model, given["peft_config"])
    with _placed(model, source, hub, given["adapter_name"] or "default"):
        return original(model, *args, **kwargs)


@contextmanager
def _placed(model: Any, source: Any, hub: Mapping[str, Any], adapter_name: str | None = None) -> Iterator[None]:
    """Applies the scheme of an adapter to `model` before the adapter is loaded; removes it again if loading fails."""
    from hf_posenc.checkpoint.adapter_config import names_a_scheme

    target = _transformers_model(model)
    if target is None or source is None:
        yield
    elif not names_a_scheme(source, hub):
        if adapter_name is not None and _encoding(target) is not None:
            _warn_about_no_scheme(target, source)
        token = _NO_SCHEME.set(True)
        try:
            yield
        finally:
            _NO_SCHEME.reset(token)
    else:
        undo = _place(model, target, source, hub, adapter_name)
        try:
            yield
        except BaseException:
            undo()
            raise


def _place(
    model: Any, target: Any, source: Any, hub: Mapping[str, Any], adapter_name: str | None
) -> Callable[[], object]:
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.checkpoint.placing import place
    from hf_posenc.checkpoint.position_adapters import adapters_of
    from hf_posenc.checkpoint.position_files import JSON_FILE, read_position_files

    files = read_position_files(source, hub)
    if files is None:
        raise CheckpointError(
            f"The adapter in {source} was trained on a patched model, but {JSON_FILE}, which contains the scheme, is "
            "missing. Copy the whole folder."
        )
    others = set(adapters_of(model)) - {adapter_name}
    return place(target, files, str(source), shared=bool(others))


def _warn_about_no_scheme(target: Any, source: Any) -> None:
    warnings.warn(
        f"The adapter in {source} names no position encoding: it was trained on a stock model, or saved by a version "
        f"of hf_posenc before adapters had one. This {type(target).__name__} has the scheme "
        f"{target.position_encoding.config.name!r}. If the adapter was trained with this scheme, save it again. "
        "Otherwise load it on the stock model.",
        UserWarning,
        stacklevel=5,
    )


def _transformers_model(model: Any) -> Any:
    """Returns the transformers model inside a PEFT model, or the model itself; `None` for anything else."""
    from transformers import PreTrainedModel

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner if isinstance(inner, PreTrainedModel) else None


def _encoding(target: Any) -> Any:
    if "hf_posenc.patching" not in sys.modules:
        return None
    from hf_posenc.patching.place.in_force import current_encoding

    return current_encoding(target)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, including defaults and additional keywords."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name)
    return found
