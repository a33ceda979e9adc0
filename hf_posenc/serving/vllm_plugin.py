"""The plug-in for vLLM: the entry point `hf_posenc` of the group `vllm.general_plugins`.

vLLM calls `register` in each of its processes. Importing this module imports the package, which makes the configs of
patched models readable and gives them the architecture that is registered here (`checkpoint/install.py`).
"""

from __future__ import annotations

from hf_posenc.checkpoint.install import ENGINE_ARCHITECTURE


def register() -> None:
    """Adds the patched models to vLLM's registry. Calling it again changes nothing."""
    from vllm import ModelRegistry

    # By name, so that this process does not import the class: a process that initialises CUDA cannot be forked.
    ModelRegistry.register_model(ENGINE_ARCHITECTURE, "hf_posenc.serving.vllm_model:HfPosencForCausalLM")
