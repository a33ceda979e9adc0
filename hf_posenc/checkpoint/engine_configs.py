"""The architecture of a patched model in inference engines.

vLLM and SGLang choose the implementation of a model by the field `architectures` of its config. For the name of a stock
class they have an implementation of their own, which would run the model with its native positions. SGLang's would even
ignore the entry in the weights that names the scheme. So the functions with which the engines read a config are
wrapped, and write another name there. Without the plug-in, an engine does not know this name and refuses the model.
"""

from __future__ import annotations

from typing import Any

from hf_posenc.entry import read_entry
from hf_posenc.wrapping import Call, wrap

#: The architecture of patched models that generate text, which the plug-ins add to the registries of the engines.
ENGINE_ARCHITECTURE = "HfPosencForCausalLM"
_CONFIG_READERS = ("vllm.transformers_utils.config", "sglang.srt.utils.hf_transformers.config")


def install() -> None:
    """Wraps the functions, each as soon as its module is imported. Calling it again changes nothing."""
    for module in _CONFIG_READERS:
        wrap(module, {"get_config": _get_config})


def _get_config(call: Call) -> Any:
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
