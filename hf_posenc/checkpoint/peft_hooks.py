"""PEFT adapters of patched models: the scheme is saved with the adapter and applied before the adapter is loaded.

If neither the model nor the adapter has a scheme, each wrapper calls the stock method.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.atomic_folder import is_place_for_folder
from hf_posenc.entry import ADAPTER_CONFIG, ADAPTER_SCHEME, ATTRIBUTE
from hf_posenc.errors import warn_user
from hf_posenc.wrapping import Call, setting, wrap

#: The scheme to mark adapter configs with while they are saved.
_MARKS: ContextVar[dict[str, Any] | None] = ContextVar("hf_posenc_marks_adapter_configs", default=None)
#: The scheme found in the adapter config that is being read.
_FOUND: ContextVar[dict[str, Any] | None] = ContextVar("hf_posenc_found_scheme", default=None)
#: Whether the scheme of the swapped-in adapter was compared with the model's scheme.
_COMPARED: ContextVar[bool] = ContextVar("hf_posenc_compared_schemes", default=False)
_NO_SCHEME: ContextVar[bool] = ContextVar("hf_posenc_found_no_scheme", default=False)


def install() -> None:
    """Wraps the methods. Calling it again changes nothing."""
    wrap("transformers.integrations.peft", {"PeftAdapterMixin.load_adapter": _load_into_transformers})
    wrap(
        "peft.config",
        {
            "PeftConfigMixin.save_pretrained": _save_config,
            "PeftConfigMixin.from_json_file": _read_config,
            "PeftConfigMixin.from_pretrained": _load_config,
        },
    )
    wrap("peft.tuners.tuners_utils", {"BaseTuner.inject_adapter": _inject_adapter})
    wrap("peft.tuners.adaption_prompt.model", {"AdaptionPromptModel.__init__": _make_adaption_prompts})
    wrap(
        "peft.peft_model",
        {
            "PeftModel.add_adapter": _add_adapter,
            "PeftModel.get_prompt": _get_prompt,
            "PeftModel.save_pretrained": _save_model,
            "PeftModel.from_pretrained": _load_adapter,
            "PeftModel.load_adapter": _load_adapter,
        },
    )
    wrap(
        "peft.mixed_model",
        {"PeftMixedModel.from_pretrained": _load_adapter, "PeftMixedModel.load_adapter": _load_adapter},
    )
    # The second is looked up at each call, so it also affects a hotswap_adapter that was imported by name before.
    wrap(
        "peft.utils.hotswap",
        {"hotswap_adapter": _hotswap, "hotswap_adapter_from_state_dict": _hotswap_weights},
    )


def _make_adaption_prompts(call: Call) -> Any:
    target = _transformers_model(call["model"])
    encoding = None if target is None else _encoding(target)
    if encoding is not None:
        from hf_posenc.patching.inspection import native_scheme
        from hf_posenc.patching.place.install import follow_in_prompts

        for config in call["configs"].values():
            _prepare(target, config)
        follow_in_prompts(target, encoding, native_scheme(target) == encoding.config)
    return call.run()


def _get_prompt(call: Call) -> Any:
    # This runs in forward passes. torch.compile cannot trace the binding of arguments, so none are read by name.
    prompt = call.run()
    if not hasattr(prompt, "get_seq_length"):
        return prompt
    target = _transformers_model(call.args[0] if call.args else call["self"])
    if target is not None and _encoding(target) is not None:
        from hf_posenc.patching.call.cache_checks import accept_cache

        # Learned keys suit the scheme that they are trained with.
        accept_cache(prompt)
    return prompt


# Saving


def _save_config(call: Call) -> Any:
    scheme, folder = _MARKS.get(), call["save_directory"]
    if scheme is None:
        return call.run()
    from hf_posenc.checkpoint.adapter_config import write_marked

    # The stock form must never be readable in the folder, not even for a moment.
    with tempfile.TemporaryDirectory() as draft:
        result = call.run(save_directory=draft)
        write_marked(Path(draft), Path(folder), scheme)
    return result


def _save_model(call: Call) -> Any:
    model = call["self"]
    names = list(model.peft_config) if call["selected_adapters"] is None else call["selected_adapters"]
    if not is_place_for_folder(call["save_directory"]):
        return call.run()  # PEFT says what is wrong with it.
    folder = Path(call["save_directory"])
    folders = [folder if name == "default" else folder / name for name in names]
    with scheme_saved_with_adapters(model, folders, call["is_main_process"], call.arguments.get("state_dict")):
        return call.run()


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
    from hf_posenc.checkpoint.position_adapters import collect
    from hf_posenc.checkpoint.position_files import JSON_FILE

    files = None
    if is_main_process:
        prefix = next((f"{name}." for name, module in model.named_modules() if module is target and name), "")
        inner = None if state is None else {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        files = collect(target, encoding, inner)
        for folder in folders:
            # Until both are written again, nothing in the folder can be loaded.
            for name in (ADAPTER_CONFIG, JSON_FILE):
                Path(folder, name).unlink(missing_ok=True)
    with setting(_MARKS, encoding.config.to_dict()):
        yield
    if files is not None:
        for folder in folders:
            files.write(folder, beside_adapter=True)


def _remove_scheme(folders: list[Path]) -> None:
    from hf_posenc.checkpoint.adapter_config import holds_adapter
    from hf_posenc.checkpoint.position_files import JSON_FILE, TENSORS_FILE

    for folder in folders:
        # Files without an adapter come from save_position_adapter and must not be removed here.
        if Path(folder, JSON_FILE).is_file() and holds_adapter(folder):
            # The marked config is removed last: as long as it exists, the adapter cannot be loaded without its scheme.
            for name in (JSON_FILE, TENSORS_FILE, ADAPTER_CONFIG):
                Path(folder, name).unlink(missing_ok=True)


# Loading


def _load_config(call: Call) -> Any:
    with setting(_FOUND, None):
        config = call.run()
        scheme = _FOUND.get()
    if scheme is not None:
        setattr(config, ADAPTER_SCHEME, scheme)
    return config


def _read_config(call: Call) -> Any:
    from hf_posenc.checkpoint.adapter_config import is_marked, scheme_of, unmarked
    from hf_posenc.checkpoint.configuration import CheckpointError, damaged

    path = Path(call["path_json_file"])
    try:
        config = call.run()
        if not isinstance(config, dict):
            raise TypeError(f"a dictionary is expected, not a {type(config).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        if ATTRIBUTE not in path.read_text(encoding="utf-8", errors="replace"):
            raise
        problem = f"content that cannot be read ({type(error).__name__}: {error})"
        raise damaged(path.parent, problem, file=ADAPTER_CONFIG) from error
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


def _add_adapter(call: Call) -> Any:
    if not _may_have_scheme(call["peft_config"]):
        return call.run()
    from hf_posenc.checkpoint.adapter_config import check_scheme, check_second

    # The layers of other adapters are checked where they are injected.
    check = _prepare if call["peft_config"].is_prompt_learning else check_scheme
    check(call["self"], call["peft_config"])
    check_second(call["self"], call["adapter_name"])
    with _noting_frozen(call["self"]):
        return call.run()


def _inject_adapter(call: Call) -> Any:
    _prepare(call["model"], call["self"].peft_config[call["adapter_name"]])
    with _noting_frozen(call["model"]):
        return call.run()


@contextmanager
def _noting_frozen(model: Any) -> Iterator[None]:
    """Notes which new parameters of a scheme PEFT freezes, for a warning in the first training call."""
    if "hf_posenc.patching" not in sys.modules:
        yield
        return
    from hf_posenc.patching.place.encoding import encodings

    records = [record for encoding in encodings(model) for record in encoding.record.stacks.values()]
    trained = [record.new_and_trained() for record in records]
    yield
    for record, parameters in zip(records, trained, strict=True):
        record.frozen += [parameter for parameter in parameters if not parameter.requires_grad]


def _prepare(model: Any, config: Any) -> None:
    """Checks the config of a new adapter, and records the weights on which the first one is placed.

    PEFT may move or change these weights from then on.
    """
    if not _may_have_scheme(config):
        return
    from hf_posenc.checkpoint.adapter_config import check_scheme, check_targets
    from hf_posenc.patching.anatomy.weights import samples, touched_by_peft
    from hf_posenc.patching.place.encoding import encodings

    check_scheme(model, config)
    check_targets(model, config)
    for encoding in encodings(model):
        holder = encoding.__dict__.get("holder")
        if holder is not None and not touched_by_peft(holder):
            encoding.record.base_weights = samples(holder)


def _load_adapter(call: Call) -> Any:
    """Wraps `from_pretrained` of PEFT's models, which makes a model, and `load_adapter`, which extends one."""
    loads_first = "cls" in call.arguments
    model, name = (call["model"], None) if loads_first else (call["self"], call["adapter_name"])
    with _placed(model, call["model_id"], call.arguments, name):
        return call.run()


