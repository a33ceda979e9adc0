"""Patching a model: discovery of the modules that use positions, placing a scheme, and removing it."""

from hf_posenc.patching import layouts as layouts
from hf_posenc.patching.anatomy.architectures import Architecture, register_architecture
from hf_posenc.patching.call.cache_checks import accept_cache
from hf_posenc.patching.call.evicting_cache import SinkCache
from hf_posenc.patching.extending import extend_context
from hf_posenc.patching.inspection import Inspection, inspect_model, native_scheme
from hf_posenc.patching.patch import patch_model, unpatch_model
from hf_posenc.patching.place.install import PatchReport, StackReport

__all__ = [
    "Architecture",
    "Inspection",
    "PatchReport",
    "SinkCache",
    "StackReport",
    "accept_cache",
    "extend_context",
    "inspect_model",
    "native_scheme",
    "patch_model",
    "register_architecture",
    "unpatch_model",
]
