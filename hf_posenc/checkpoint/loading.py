"""Reading configs, and `from_pretrained` and `_from_config` of patched models.

The scheme is applied before any weights are read. It is the one in the config, or in the argument `position_encoding`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.entry import (
    ATTRIBUTE,
    MODEL_TYPE,
    find_position_weight,
    is_entry,
    is_on_disk_form,
    is_patched,
    read_config,
    read_entry,
    read_fields,
)
from hf_posenc.errors import UnsupportedError
from hf_posenc.wrapping import Call

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_posenc.schemes.config import SchemeConfig

#: The argument `position_encoding` of a config that is read: a key of its own, because transformers would ignore
#: `position_encoding`, or assign it to the entry. A model that is built from the config gets this scheme.
_SET_ASIDE = "_requested_position_encoding"
#: Arguments of `patch_model` that may be in the same dictionary as the scheme.
_PLACES = ("part", "layers", "elsewhere", "cross_attention")


class EntryIgnoredError(UnsupportedError):
    """A model class was called with a config that has a position encoding, which it would ignore."""

    def __init__(self, model_class: type, scheme: str) -> None:
        self.model_class = model_class
        name = model_class.__name__
        super().__init__(
            f"{name}(config) builds the stock architecture, but this config carries the position encoding {scheme!r}, "
            f"which would be lost. Use {name}._from_config(config) or AutoModel*.from_config(config) to build the "
            "patched model. To build the stock model, first remove the scheme with unpatch_model(model). If a library "
            "makes this call (such as PEFT's Shadow), that feature does not work with a patched model."
        )


def get_config_dict(call: Call) -> Any:
    """Wraps `PreTrainedConfig.get_config_dict`.

    Raises:
        CheckpointError: for a file of a patched model that is damaged or from a newer version.
        UnsupportedError: if only a part of a composite model is read.
    """
    config_class, source = call["cls"], call["pretrained_model_name_or_path"]
    finish_saving_of(source, call.arguments)
    if isinstance(source, str | os.PathLike):
        path = Path(source, call.arguments.get("subfolder") or "", "config.json")
        if path.is_dir():  # A model class would otherwise use its default config.
            raise IsADirectoryError(f"{path} is a folder; expected the config file of a model. Remove or rename it.")
    try:
        config, unused = call.run()
        if not isinstance(config, dict) and MODEL_TYPE in (read_config(source, call.arguments) or ""):
            raise TypeError(f"a dictionary is expected, not a {type(config).__name__}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = read_config(source, call.arguments)
        if text is None or MODEL_TYPE not in text:
            raise
        from hf_posenc.checkpoint.configuration import damaged

        raise damaged(source, f"content that cannot be read ({type(error).__name__}: {error})") from error
    if is_on_disk_form(config):
        from hf_posenc.checkpoint.configuration import check_model_type, from_disk

        config = from_disk(config, str(source))
        check_model_type(config_class, config, str(source))
    elif isinstance(config, dict) and is_entry(config.get(ATTRIBUTE)):
        # Users may write the dictionary of a config to the file themselves, so it must be complete.
        from hf_posenc.checkpoint.configuration import check_entry, damaged

        if not isinstance(config.get("model_type"), str):
            raise damaged(source, f"model_type {config.get('model_type')!r}", "a string")
        check_entry(config, str(source))
    if ATTRIBUTE not in unused or not isinstance(config, dict) or _knows_the_argument(config_class):
        return config, unused
    if ATTRIBUTE in config and not is_entry(config[ATTRIBUTE]):
        return config, unused  # A field of another project.
    requested = unused.pop(ATTRIBUTE)
    if unused.get("return_unused_kwargs"):  # The caller passes it on.
        return config, unused | {_SET_ASIDE: requested}
    return config if requested is None else config | {_SET_ASIDE: _in_json(requested)}, unused


def config_post_init(call: Call) -> Any:
    """Gives a config that is built with an entry the class that also saves it."""
    result, config = call.run(), call["self"]
    if read_entry(config) is not None:
        from hf_posenc.patching.place.config_entry import carry_entry

        carry_entry(config)
    return result


def model_init(call: Call) -> Any:
    """Wraps `PreTrainedModel.__init__`.

    Raises:
        UnsupportedError: for a config with a scheme, which the stock class would ignore.
    """
    config, model_class = call["config"], type(call["self"])
    entry = read_entry(config)
    if entry is not None:
        raise EntryIgnoredError(model_class, entry["scheme"])
    if (requested := getattr(config, _SET_ASIDE, None)) is not None:
        raise UnsupportedError(
            f"The config of this {model_class.__name__} was read with {ATTRIBUTE}={requested!r}, which its class "
            "ignores. Use AutoModel*.from_config(config), or from_pretrained(..., config=config)."
        )
    # Classes of other projects may read a field of this name.
    wish = getattr(config, ATTRIBUTE, None)
    if wish is not None and model_class.__module__.startswith("transformers.models."):
        _refuse_wish(model_class, wish)
    return call.run()


def _refuse_wish(model_class: type, value: Any) -> None:
    """Refuses a config in which the user has set `position_encoding` to a scheme. A stock model would ignore it.

    Raises:
        UnsupportedError: if the value is a scheme. Other values may belong to another project.
    """
    from hf_posenc.schemes import list_schemes

    name = value
    while isinstance(name, dict | list):
        name = name.get("scheme") if isinstance(name, dict) else next(iter(name), None)
    if isinstance(name, str) and name in list_schemes():
        raise UnsupportedError(
            f"The config of this {model_class.__name__} has {ATTRIBUTE}={value!r}, which transformers does not read: "
            "the model would have its stock positions. Remove the field (del config.position_encoding), and pass "
            f"{ATTRIBUTE}={value!r} to from_pretrained or AutoModel*.from_config, or call patch_model on the model. "
            f"from_encoder_decoder_pretrained takes encoder_{ATTRIBUTE}= and decoder_{ATTRIBUTE}=."
        )


def from_config(call: Call) -> Any:
    """Wraps `PreTrainedModel._from_config`."""

    def build(call: Call) -> Any:
        written = call["config"]
        fields = read_fields(written)
        if fields is None:
            return call.run()
        model = call.changed(config=_without_entry(written)).run()
        _place(model, written, fields)
        return model

    return _with_requested_scheme(call, build)


def from_pretrained(call: Call) -> Any:
    """Wraps `PreTrainedModel.from_pretrained`."""
    return _with_requested_scheme(call, _from_pretrained)


def _from_pretrained(call: Call) -> Any:
    """Loads a stock or a patched model.

    Raises:
        CheckpointError: for files that are damaged or do not belong together.
        UnsupportedError: for a config without the scheme of the weights.
    """
    from transformers import PreTrainedConfig

    model_class, source, config = call["cls"], call["pretrained_model_name_or_path"], call["config"]
    finish_saving_of(source, call.arguments)
    if is_scheme_name(source):
        from hf_posenc.checkpoint.rebuilding import rebuilt

        return rebuilt(_from_pretrained, call)
    if isinstance(config, PreTrainedConfig) and read_entry(config) is None:
        if source is not None and not call.arguments.get("gguf_file") and is_patched(source, call.arguments):
            raise UnsupportedError(
                f"The model in {source} has a position encoding of hf_posenc, but the {type(config).__name__} passed "
                "as `config` does not contain it, so the weights would run with other positions than they were trained "
                "with. Pass no config, or modify the config from AutoConfig.from_pretrained. To get stock positions, "
                "load the model without `config` and call unpatch_model. (A text-only class cannot read a part of a "
                "composite checkpoint: load the whole model.)"
            )
        return _stock_from_pretrained(call)
    described = source if config is None else config
    if not isinstance(config, PreTrainedConfig) and not is_patched(described, call.arguments):
        try:
            return _stock_from_pretrained(call)
        except EntryIgnoredError as error:
            # Cases that cannot be detected from local files: a first download, or the base model of an adapter.
            if error.model_class is not model_class:
                raise
    import torch
    from safetensors import SafetensorError

    from hf_posenc.checkpoint.agreement import check_loaded, check_scheme_fits, files_read, stored_position_weights
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.checkpoint.stored_schemes import schemes_of_source
    from hf_posenc.patching.anatomy.weights import has_partitioned
    from hf_posenc.patching.place.install import split_heads

    built: list[_Built] = []
    subfolder = call.arguments.get("subfolder") or ""
    read = files_read(source, subfolder)
    stored = stored_position_weights(source, call.arguments)

    def check_fits(anatomy: Any, scheme: Any) -> None:
        # At this point a model on the hub has been downloaded.
        weights = stored_position_weights(source, call.arguments) if stored is None else stored
        check_scheme_fits(anatomy, scheme, weights, _named(source))

    proxy = patching_proxy(model_class, built, check_fits)
    try:
        model, info = call.run(cls=proxy, output_loading_info=True)
    except SafetensorError as error:
        raise CheckpointError(
            f"The weights of {_named(source)} cannot be read as safetensors ({error}). A file is damaged or "
            "incomplete: download or save the checkpoint again."
        ) from error
    if files_read(source, subfolder) != read:
        raise CheckpointError(
            f"Files in {source} were replaced while the model was read: another process has saved a model there. Load "
            "it again."
        )
    named = None
    if has_partitioned(model):
        # Transformers loads no mark, and other weights in the first process only.
        named = schemes_of_source(source, call.arguments)
        for parameter in model.position_encoding.parameters():
            torch.distributed.broadcast(parameter.data, src=0)
    check_loaded(model, info, _named(source), built[-1].entry_format, named)
    # Transformers shards a model over processes after building it, and so after it was patched.
    split_heads(model.position_encoding, model)
    built.pop().follow(model)
    if is_patched(str(model.config._name_or_path), call.arguments):
        from hf_posenc.patching.place.config_entry import unmark_names

        unmark_names(model.position_encoding)
    return (model, info) if call.arguments.get("output_loading_info") else model


def finish_saving_of(source: Any, kwargs: dict[str, Any]) -> None:
    """Completes an interrupted save before anything is read."""
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        finish_saving(os.path.join(source, kwargs.get("subfolder") or ""))


def is_scheme_name(source: Any) -> bool:
    """Whether `source` is the name of a model that was patched in memory. Plain strings need no import for this."""
    if type(source) is str or "hf_posenc.patching.place.config_entry" not in sys.modules:
        return False
    from hf_posenc.patching.place.config_entry import SchemeName

    return isinstance(source, SchemeName)


def _stock_from_pretrained(call: Call) -> Any:
    """Calls the stock method, and raises if it loads the weights of a patched model."""
    model, info = call.run(output_loading_info=True)
    weight, source = find_position_weight(info["unexpected_keys"]), _named(call["pretrained_model_name_or_path"])
    if weight is None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        # With ZeRO-3, transformers does not report unexpected keys.
        from hf_posenc.checkpoint.stored_schemes import schemes_of_source

        named = schemes_of_source(call["pretrained_model_name_or_path"], call.arguments)
        weight = None if named is None else next(iter(named.schemes), None)
    if weight is not None:
        from hf_posenc.checkpoint.agreement import SchemeMismatchError

        raise SchemeMismatchError(
            f"The weights in {source} do not belong to this {type(model).__name__}: they were trained with a position "
            f"encoding of hf_posenc (they include {weight}), but the config they were loaded with has none, so they "
            "would run with stock positions. Restore the config.json that was saved with them, or pass no `config`. "
            "To give up the scheme, load the model as it was saved and call unpatch_model."
        )
    return (model, info) if call.arguments.get("output_loading_info") else model


def patching_proxy(
    model_class: Any, built: list[_Built] | None = None, check_fits: Callable[[Any, Any], None] | None = None
) -> Any:
    """Returns a class that transformers can call like `model_class`, and that creates a patched `model_class`.

    The result is not an instance of the proxy. So Python does not initialise it a second time, and lookups by the class
    of the model work.

    Args:
        model_class: the stock class.
        built: receives the objects that must be updated when the weights are loaded.
        check_fits: receives the anatomy of the stock model and the scheme, and raises if the scheme must not be built.
    """

    def __new__(cls: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
        fields = read_fields(config)
        if fields is None:
            return model_class(config, *args, **kwargs)
        model = model_class(_without_entry(config), *args, **kwargs)
        _place(model, config, fields, check_fits)
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


def _without_entry(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config of a patched model, for the stock class."""
    from hf_posenc.patching.place.config_entry import detach_entry

    config = copy.deepcopy(config)
    detach_entry(config)
    return config


