"""`from_pretrained` and `_from_config` of patched models. The scheme is applied before any weights are read."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.atomic_folder import finish_saving
from hf_posenc.checkpoint.requested import with_requested_scheme
from hf_posenc.entry import ATTRIBUTE, find_position_weight, is_patched, read_entry, read_fields
from hf_posenc.errors import UnsupportedError
from hf_posenc.wrapping import Call

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class EntryIgnoredError(UnsupportedError):
    """A model class was called with a config that has a position encoding, which it would ignore."""

    def __init__(self, model_class: type, scheme: str) -> None:
        self.model_class = model_class
        name = model_class.__name__
        super().__init__(
            f"{name}(config) builds the stock architecture, but this config carries the position encoding {scheme!r}, "
            f"which would be lost. Use {name}._from_config(config) or AutoModel*.from_config(config) to build the "
            "patched model. To build the stock model, first remove the scheme with unpatch_model(model). If a library "
            "makes the call (PEFT's Shadow), that part of it does not work with a patched model."
        )


def refuse_wish(model_class: type, value: Any) -> None:
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
            f"{ATTRIBUTE}={value!r} to from_pretrained or AutoModel*.from_config, or call patch_model on the model."
        )


def from_config(call: Call) -> Any:
    """Wraps `PreTrainedModel._from_config`."""

    def build(call: Call) -> Any:
        return call.run() if read_entry(call["config"]) is None else call.run(cls=patching_proxy(call["cls"]))

    return with_requested_scheme(call, build)


def from_pretrained(call: Call) -> Any:
    """Wraps `PreTrainedModel.from_pretrained`."""
    return with_requested_scheme(call, _from_pretrained)


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
        refuse_stock_config(source, config, call.arguments)
        return _stock_from_pretrained(call)
    if not isinstance(config, PreTrainedConfig) and not is_patched(
        source if config is None else config, call.arguments
    ):
        try:
            return _stock_from_pretrained(call)
        except EntryIgnoredError as error:
            # Cases that cannot be detected from local files: a first download, or the base model of an adapter.
            if error.model_class is not model_class:
                raise
    from safetensors import SafetensorError

    from hf_posenc.checkpoint.agreement import check_loaded, check_scheme_fits, files_read, stored_position_weights
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.patching.place.install import split_heads

    built: list[_Built] = []
    subfolder = call.arguments.get("subfolder") or ""
    read = files_read(source, subfolder)
    stored = stored_position_weights(source, call.arguments)

    def check_fits(anatomy: Any, scheme: Any) -> None:
        # At this point a model on the hub has been downloaded.
        found = stored_position_weights(source, call.arguments) if stored is None else stored
        check_scheme_fits(anatomy, scheme, found, _named(source))

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
    check_loaded(model, info, _named(source), built[-1].entry_format)
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


def refuse_stock_config(source: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Raises if a stock config is passed for the files of a patched model.

    Raises:
        UnsupportedError: with the reason.
    """
    if source is not None and not kwargs.get("gguf_file") and is_patched(source, kwargs):
        raise UnsupportedError(
            f"The model in {source} has a position encoding of hf_posenc, but the {type(config).__name__} passed as "
            "`config` does not contain it, so the weights would run with other positions than they were trained with. "
            "Pass no config, or modify the config from AutoConfig.from_pretrained. To get stock positions, load the "
            "model without `config` and call unpatch_model. (A text-only class cannot read a part of a composite "
            "checkpoint: load the whole model.)"
        )


def is_scheme_name(source: Any) -> bool:
    """Whether `source` is the name of a model that was patched in memory. Plain strings need no import for this."""
    if type(source) is str or "hf_posenc.patching.place.config_entry" not in sys.modules:
        return False
    from hf_posenc.patching.place.config_entry import SchemeName

    return isinstance(source, SchemeName)


def _stock_from_pretrained(call: Call) -> Any:
    """Calls the stock method, and raises if it loads the weights of a patched model."""
    model, info = call.run(output_loading_info=True)
    found, source = find_position_weight(info["unexpected_keys"]), _named(call["pretrained_model_name_or_path"])
    if found is not None:
        from hf_posenc.checkpoint.agreement import SchemeMismatchError

        raise SchemeMismatchError(
            f"The weights in {source} do not belong to this {type(model).__name__}: they were trained with a position "
            f"encoding of hf_posenc (they include {found}), but the config they were loaded with has none, so they "
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
        import torch
        from transformers.modeling_utils import local_torch_dtype

        from hf_posenc.checkpoint.configuration import check_native_fields, follow_lengths
        from hf_posenc.patching.patch import place_scheme
        from hf_posenc.patching.place.config_entry import detach_entry
        from hf_posenc.patching.place.transaction import Transaction
        from hf_posenc.schemes import scheme_from_dict

        fields = read_fields(config)
        if fields is None:
            return model_class(config, *args, **kwargs)
        written, config = config, copy.deepcopy(config)
        detach_entry(config)
        model = model_class(config, *args, **kwargs)
        # Transformers builds models on the meta device and with another default dtype. Constants of a scheme are
        # computed on a real device in float32; `patch_model` then moves the parameters to the model's device.
        with torch.device("cpu"), local_torch_dtype(torch.float32):
            scheme = scheme_from_dict(fields["scheme"])
            transaction = Transaction(model)
            if check_fits is not None:
                check_fits(transaction.anatomy, scheme)
            place_scheme(transaction, scheme)
        check_native_fields(model, written)
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
    """Objects that a patch refers to and that transformers replaces while it loads the weights.

    Until then, the config has its native lengths: transformers fills buffers that were built for them.
    """

    def __init__(self, model: Any, entry_format: int) -> None:
        from hf_posenc.patching.place.config_entry import native_lengths, stated_lengths, write_lengths

        self.entry_format = entry_format
        self.generation_config = getattr(model, "generation_config", None)
        self.lengths = stated_lengths(model.config)
        write_lengths(model.config, native_lengths(model.config))

    def follow(self, model: Any) -> None:
        """Applies the patch to the new objects, and updates its journal so that it is undone there."""
        from hf_posenc.patching.anatomy.weights import samples
        from hf_posenc.patching.place.config_entry import write_lengths
        from hf_posenc.patching.place.lengths import record_generation_length

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
    """What was read, for a message."""
    return "the given state dict" if source is None else str(source)
