"""Replace the position encoding of any Hugging Face transformers model, exactly and reversibly.

Importing this package also enables `from_pretrained` to load checkpoints of patched models. Everything else is imported
on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.install import install as _install
from hf_posenc.errors import missing_attribute
from hf_posenc.version import __version__

if TYPE_CHECKING:
    from hf_posenc import metrics as metrics
    from hf_posenc import plots as plots
    from hf_posenc import recipes as recipes
    from hf_posenc import schemes as schemes
    from hf_posenc.checkpoint.configuration import CheckpointError
    from hf_posenc.checkpoint.export import save_stock_checkpoint
    from hf_posenc.checkpoint.position_adapters import load_position_adapter, save_position_adapter
    from hf_posenc.errors import PositionEncodingError, SequenceLengthError, UnknownNameError, UnsupportedError
    from hf_posenc.patching import (
        Architecture,
        extend_context,
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
        BlendedConfig,
        BuildContext,
        ComposedConfig,
        CopeConfig,
        DistanceBias,
        DynamicScaling,
        FireConfig,
        FopeConfig,
        ForgetGateConfig,
        GrapeConfig,
        HierarchicalConfig,
        HopeConfig,
        IntegerConfig,
        InterleavedConfig,
        KerpleConfig,
        LayeredConfig,
        LearnedConfig,
        LearnedRopeConfig,
        LinearScaling,
        Llama3Scaling,
        Llama4ScaleConfig,
        LocalGlobalConfig,
        LogitBias,
        LogitScale,
        LogNScaleConfig,
        LongRopeScaling,
        LowRankRelativeConfig,
        MRopeConfig,
        NativeConfig,
        NoneConfig,
        NormalizedIntegerConfig,
        NtkScaling,
        PairwiseBias,
        PopeConfig,
        PositionClampConfig,
        Positions,
        PositionScaleConfig,
        PositionShiftConfig,
        PRopeConfig,
        QueryKeyMap,
        RandomizedConfig,
        ReRopeConfig,
        ResonanceConfig,
        ResonanceScaling,
        RopeConfig,
        RopeNdConfig,
        RopeScaling,
        SandwichConfig,
        ScheduleConfig,
        SchemeConfig,
        SchemeParts,
        SelfExtendConfig,
        ShawConfig,
        SinusoidalConfig,
        SSMaxConfig,
        StringConfig,
        T5Config,
        TransformerXLConfig,
        WaveletConfig,
        XposConfig,
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
    "BlendedConfig",
    "BuildContext",
    "CheckpointError",
    "ComposedConfig",
    "CopeConfig",
    "DistanceBias",
    "DynamicScaling",
    "FireConfig",
    "FopeConfig",
    "ForgetGateConfig",
    "GrapeConfig",
    "HierarchicalConfig",
    "HopeConfig",
    "IntegerConfig",
    "InterleavedConfig",
    "KerpleConfig",
    "LayeredConfig",
    "LearnedConfig",
    "LearnedRopeConfig",
    "LinearScaling",
    "Llama3Scaling",
    "Llama4ScaleConfig",
    "LocalGlobalConfig",
    "LogNScaleConfig",
    "LogitBias",
    "LogitScale",
    "LongRopeScaling",
    "LowRankRelativeConfig",
    "MRopeConfig",
    "NativeConfig",
    "NoneConfig",
    "NormalizedIntegerConfig",
    "NtkScaling",
    "PRopeConfig",
    "PairwiseBias",
    "PopeConfig",
    "PositionClampConfig",
    "PositionEncodingError",
    "PositionScaleConfig",
    "PositionShiftConfig",
    "Positions",
    "QueryKeyMap",
    "RandomizedConfig",
    "ReRopeConfig",
    "ResonanceConfig",
    "ResonanceScaling",
    "RopeConfig",
    "RopeNdConfig",
    "RopeScaling",
    "SSMaxConfig",
    "SandwichConfig",
    "ScheduleConfig",
    "SchemeConfig",
    "SchemeParts",
    "SelfExtendConfig",
    "SequenceLengthError",
    "ShawConfig",
    "SinusoidalConfig",
    "StringConfig",
    "T5Config",
    "TransformerXLConfig",
    "UnknownNameError",
    "UnsupportedError",
    "WaveletConfig",
    "XposConfig",
    "YarnScaling",
    "__version__",
    "extend_context",
    "get_scheme",
    "inspect_model",
    "list_schemes",
    "load_position_adapter",
    "native_scheme",
    "patch_model",
    "register_architecture",
    "register_scheme",
    "save_position_adapter",
    "save_stock_checkpoint",
    "unpatch_model",
]

_HOMES = {
    "hf_posenc.checkpoint.configuration": ("CheckpointError",),
    "hf_posenc.checkpoint.export": ("save_stock_checkpoint",),
    "hf_posenc.checkpoint.position_adapters": ("load_position_adapter", "save_position_adapter"),
    "hf_posenc.errors": ("PositionEncodingError", "SequenceLengthError", "UnknownNameError", "UnsupportedError"),
    "hf_posenc.patching": (
        "Architecture",
        "extend_context",
        "inspect_model",
        "native_scheme",
        "patch_model",
        "register_architecture",
        "unpatch_model",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBPACKAGES = ("metrics", "plots", "recipes", "schemes")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        value = getattr(importlib.import_module(_HOME_OF.get(name, "hf_posenc.schemes")), name)
        globals()[name] = value
        return value
    known = [*__all__, *_SUBPACKAGES]
    if name.endswith("Config"):
        from hf_posenc.schemes import registered_configs

        registered = {found.__name__: found for found in registered_configs()}
        if name in registered:
            return registered[name]
        known += registered
    raise missing_attribute(__name__, name, known)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})


_install()
