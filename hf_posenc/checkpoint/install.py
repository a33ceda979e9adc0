"""Wrappers of functions of transformers and other packages that load and save models.

Each wrapper checks for an entry, and calls the stock method if there is none. `docs/explanation/wrapped_functions.md`
states for every function why it is wrapped. Imports that only patched models need are inside functions, so `import
hf_posenc` loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from hf_posenc.checkpoint import other_loaders, peft_hooks
from hf_posenc.checkpoint.loading import config_post_init, from_config, from_pretrained, get_config_dict, model_init
from hf_posenc.checkpoint.saving import (
    create_card,
    create_trainer_card,
    save_pretrained,
    upload_modified_files,
)
from hf_posenc.entry import ATTRIBUTE, CLASS_PREFIX, read_entry
from hf_posenc.wrapping import Call, wrap

#: The architecture of patched models that generate text, which the plug-ins add to the registries of the engines.
ENGINE_ARCHITECTURE = "HfPosencForCausalLM"


def install() -> None:
    """Wraps the functions. Calling it again changes nothing."""
    wrap(
        "transformers.configuration_utils",
        {
            "PreTrainedConfig.get_config_dict": get_config_dict,
            "PreTrainedConfig.__post_init__": config_post_init,
        },
    )
    wrap(
        "transformers.modeling_utils",
        {
            "PreTrainedModel.from_pretrained": from_pretrained,
            "PreTrainedModel._from_config": from_config,
            "PreTrainedModel.__init__": model_init,
            "PreTrainedModel.save_pretrained": save_pretrained,
        },
    )
    wrap("transformers.utils.hub", {"PushToHubMixin._upload_modified_files": upload_modified_files})
    wrap("transformers.trainer", {"Trainer.create_model_card": create_trainer_card})
    wrap("trl.trainer.base_trainer", {"_BaseTrainer.create_model_card": create_trainer_card})
    wrap("sentence_transformers.base.model", {"BaseModel._create_model_card": partial(create_card, folder="path")})
    wrap("peft.peft_model", {"PeftModel.create_or_update_model_card": partial(create_card, folder="output_dir")})
    for module in ("vllm.transformers_utils.config", "sglang.srt.utils.hf_transformers.config"):
        wrap(module, {"get_config": _get_engine_config})
    wrap("accelerate.utils.other", {"compile_regions": _compile_regions}, moved=True)
    other_loaders.install()
    peft_hooks.install()


def _compile_regions(call: Call) -> Any:
    """Compiles the layers of a patched model in place; accelerate copies the modules around them.

    The copy of a stack would run the original layers, to which its forward belongs.
    """
    module = call["module"]
    modules: Iterable[Any] = getattr(module, "modules", tuple)()
    if not any(hasattr(inner, ATTRIBUTE) for inner in modules):
        return call.run()
    # The same for modules that must not be copied.
    from accelerate.utils.other import compile_regions_deepspeed

    compile_regions_deepspeed(module, **call["compile_kwargs"])
    return module


def _get_engine_config(call: Call) -> Any:
    """Gives patched configs that an inference engine reads the architecture of its plug-in.

    vLLM and SGLang choose the class of a model by `architectures`. For the name of a stock class they have their own
    implementation, which would run the model with its native positions, and SGLang's would ignore the entry in the
    weights that names the scheme. Without the plug-in, an engine refuses the model, whose name it does not know.
    """
    config = call.run()
    if read_entry(config) is None:
        return config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = [name.removeprefix(CLASS_PREFIX) for name in config.architectures or []]
    generates = ENGINE_ARCHITECTURE in names or set(names) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    # The plug-ins have no implementation of other tasks, whose classes keep the names in `config.json`.
    config.architectures = [ENGINE_ARCHITECTURE] if generates else [CLASS_PREFIX + name for name in names]
    return config
