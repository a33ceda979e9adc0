"""Wrappers of transformers methods that load and save models.

The methods below are wrapped once per process. Each wrapper checks for an entry and calls the stock method if there is
none:

- `PreTrainedConfig.get_config_dict` converts the form in `config.json` to the form in memory;
- `PreTrainedConfig.__post_init__` gives a config built with an entry the class that also saves it;
- `PreTrainedModel.from_pretrained` and `_from_config` build the model with its scheme already in place, so
  that weights, dtypes, shards, device maps and low-memory loading are handled by the stock code;
- `PreTrainedModel.__init__` raises for a config with an entry, because the stock class would ignore it;
- `PreTrainedModel.load_state_dict` refuses weights that were trained with another scheme, if strict;
- `PreTrainedModel.save_pretrained` saves a patched model atomically, or raises;
- `PreTrainedModel._upload_modified_files` uploads a patched model with a card that describes its scheme;
- `Trainer._load_from_checkpoint` and `_load_best_model` refuse checkpoints of a model with another scheme.

Each method is wrapped when its module is imported. Imports that only patched models need are inside functions, so
`import hf_posenc` loads neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_posenc.checkpoint import engine_configs, other_loaders, peft_hooks
from hf_posenc.checkpoint.loading import EntryIgnoredError, from_config, from_pretrained, refuse_wish
from hf_posenc.checkpoint.recognition import finish_saving_of, read_config
from hf_posenc.checkpoint.wrapping import wrap
from hf_posenc.entry import ATTRIBUTE, MODEL_TYPE, find_mark, is_entry, is_on_disk_form, read_entry
from hf_posenc.when_imported import when_imported


def install() -> None:
    """Wraps the loading methods of transformers, PEFT and others, each as soon as its module is imported."""
    when_imported("transformers.configuration_utils", install_in_configs)
    when_imported("transformers.modeling_utils", install_in_models)
    when_imported("transformers.trainer", _wrap_trainer)
    other_loaders.install()
    engine_configs.install()
    peft_hooks.install()


def install_in_configs(module: ModuleType) -> None:
    """Wraps the methods of `PreTrainedConfig`. Calling it again changes nothing.

    Args:
        module: `transformers.configuration_utils`.
    """
    wrap(module.PreTrainedConfig, "get_config_dict", _get_config_dict)
    wrap(module.PreTrainedConfig, "__post_init__", _config_post_init)


def install_in_models(module: ModuleType) -> None:
    """Wraps the methods of `PreTrainedModel`. Calling it again changes nothing.

    Args:
        module: `transformers.modeling_utils`.
    """
    wrap(module.PreTrainedModel, "from_pretrained", from_pretrained)
    wrap(module.PreTrainedModel, "_from_config", from_config)
    wrap(module.PreTrainedModel, "__init__", _model_init)
    wrap(module.PreTrainedModel, "load_state_dict", _load_state_dict)
    wrap(module.PreTrainedModel, "save_pretrained", _save_pretrained)
    wrap(module.PreTrainedModel, "_upload_modified_files", _upload_modified_files)


def _get_config_dict(original: Callable[..., Any], config_class: Any, source: Any, **kwargs: Any) -> Any:
    finish_saving_of(source, kwargs)
    if isinstance(source, str | os.PathLike):
        path = Path(source, kwargs.get("subfolder") or "", "config.json")
        if path.is_dir():  # A model class would otherwise use its default config.
            raise IsADirectoryError(f"{path} is a folder, where the config of a model is expected.")
    try:
        config, unused = original(config_class, source, **kwargs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = read_config(source, kwargs)
        if text is None or MODEL_TYPE not in text:
            raise
        from hf_posenc.checkpoint.configuration import CheckpointError

        raise CheckpointError(
            f"The config.json of {source} cannot be read ({type(error).__name__}: {error}). The file was edited or "
            "damaged; restore it, or save the model again."
        ) from error
    if is_on_disk_form(config):
        from hf_posenc.checkpoint.configuration import check_model_type, check_not_sliced, from_disk

        config = from_disk(config, str(source))
        check_not_sliced(config_class, config, str(source))
        check_model_type(config_class, config, str(source))
    elif isinstance(config, dict) and is_entry(config.get(ATTRIBUTE)):
        # Users may write the dictionary of a config to the file themselves, so it must be complete.
        from hf_posenc.checkpoint.configuration import CheckpointError, check_format, check_scheme

        if not isinstance(config.get("model_type"), str):
            raise CheckpointError(
                f"The config.json of {source} has a model_type that is not a string. The file was edited or damaged; "
                "restore it, or save the model again."
            )
        check_format(config[ATTRIBUTE], str(source))
        check_scheme(config[ATTRIBUTE]["scheme"], str(source))
    return config, unused


def _config_post_init(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> None:
    original(config, *args, **kwargs)
    if read_entry(config) is not None:
        from hf_posenc.patching.place.config_entry import carry_entry

        carry_entry(config)


def _model_init(original: Callable[..., Any], model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    entry = read_entry(config)
    if entry is not None:
        raise EntryIgnoredError(type(model), entry["scheme"])
    # Classes of other projects may read a field of this name.
    if getattr(config, ATTRIBUTE, None) is not None and type(model).__module__.startswith("transformers.models."):
        refuse_wish(type(model), getattr(config, ATTRIBUTE))
    original(model, config, *args, **kwargs)


def _load_state_dict(
    original: Callable[..., Any], model: Any, state_dict: Any, strict: bool = True, *args: Any, **kwargs: Any
) -> Any:
    patching = "hf_posenc.patching" in sys.modules
    if strict and isinstance(state_dict, Mapping) and (patching or find_mark(state_dict) is not None):
        from hf_posenc.checkpoint.agreement import check_state_dict

        check_state_dict(model, state_dict)
    return original(model, state_dict, strict, *args, **kwargs)


def _save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if "hf_posenc.patching" not in sys.modules:
        return original(model, *args, **kwargs)
    from hf_posenc.checkpoint.saving import save_pretrained

    return save_pretrained(original, model, *args, **kwargs)


def _upload_modified_files(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if "hf_posenc.patching" not in sys.modules:
        return original(model, *args, **kwargs)
    from hf_posenc.checkpoint.pushing import upload_modified_files

    return upload_modified_files(original, model, *args, **kwargs)


def _wrap_trainer(module: Any) -> None:
    wrap(module.Trainer, "_load_from_checkpoint", _load_from_checkpoint)
    wrap(module.Trainer, "_load_best_model", _load_best_model)


def _load_from_checkpoint(original: Callable[..., Any], trainer: Any, folder: Any, model: Any = None) -> None:
    from hf_posenc.checkpoint.resuming import check_checkpoint

    check_checkpoint(trainer, folder, model)
    original(trainer, folder, model)


def _load_best_model(original: Callable[..., Any], trainer: Any) -> None:
    from hf_posenc.checkpoint.resuming import check_checkpoint

    check_checkpoint(trainer, trainer.state.best_model_checkpoint)
    original(trainer)
