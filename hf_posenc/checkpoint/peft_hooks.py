"""PEFT adapters of patched models: the scheme is saved beside the adapter, and placed before the adapter is loaded.

`install` wraps, once per process and as soon as PEFT is imported:

- `PeftConfig.save_pretrained` and `from_json_file`, which write and read the marked form of `adapter_config.json`;
- `PeftModel.save_pretrained`, which writes the scheme's files beside the adapter;
- the making of adaption prompts, which cannot work in a patched model;
- `PeftModel.from_pretrained`, `PeftModel.load_adapter`, `hotswap_adapter` and transformers' own `load_adapter`, which
  patch a stock base before PEFT sees it, go on with a patched one, and refuse the wrong one.

Where neither the model nor the adapter has a scheme, each is the stock method.
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

from hf_posenc.checkpoint.wrapping import wrap
from hf_posenc.when_imported import when_imported

_MARKS: ContextVar[bool] = ContextVar("hf_posenc_marks_adapter_configs", default=False)
_NO_SCHEME: ContextVar[bool] = ContextVar("hf_posenc_found_no_scheme", default=False)


def install() -> None:
    """Wraps the methods. Calling it again changes nothing."""
    when_imported("transformers.integrations.peft", _wrap_transformers)
    when_imported("peft.config", _wrap_config)
    when_imported("peft.peft_model", _wrap_model)
    when_imported("peft.mixed_model", _wrap_mixed_model)
    when_imported("peft.utils.hotswap", _wrap_hotswap)
    when_imported("peft.tuners.adaption_prompt.model", _wrap_adaption_prompts)


def _wrap_transformers(module: ModuleType) -> None:
    wrap(module.PeftAdapterMixin, "load_adapter", _load_into_transformers)


def _wrap_config(module: ModuleType) -> None:
    wrap(module.PeftConfigMixin, "save_pretrained", _save_config)
    wrap(module.PeftConfigMixin, "from_json_file", _read_config)


def _wrap_model(module: ModuleType) -> None:
    wrap(module.PeftModel, "save_pretrained", _save_model)
    wrap(module.PeftModel, "from_pretrained", _load_model)
    wrap(module.PeftModel, "load_adapter", _load_adapter)


def _wrap_mixed_model(module: ModuleType) -> None:
    wrap(module.PeftMixedModel, "from_pretrained", _load_model)
    wrap(module.PeftMixedModel, "load_adapter", _load_adapter)


def _wrap_hotswap(module: ModuleType) -> None:
    wrap(module, "hotswap_adapter", _hotswap)


def _wrap_adaption_prompts(module: ModuleType) -> None:
    wrap(module.AdaptionPromptModel, "__init__", _make_adaption_prompts)


def _make_adaption_prompts(original: Callable[..., Any], tuner: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    target = _transformers_model(model)
    if target is not None and _encoding(target) is not None:
        from hf_posenc.patching.recomputed_queries import recomputed_queries_error

        raise recomputed_queries_error(target)
    original(tuner, model, *args, **kwargs)


# Saving


def _save_config(original: Callable[..., Any], config: Any, save_directory: Any, **kwargs: Any) -> None:
    if not _MARKS.get():
        original(config, save_directory, **kwargs)
        return
    from hf_posenc.checkpoint.adapter_config import CONFIG_FILE, write_marked

    # The stock form must never be readable in the folder, however short.
    Path(save_directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adapter-", dir=save_directory) as draft:
        original(config, draft, **kwargs)
        write_marked(Path(draft, CONFIG_FILE))
        os.replace(Path(draft, CONFIG_FILE), Path(save_directory, CONFIG_FILE))


def _save_model(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    given = _bound(original, (model, *args), kwargs)
    names = list(model.peft_config) if given["selected_adapters"] is None else given["selected_adapters"]
    folder = Path(given["save_directory"])
    folders = [folder if name == "default" else folder / name for name in names]
    with scheme_beside_adapters(model, folders, given["is_main_process"], given.get("state_dict")):
        return original(model, *args, **kwargs)


@contextmanager
def scheme_beside_adapters(
    model: Any, folders: list[Path], is_main_process: bool = True, state: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Writes the files of the model's scheme, and marks the configs of adapters that are saved in the `with` block.

    Args:
        model: a PEFT model, or a transformers model with adapters inside.
        folders: where adapters will be written.
        is_main_process: whether this process writes.
        state: its full state dict, if its own parameters are sharded.
    """
    target = _transformers_model(model)
    encoding = None if target is None else _encoding(target)
    if target is None or encoding is None:
        yield
        return
    from hf_posenc.checkpoint.adapter_config import CONFIG_FILE
    from hf_posenc.checkpoint.position_adapters import adapters_of, collect

    if is_main_process:
        prefix = next((f"{name}." for name, module in model.named_modules() if module is target and name), "")
        inner = None if state is None else {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        files = collect(target, encoding, adapters_of(model), inner)
        for folder in folders:
            # Until the new config is there, nothing in the folder can be loaded.
            Path(folder, CONFIG_FILE).unlink(missing_ok=True)
            files.write(folder)
    token = _MARKS.set(True)
    try:
        yield
    finally:
        _MARKS.reset(token)


# Loading


def _read_config(original: Callable[..., Any], config_class: Any, path: Any, **kwargs: Any) -> Any:
    from hf_posenc.checkpoint.adapter_config import is_marked, unmarked
    from hf_posenc.checkpoint.configuration import CheckpointError

    config = original(config_class, path, **kwargs)
    if not is_marked(config):
        return config
    if _NO_SCHEME.get():
        raise CheckpointError(
            f"{path} says that the adapter was trained on a patched model, but a moment ago the file could not be "
            "found: the hub did not answer, or the file was written in between. Load the adapter again."
        )
    return unmarked(config, str(path))


def _load_model(original: Callable[..., Any], peft_class: Any, model: Any, model_id: Any, *args: Any, **kw: Any) -> Any:
    with _placed(model, model_id, kw):
        return original(peft_class, model, model_id, *args, **kw)


def _load_adapter(
    original: Callable[..., Any], model: Any, model_id: Any, adapter_name: str, *args: Any, **kw: Any
) -> Any:
    with _placed(model, model_id, kw, adapter_name):
        return original(model, model_id, adapter_name, *args, **kw)


def _hotswap(original: Callable[..., Any], model: Any, model_id: Any, adapter_name: str, *args: Any, **kw: Any) -> Any:
    with _placed(model, model_id, kw, adapter_name):
        return original(model, model_id, adapter_name, *args, **kw)


def _load_into_transformers(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    given = _bound(original, (model, *args), kwargs)
    loading = given["load_config"]
    source = given["peft_model_id"] or getattr(loading, "pretrained_model_name_or_path", None)
    hub = {**(getattr(loading, "download_kwargs", None) or {}), **(given["adapter_kwargs"] or {})}
    hub |= {name: kwargs[name] for name in ("revision", "subfolder", "token", "cache_dir") if name in kwargs}
    with _placed(model, source, hub, given["adapter_name"] or "default"):
        return original(model, *args, **kwargs)


@contextmanager
def _placed(model: Any, source: Any, hub: Mapping[str, Any], adapter_name: str | None = None) -> Iterator[None]:
    """Places the scheme of an adapter in `model` for what loads the adapter; takes it out again if that fails."""
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
    elif _place(model, target, source, hub, adapter_name):
        try:
            yield
        except BaseException:
            from hf_posenc.patching import unpatch_model

            unpatch_model(target)
            raise
    else:
        yield


def _place(model: Any, target: Any, source: Any, hub: Mapping[str, Any], adapter_name: str | None) -> bool:
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.checkpoint.position_adapters import adapters_of, place
    from hf_posenc.checkpoint.position_files import JSON_FILE, read_position_files

    files = read_position_files(source, hub)
    if files is None:
        raise CheckpointError(
            f"The adapter in {source} was trained on a patched model, and {JSON_FILE}, which holds the scheme, is not "
            "there. Copy the whole folder."
        )
    others = set(adapters_of(model)) - {adapter_name}
    return place(target, files, str(source), shared=bool(others))


def _warn_about_no_scheme(target: Any, source: Any) -> None:
    warnings.warn(
        f"The adapter in {source} names no position encoding: it was trained on a stock model, or saved by a "
        f"version of hf_posenc before adapters had one. This {type(target).__name__} has the scheme "
        f"{target.position_encoding.config.name!r}. If the adapter was trained with it, save it again; if it was not, "
        "load it on the stock model.",
        UserWarning,
        stacklevel=5,
    )


def _transformers_model(model: Any) -> Any:
    """The transformers model inside a PEFT model, or the model itself; `None` for anything else."""
    from transformers import PreTrainedModel

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner if isinstance(inner, PreTrainedModel) else None


def _encoding(target: Any) -> Any:
    if "hf_posenc.patching" not in sys.modules:
        return None
    from hf_posenc.patching.apply import current_encoding

    return current_encoding(target)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults and further keywords among them."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name)
    return found