def _place(
    model: Any,
    config: PreTrainedConfig,
    fields: dict[str, Any],
    check_fits: Callable[[Any, Any], None] | None = None,
) -> None:
    """Patches a stock model that was built from `_without_entry(config)` with the scheme in the fields of the entry."""
    import torch
    from transformers.modeling_utils import local_torch_dtype

    from hf_posenc.checkpoint.configuration import check_native_fields, follow_lengths
    from hf_posenc.patching.patch import place_scheme
    from hf_posenc.patching.place.transaction import Transaction
    from hf_posenc.preserve import ordinary_context
    from hf_posenc.schemes import scheme_from_dict

    # Transformers builds models on the meta device and with another default dtype. Constants of a scheme are computed
    # on a real device in float32; `patch_model` then moves the parameters to the model's device.
    with ordinary_context(), torch.device("cpu"), local_torch_dtype(torch.float32):
        scheme = scheme_from_dict(fields["scheme"])
        transaction = Transaction(model)
        if check_fits is not None:
            transaction.anatomy.is_runnable = False  # Its weights are not loaded yet.
            check_fits(transaction.anatomy, scheme)
        place_scheme(transaction, scheme, chosen=False)
    check_native_fields(model, config)
    follow_lengths(model, config)


class _Built:
    """Objects that a patch refers to and that transformers replaces while it loads the weights.

    Until then, the config has its native lengths: transformers fills buffers that were built for them.
    """

    def __init__(self, model: Any, entry_format: int) -> None:
        from hf_posenc.patching.anatomy.weights import computed_buffers
        from hf_posenc.patching.place.config_entry import native_lengths, stated_lengths, write_lengths

        self.entry_format = entry_format
        self.buffers = computed_buffers(model.position_encoding)
        self.generation_config = getattr(model, "generation_config", None)
        self.lengths = stated_lengths(model.config)
        write_lengths(model.config, native_lengths(model.config))

    def follow(self, model: Any) -> None:
        """Applies the patch to the new objects, and updates its journal so that it is undone there."""
        from hf_posenc.patching.anatomy.weights import samples
        from hf_posenc.patching.place.config_entry import write_lengths
        from hf_posenc.patching.place.lengths import record_generation_length

        for module, name, buffer in self.buffers:
            loaded = module._buffers[name]
            module._buffers[name] = buffer if loaded is None else buffer.to(loaded.device)
        # The weights did not exist when the model was patched.
        model.position_encoding.record.base_weights = samples(model, read_offloaded=False)
        for change in model.position_encoding.record.journal.changes:
            if change.kind == "frozen":
                change.target._parameters[change.attribute].requires_grad_(False)
            elif change.target is self.generation_config:
                change.target = model.generation_config
                change.target.__dict__[change.attribute] = self.generation_config.__dict__[change.attribute]
        write_lengths(model.config, self.lengths)
        record_generation_length(model.position_encoding, model)


