"""Loading patched checkpoints through transformers' own `from_pretrained`.

The methods below are wrapped, once per process. Each wrapper looks for an entry and, where there is none, is the
stock method:

- `PreTrainedConfig.get_config_dict` turns the form of `config.json` into the one in memory;
- `PreTrainedConfig.__post_init__` gives a config built with an entry the class that also saves it;
- `PreTrainedModel.from_pretrained` and `_from_config` build the model with its scheme already in place, so
  that weights, dtypes, shards, device maps and low-memory loading are handled by the stock code;
- `PreTrainedModel.__init__` refuses an entry that reaches it, because the stock class would ignore it;
- `PreTrainedModel.load_state_dict` refuses weights that were trained with another scheme, where it is strict;
- `PreTrainedModel.save_pretrained` saves a patched model as a whole, or refuses to;
- `Trainer._load_from_checkpoint` and `_load_best_model` refuse checkpoints of a model with another scheme.

Each is wrapped when its module is imported, and what only patched models need is imported by the functions
that use it: `import hf_posenc` loads neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint import peft_hooks
from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.checkpoint.local_files import local_file
from hf_posenc.checkpoint.wrapping import wrap
from hf_posenc.entry import ATTRIBUTE, MODEL_TYPE, find_mark, is_entry, is_on_disk_form, read_entry, read_fields
from hf_posenc.errors import UnsupportedError
from hf_posenc.when_imported import when_imported

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

#: Bytes of a `config.json` that are read to learn whether it is that of a patched model.
_LARGEST_CONFIG = 2**24


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
    """Wraps the loading methods of transformers and PEFT, each as soon as its module is there."""
    when_imported("transformers.configuration_utils", install_in_configs)
    when_imported("transformers.modeling_utils", install_in_models)
    when_imported("transformers.trainer", _wrap_trainer)
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
    wrap(module.PreTrainedModel, "from_pretrained", _from_pretrained)
    wrap(module.PreTrainedModel, "_from_config", _from_config)
    wrap(module.PreTrainedModel, "__init__", _model_init)
    wrap(module.PreTrainedModel, "load_state_dict", _load_state_dict)
    wrap(module.PreTrainedModel, "save_pretrained", _save_pretrained)


def _get_config_dict(original: Callable[..., Any], config_class: Any, source: Any, **kwargs: Any) -> Any:
    _finish_saving(source, kwargs)
    if isinstance(source, str | os.PathLike):
        path = Path(source, kwargs.get("subfolder") or "", "config.json")
        if path.is_dir():  # A model class would take its defaults for the config.
            raise IsADirectoryError(f"{path} is a folder, where the config of a model is expected.")
    try:
        config, unused = original(config_class, source, **kwargs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = _read_config(source, kwargs)
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
        # The dictionary of a config, written to the file by hand: it has to hold as much.
        from hf_posenc.checkpoint.configuration import check_format, check_scheme

        check_format(config[ATTRIBUTE], str(source))
        check_scheme(config[ATTRIBUTE]["scheme"], str(source))
    return config, unused


def _config_post_init(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> None:
    original(config, *args, **kwargs)
    if read_entry(config) is not None:
        from hf_posenc.patching.config_entry import carry_entry

        carry_entry(config)


def _model_init(original: Callable[..., Any], model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    entry = read_entry(config)
    if entry is not None:
        raise EntryIgnoredError(type(model), entry["scheme"])
    original(model, config, *args, **kwargs)


def _load_state_dict(
    original: Callable[..., Any], model: Any, state_dict: Any, strict: bool = True, *args: Any, **kwargs: Any
) -> Any:
    patching = "hf_posenc.patching" in sys.modules
    if strict and isinstance(state_dict, Mapping) and (patching or find_mark(state_dict) is not None):
        from hf_posenc.checkpoint.agreement import check_state_dict

        check_state_dict(model, state_dict)
    return original(model, state_dict, strict, *args, **kwargs)


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


def _save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if "hf_posenc.patching" not in sys.modules:
        return original(model, *args, **kwargs)
    from hf_posenc.checkpoint.saving import save_pretrained

    return save_pretrained(original, model, *args, **kwargs)


def _finish_saving(source: Any, kwargs: dict[str, Any]) -> None:
    """Ends what a process that was killed had begun, before anything is read."""
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        finish_saving(os.path.join(source, kwargs.get("subfolder") or ""))


def _from_config(original: Callable[..., Any], model_class: Any, config: Any, **kwargs: Any) -> Any:
    if read_entry(config) is None:
        return original(model_class, config, **kwargs)
    return original(patching_proxy(model_class), config, **kwargs)


def _from_pretrained(
    original: Callable[..., Any], model_class: Any, source: Any, *model_args: Any, **kwargs: Any
) -> Any:
    from transformers import PreTrainedConfig

    _finish_saving(source, kwargs)
    if is_scheme_name(source):
        from hf_posenc.checkpoint.rebuilding import rebuilt

        return rebuilt(functools.partial(_from_pretrained, original, model_class), source, model_args, kwargs)
    config = kwargs.get("config")
    with_info = kwargs.pop("output_loading_info", False)
    stock = functools.partial(_stock_from_pretrained, original, model_class, source, *model_args)
    if isinstance(config, PreTrainedConfig) and read_entry(config) is None:
        _refuse_stock_config(source, config, kwargs)
        return stock(with_info=with_info, **kwargs)
    if not isinstance(config, PreTrainedConfig) and not _is_patched(source if config is None else config, kwargs):
        try:
            return stock(with_info=with_info, **kwargs)
        except EntryIgnoredError as error:
            # What could not be told from files on this machine: a first download, or an adapter's base model.
            if error.model_class is not model_class:
                raise
    from safetensors import SafetensorError

    from hf_posenc.checkpoint.agreement import check_loaded_mark
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.checkpoint.stored_weights import check_scheme_fits, stored_position_weights
    from hf_posenc.patching.split_heads import refuse_split_heads

    built: list[_Built] = []
    stored = stored_position_weights(source, kwargs)

    def check_fits(model: Any, scheme: Any) -> None:
        # A model on the hub has been downloaded by now.
        found = stored_position_weights(source, kwargs) if stored is None else stored
        check_scheme_fits(model, scheme, found, str(source))

    proxy = patching_proxy(model_class, built, check_fits)
    try:
        model, info = original(proxy, source, *model_args, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise CheckpointError(
            f"The weights of {source} cannot be read as safetensors ({error}). A file is damaged or incomplete: "
            "download or save the checkpoint again."
        ) from error
    check_loaded_mark(model, info, str(source), built[-1].entry_format)
    _check_loaded(model, info, str(source))
    # Transformers splits a model over processes after it was built, and so after it was patched.
    refuse_split_heads(model.position_encoding, model)
    built.pop().follow(model)
    if _is_patched(str(model.config._name_or_path), kwargs):
        from hf_posenc.patching.scheme_name import unmark_names

        unmark_names(model.position_encoding)
    return (model, info) if with_info else model


def _stock_from_pretrained(
    original: Callable[..., Any], model_class: Any, source: Any, *model_args: Any, with_info: bool, **kwargs: Any
) -> Any:
    """The stock method, unless the weights it finds are those of a patched model."""
    model, info = original(model_class, source, *model_args, output_loading_info=True, **kwargs)
    if find_mark(info["unexpected_keys"]) is not None:
        from hf_posenc.checkpoint.agreement import refuse_marked_weights

        refuse_marked_weights(info, model, str(source))
    return (model, info) if with_info else model


def patching_proxy(
    model_class: Any, built: list[_Built] | None = None, check_fits: Callable[[Any, Any], None] | None = None
) -> Any:
    """A class that transformers can call like `model_class`, and that returns a patched `model_class`.

    The instance is not one of the proxy, so Python does not initialise it a second time, and nothing that
    is keyed by the class of a model can tell the difference.

    Args:
        model_class: the stock class.
        built: takes what has to follow the model when its weights are loaded.
        check_fits: is given the stock model and the scheme, and refuses one that is not to be built.
    """

    def __new__(cls: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
        import torch

        from hf_posenc.checkpoint.configuration import follow_lengths
        from hf_posenc.patching import patch_model
        from hf_posenc.patching.config_entry import detach_entry
        from hf_posenc.schemes import scheme_from_dict

        fields = read_fields(config)
        if fields is None:
            return model_class(config, *args, **kwargs)
        written, config = config, copy.deepcopy(config)
        detach_entry(config)
        model = model_class(config, *args, **kwargs)
        # Transformers builds models on the meta device and under another default dtype. Constants of a scheme
        # are computed for real and in float32; `patch_model` then moves its parameters to where the model is.
        with torch.device("cpu"), _default_dtype(torch.float32):
            scheme = scheme_from_dict(fields["scheme"])
            if check_fits is not None:
                check_fits(model, scheme)
            patch_model(model, scheme)
        follow_lengths(model, written)
        if built is not None:
            built.append(_Built(model, fields["format"]))
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
        entry_format: of the config it was built from.
    """

    def __init__(self, model: Any, entry_format: int) -> None:
        self.entry_format = entry_format
        self.generation_config = getattr(model, "generation_config", None)

    def follow(self, model: Any) -> None:
        """Applies what the patch did to the old objects to the new ones, and lets its journal undo it there."""
        from hf_posenc.patching.lengths import take_generation_length

        for change in model.position_encoding.journal.changes:
            if change.kind == "frozen":
                change.target._parameters[change.attribute].requires_grad_(False)
            elif change.target is self.generation_config:
                change.target = model.generation_config
                change.target.__dict__[change.attribute] = self.generation_config.__dict__[change.attribute]
        take_generation_length(model.position_encoding, model)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    import torch

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
    text = _read_config(source, kwargs)
    if text is None or f'"{MODEL_TYPE}"' not in text:
        return False
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return False  # the stock code reports the broken file
    return is_on_disk_form(config)


def _read_config(source: Any, kwargs: dict[str, Any]) -> str | None:
    """The text of the `config.json` on this machine; `None` without one, and for one that no model ever has."""
    path = local_config(source, kwargs)
    if path is None or path.stat().st_size > _LARGEST_CONFIG:
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def local_config(source: Any, kwargs: dict[str, Any]) -> Path | None:
    """The `config.json` that `source` names, if it is on this machine. No request is ever sent."""
    if isinstance(source, str | os.PathLike) and os.path.isfile(source):
        return Path(source) if str(source).endswith(".json") else None
    return local_file(source, "config.json", kwargs)