def _hotswap(call: Call) -> Any:
    source = call["model_name_or_path"]
    with setting(_COMPARED, True), _placed(call["model"], source, call.arguments, call["adapter_name"]):
        return call.run()


def _hotswap_weights(call: Call) -> Any:
    if not _COMPARED.get() and _may_have_scheme(call["config"]):
        from hf_posenc.checkpoint.adapter_config import check_swap

        check_swap(call["model"], call["config"])
    return call.run()


def _load_into_transformers(call: Call) -> Any:
    model, loading = call["self"], call["load_config"]
    source = call["peft_model_id"] or getattr(loading, "pretrained_model_name_or_path", None)
    hub = {**(getattr(loading, "download_kwargs", None) or {}), **(call["adapter_kwargs"] or {})}
    hub |= {name: call.kwargs[name] for name in ("revision", "subfolder", "token", "cache_dir") if name in call.kwargs}
    if source is None and _may_have_scheme(call["peft_config"]):
        from hf_posenc.checkpoint.adapter_config import check_scheme

        check_scheme(model, call["peft_config"])
    with _placed(model, source, hub, call["adapter_name"] or "default"):
        return call.run()


@contextmanager
def _placed(model: Any, source: Any, hub: Mapping[str, Any], adapter_name: str | None = None) -> Iterator[None]:
    """Applies the scheme of an adapter to `model` before the adapter is loaded; removes it again if loading fails."""
    from hf_posenc.checkpoint.adapter_config import names_a_scheme

    target = _transformers_model(model)
    if target is None or source is None:
        yield
        return
    if not names_a_scheme(source, hub):
        if adapter_name is not None and _encoding(target) is not None:
            warn_about_no_scheme(target, source)
        with setting(_NO_SCHEME, True):
            yield
        return
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.checkpoint.position_adapters import adapters_of, placed
    from hf_posenc.checkpoint.position_files import JSON_FILE, read_position_files

    files = read_position_files(source, hub)
    if files is None:
        raise CheckpointError(
            f"The adapter in {source} was trained on a patched model, but {JSON_FILE}, which contains the scheme, is "
            "missing. Copy the whole folder."
        )
    with placed(target, files, str(source), shared=bool(set(adapters_of(model)) - {adapter_name})):
        yield


def warn_about_no_scheme(target: Any, source: Any) -> None:
    """Warns about an adapter that names no scheme, in a patched model."""
    warn_user(
        f"The adapter in {source} names no position encoding: it was trained on a stock model, or saved by an older "
        f"hf_posenc, which did not store the scheme with adapters. This {type(target).__name__} has the scheme "
        f"{target.position_encoding.config.name!r}. If the adapter was trained with this scheme, save it again. "
        "Otherwise load it on the stock model."
    )


def _transformers_model(model: Any) -> Any:
    """Returns the transformers model inside a PEFT model, or the model itself; `None` for anything else."""
    from transformers import PreTrainedModel

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner if isinstance(inner, PreTrainedModel) else None


def _may_have_scheme(config: Any) -> bool:
    """Whether the config of an adapter, or a model of this process, may have a scheme."""
    return "hf_posenc.patching" in sys.modules or hasattr(config, ADAPTER_SCHEME)


def _encoding(target: Any) -> Any:
    if "hf_posenc.patching" not in sys.modules:
        return None
    from hf_posenc.patching.place.encoding import current_encoding

    return current_encoding(target)
