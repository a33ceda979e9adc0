"""Where and how a model takes position in: finding the places, putting a scheme there, taking it out again."""

from hf_posenc.patching.architectures import Architecture, register_architecture
from hf_posenc.patching.context_length import extend_context
from hf_posenc.patching.inspection import Inspection, inspect_model
from hf_posenc.patching.native import native_scheme
from hf_posenc.patching.patch import patch_model, unpatch_model
from hf_posenc.patching.report import PatchReport, StackReport

__all__ = [
    "Architecture",
    "Inspection",
    "PatchReport",
    "StackReport",
    "extend_context",
    "inspect_model",
    "native_scheme",
    "patch_model",
    "register_architecture",
    "unpatch_model",
]