def _named(source: Any) -> str:
    """The name of a source, for a message."""
    return "the given state dict" if source is None else str(source)


def _with_requested_scheme(call: Call, build: Callable[[Call], Any]) -> Any:
    """Builds a model, and patches it with the scheme that the call asks for.

    Args:
        call: of `from_pretrained` or `_from_config`.
        build: returns the model, or a tuple that begins with it, for the call without this argument.

    Raises:
        UnknownNameError, ValueError, TypeError, UsageError: if the value is not a scheme, before anything is loaded.
        UnsupportedError: as `patch_model`, and if the folder is an adapter that was trained with another scheme.
    """
    config, names = call["config"], [name for name in (ATTRIBUTE, _SET_ASIDE) if name in call.kwargs]
    of_config = getattr(config, _SET_ASIDE, None)
    if (not names and of_config is None) or _knows_the_argument(call["cls"], call["cls"].config_class):
        return build(call)
    requested = next((call.kwargs[name] for name in names if call.kwargs[name] is not None), of_config)
    plain = call.without(*names)
    if of_config is not None:
        config = copy.deepcopy(config)
        delattr(config, _SET_ASIDE)
        plain = plain.changed(config=config)
    if requested is None:
        return build(plain)
    from hf_posenc.patching.patch import patch_model
    from hf_posenc.patching.place.encoding import current_encoding

    config, places = read_request(requested)
    built = build(plain)
    model = built[0] if isinstance(built, tuple) else built
    before = current_encoding(model)
    patch_model(model, config, **places)
    if getattr(model, "_hf_peft_config_loaded", False):
        # An Auto class passes on the base model, and the folder of the adapter in another argument.
        beside = (call.arguments.get("adapter_kwargs") or {}).get("_adapter_model_path")
        _check_adapter(model, before, beside or call.arguments.get("pretrained_model_name_or_path"))
    return built


