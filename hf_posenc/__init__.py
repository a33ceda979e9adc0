"""Replace the position encoding of any Hugging Face transformers model, exactly and reversibly.

Importing this package also teaches `from_pretrained` to load the checkpoints that patched models save. Everything
else is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.loading import install as _install
from hf_posenc.version import __version__

if TYPE_CHECKING:
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.checkpoint.export import save_stock_checkpoint
    from hf_posenc.errors import PositionEncodingError, SequenceLengthError, UnknownNameError, UnsupportedError
    from hf_posenc.patching import (
        Architecture,
        inspect_model,
        native_scheme,
        patch_model,
        register_architecture,
        unpatch_model,
    )
    from hf_posenc.schemes import (
        AdditiveEncoding,
        AlibiConfig,
        AttentionPairs,
        BinaryConfig,
        BuildContext,
        ComposedConfig,
        DistanceBias,
        DynamicScaling,
        IntegerConfig,
        InterleavedConfig,
        LayeredConfig,
        LearnedConfig,
        LinearScaling,
        Llama3Scaling,
        LocalGlobalConfig,
        LogitBias,
        LogitScale,
        LongRopeScaling,
        NoneConfig,
        NormalizedIntegerConfig,
        NtkScaling,
        PairwiseBias,
        Positions,
        PRopeConfig,
        QueryKeyMap,
        RopeConfig,
        ScheduleConfig,
        SchemeConfig,
        SchemeParts,
        SinusoidalConfig,
        T5Config,
        YarnScaling,
        get_scheme,
        list_schemes,
        register_scheme,
    )

__all__ = [
    "AdditiveEncoding",
    "AlibiConfig",
    "Architecture",
    "AttentionPairs",
    "BinaryConfig",
    "BuildContext",
    "CheckpointError",
    "ComposedConfig",
    "DistanceBias",
    "DynamicScaling",
    "IntegerConfig",
    "InterleavedConfig",
    "LayeredConfig",
    "LearnedConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LocalGlobalConfig",
    "LogitBias",
    "LogitScale",
    "LongRopeScaling",
    "NoneConfig",
    "NormalizedIntegerConfig",
    "NtkScaling",
    "PRopeConfig",
    "PairwiseBias",
    "PositionEncodingError",
    "Positions",
    "QueryKeyMap",
    "RopeConfig",
    "ScheduleConfig",
    "SchemeConfig",
    "SchemeParts",
    "SequenceLengthError",
    "SinusoidalConfig",
    "T5Config",
    "UnknownNameError",
    "UnsupportedError",
    "YarnScaling",
    "__version__",
    "get_scheme",
    "inspect_model",
    "list_schemes",
    "native_scheme",
    "patch_model",
    "register_architecture",
    "register_scheme",
    "save_stock_checkpoint",
    "unpatch_model",
]

_HOMES = {
    "hf_posenc.checkpoint.configuration": ("CheckpointError",),
    "hf_posenc.checkpoint.export": ("save_stock_checkpoint",),
    "hf_posenc.errors": ("PositionEncodingError", "SequenceLengthError", "UnknownNameError", "UnsupportedError"),
    "hf_posenc.patching": (
        "Architecture",
        "inspect_model",
        "native_scheme",
        "patch_model",
        "register_architecture",
        "unpatch_model",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__ and not name.endswith("Config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF.get(name, "hf_posenc.schemes")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_install()
