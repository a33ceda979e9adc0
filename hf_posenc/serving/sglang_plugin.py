"""The plug-in for SGLang: the entry point `hf_posenc` of the group `sglang.srt.plugins`.

SGLang calls `register` in each of its processes. Importing this module imports the package, which makes the configs of
patched models readable and gives them the architecture that is registered here (`checkpoint/install.py`).
"""

from __future__ import annotations

from types import ModuleType

from hf_posenc.checkpoint.install import ENGINE_ARCHITECTURE
from hf_posenc.wrapping import when_imported


def register() -> None:
    """Adds the patched models to SGLang's registry, once it is imported. Calling it again changes nothing."""
    # Some processes of SGLang do not need the registry, and importing it imports all models.
    when_imported("sglang.srt.models.registry", _add_model)


def _add_model(module: ModuleType) -> None:
    from hf_posenc.serving.sglang_model import HfPosencForCausalLM

    module.ModelRegistry.models[ENGINE_ARCHITECTURE] = HfPosencForCausalLM
