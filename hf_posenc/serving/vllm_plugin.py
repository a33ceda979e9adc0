"""The plug-in for vLLM: the entry point `hf_posenc` of the group `vllm.general_plugins`.

vLLM calls `register` in each of its processes. It chooses the implementation of a model by the field `architectures` of
the config. Its parser of `config.json` is wrapped to write the architecture of this package there, because the name of
the stock class would select an implementation of vLLM without the scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import hf_posenc  # noqa: F401  (makes configs of patched models readable)
from hf_posenc.checkpoint.wrapping import wrap
from hf_posenc.entry import read_entry
from hf_posenc.when_imported import when_imported

#: Architecture of all patched models in vLLM's registry.
ARCHITECTURE = "HfPosencForCausalLM"


def register() -> None:
    """Adds the patched models to vLLM's registry. Calling it again changes nothing."""
    from vllm import ModelRegistry

    # A name, because vLLM inspects classes in a process of its own, so that this one does not initialise CUDA.
    ModelRegistry.register_model(ARCHITECTURE, "hf_posenc.serving.vllm_model:HfPosencForCausalLM")
    when_imported("vllm.transformers_utils.config", _wrap_parser)


def _wrap_parser(module: ModuleType) -> None:
    wrap(module.HFConfigParser, "parse", _parse)


def _parse(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    dictionary, config = original(parser, *args, **kwargs)
    if read_entry(config) is not None:
        config.architectures = [ARCHITECTURE]
    return dictionary, config