def read_request(requested: Any) -> tuple[SchemeConfig, dict[str, Any]]:
    """The scheme that a value of the argument asks for, and the other arguments of `patch_model` in it.

    Raises:
        UnknownNameError, ValueError, TypeError, UsageError: for a value that is not a scheme.
    """
    from hf_posenc.schemes import as_scheme, get_scheme

    if "scheme" not in (requested if isinstance(requested, Mapping) else ()):
        return as_scheme(requested), {}
    scheme = requested["scheme"]
    with_options = not isinstance(scheme, str) or ":" in scheme
    if with_options and requested.keys() <= {"scheme", *_PLACES}:
        return as_scheme(scheme), {name: value for name, value in requested.items() if name != "scheme"}
    options = {field.name for field in dataclasses.fields(get_scheme(scheme))} if isinstance(scheme, str) else set()
    places = {name: requested[name] for name in _PLACES if name in requested and name not in options}
    return as_scheme({name: value for name, value in requested.items() if name not in places}), places


def _in_json(requested: Any) -> Any:
    """A value of the argument as a config can hold it. Raises as `read_request`."""
    from hf_posenc.schemes import SchemeConfig, as_scheme

    def plain(value: Any) -> Any:
        return as_scheme(value).to_dict() if isinstance(value, SchemeConfig | type) else list(value)

    read_request(requested)
    return json.loads(json.dumps(requested, default=plain))


def _knows_the_argument(*owners: Any) -> bool:
    """Whether a class of another project has an argument of this name."""
    return any(owner is not None and ATTRIBUTE in inspect.signature(owner).parameters for owner in owners)


def _check_adapter(model: Any, before: Any, source: Any) -> None:
    """Refuses a scheme with which the adapter that transformers has loaded was not trained.

    Warns if the adapter names no scheme, as `PeftModel.from_pretrained` does for a patched model.
    """
    from hf_posenc.checkpoint.peft_hooks import warn_about_no_scheme

    if before is None:
        warn_about_no_scheme(model, source)
    elif before.config != model.position_encoding.config:
        raise UnsupportedError(
            f"The adapter in {source} was trained with the scheme {before.config.name!r}, so it cannot be used with "
            f"{ATTRIBUTE}={model.position_encoding.config.name!r}. Leave out {ATTRIBUTE}, or load the base model of "
            "the adapter with it and train a new adapter."
        )
