"""Wrappers of transformers methods that load and save models.

Each wrapper checks for an entry, and calls the stock method if there is none. `docs/explanation/wrapped_functions.md`
says of every function why it is wrapped. Imports that only patched models need are inside functions, so `import
hf_posenc` loads neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint import other_loaders, peft_hooks
from hf_posenc.checkpoint.loading import (
    EntryIgnoredError,
    finish_saving_of,
    from_config,
    from_pretrained,
    refuse_wish,
)
from hf_posenc.checkpoint.requested import SET_ASIDE
from hf_posenc.entry import ATTRIBUTE, MODEL_TYPE, find_mark, is_entry, is_on_disk_form, read_config, read_entry
from hf_posenc.wrapping import Call, wrap

#: The architecture of patched models that generate text, which the plug-ins add to the registries of the engines.
ENGINE_ARCHITECTURE = "HfPosencForCausalLM"


def install() -> None:
    """Wraps the loading methods of transformers, PEFT and others. Calling it again changes nothing."""
    wrap(
        "transformers.configuration_utils",
        {
            "PreTrainedConfig.get_config_dict": _get_config_dict,
            "PreTrainedConfig.__post_init__": _config_post_init,
        },
    )
    wrap(
        "transformers.modeling_utils",
        {
            "PreTrainedModel.from_pretrained": from_pretrained,
            "PreTrainedModel._from_config": from_config,
            "PreTrainedModel.__init__": _model_init,
            "PreTrainedModel.load_state_dict": _load_state_dict,
            "PreTrainedModel.save_pretrained": _save_pretrained,
        },
    )
    wrap("transformers.utils.hub", {"PushToHubMixin._upload_modified_files": _upload_modified_files})
    wrap("transformers.trainer", {"Trainer.create_model_card": _create_trainer_card})
    wrap("trl.trainer.base_trainer", {"_BaseTrainer.create_model_card": _create_trainer_card})
    wrap("sentence_transformers.base.model", {"BaseModel._create_model_card": _create_card})
    for module in ("vllm.transformers_utils.config", "sglang.srt.utils.hf_transformers.config"):
        wrap(module, {"get_config": _get_engine_config})
    other_loaders.install()
    peft_hooks.install()


def _get_config_dict(call: Call) -> Any:
    config_class, source = call["cls"], call["pretrained_model_name_or_path"]
    finish_saving_of(source, call.arguments)
    if isinstance(source, str | os.PathLike):
        path = Path(source, call.arguments.get("subfolder") or "", "config.json")
        if path.is_dir():  # A model class would otherwise use its default config.
            raise IsADirectoryError(f"{path} is a folder, where the config of a model is expected.")
    try:
        config, unused = call.run()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = read_config(source, call.arguments)
        if text is None or MODEL_TYPE not in text:
            raise
        from hf_posenc.checkpoint.configuration import damaged

        raise damaged(source, f"content that cannot be read ({type(error).__name__}: {error})") from error
    if is_on_disk_form(config):
        from hf_posenc.checkpoint.configuration import check_model_type, check_not_sliced, from_disk

        config = from_disk(config, str(source))
        check_not_sliced(config_class, config, str(source))
        check_model_type(config_class, config, str(source))
    elif isinstance(config, dict) and is_entry(config.get(ATTRIBUTE)):
        # Users may write the dictionary of a config to the file themselves, so it must be complete.
        from hf_posenc.checkpoint.configuration import check_entry, damaged

        if not isinstance(config.get("model_type"), str):
            raise damaged(source, "a model_type that is not a string")
        check_entry(config[ATTRIBUTE], str(source))
    if isinstance(config, dict) and is_entry(config.get(ATTRIBUTE)) and ATTRIBUTE in unused:
        # The reader of the config would write it over the entry.
        unused = {name: value for name, value in unused.items() if name != ATTRIBUTE} | {SET_ASIDE: unused[ATTRIBUTE]}
    return config, unused


def _config_post_init(call: Call) -> Any:
    result, config = call.run(), call["self"]
    if read_entry(config) is not None:
        from hf_posenc.patching.place.config_entry import carry_entry

        carry_entry(config)
    return result


def _model_init(call: Call) -> Any:
    entry = read_entry(call["config"])
    if entry is not None:
        raise EntryIgnoredError(type(call["self"]), entry["scheme"])
    # Classes of other projects may read a field of this name.
    wish, model_class = getattr(call["config"], ATTRIBUTE, None), type(call["self"])
    if wish is not None and model_class.__module__.startswith("transformers.models."):
        refuse_wish(model_class, wish)
    return call.run()


def _load_state_dict(call: Call) -> Any:
    state_dict, patching = call["state_dict"], "hf_posenc.patching" in sys.modules
    if call["strict"] and isinstance(state_dict, Mapping) and (patching or find_mark(state_dict) is not None):
        from hf_posenc.checkpoint.agreement import NamedSchemes
        from hf_posenc.patching.place.record import NOT_STRICT

        NamedSchemes.of(state_dict).check(call["self"], f" {NOT_STRICT}.")
    return call.run()


def _save_pretrained(call: Call) -> Any:
    if "hf_posenc.patching" not in sys.modules:
        return call.run()
    from hf_posenc.checkpoint.saving import save_pretrained

    return save_pretrained(call)


def _upload_modified_files(call: Call) -> Any:
    # Tokenizers and configs are uploaded in the same way.
    if hasattr(call["self"], "modules"):
        _describe(call["self"], call["working_dir"], call["repo_id"])
    return call.run()


def _create_trainer_card(call: Call) -> Any:
    result, trainer = call.run(), call["self"]
    if trainer.is_world_process_zero():
        _describe(trainer.accelerator.unwrap_model(trainer.model), trainer.args.output_dir, trainer.hub_model_id)
    return result


def _create_card(call: Call) -> Any:
    result = call.run()
    _describe(call["self"], call["path"])
    return result


def _describe(model: Any, folder: Any, name: str | None = None) -> None:
    """Adds the section about the scheme to a card that other code has written."""
    if "hf_posenc.patching" in sys.modules:
        from hf_posenc.checkpoint.folder_card import write_card

        write_card(model, Path(folder), name=name)


def _get_engine_config(call: Call) -> Any:
    """Gives patched configs that an inference engine reads the architecture of its plug-in.

    vLLM and SGLang choose the class of a model by `architectures`. For the name of a stock class they have an
    implementation of their own, which would run the model with its native positions, and SGLang's would ignore the
    entry in the weights that names the scheme. Without the plug-in, an engine refuses the model, whose name it does
    not know.
    """
    config = call.run()
    if read_entry(config) is not None:
        config.architectures = _engine_architectures(config)
    return config


def _engine_architectures(config: Any) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from hf_posenc.patching.place.config_entry import ARCHITECTURE_PREFIX

    names = [name.removeprefix(ARCHITECTURE_PREFIX) for name in config.architectures or []]
    if ENGINE_ARCHITECTURE in names or set(names) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return [ENGINE_ARCHITECTURE]
    # The plug-ins have no implementation of other tasks. This is the name in `config.json`.
    return [ARCHITECTURE_PREFIX + name for name in names]
