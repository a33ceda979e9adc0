"""Position-encoding schemes: pure torch, without any knowledge of transformers.

Importing this package imports every module in it, and so registers every scheme: a new one needs a file and nothing
else. Its config class is then an attribute of this package and of `hf_posenc`, by name.
"""

import importlib
import pkgutil
from typing import Any

from hf_posenc.schemes.additive.binary import BinaryConfig
from hf_posenc.schemes.additive.integer import IntegerConfig, NormalizedIntegerConfig
from hf_posenc.schemes.additive.learned import LearnedConfig
from hf_posenc.schemes.additive.sinusoidal import SinusoidalConfig
from hf_posenc.schemes.arrangement.composed import ComposedConfig
from hf_posenc.schemes.arrangement.schedule import InterleavedConfig, LayeredConfig, LocalGlobalConfig, ScheduleConfig
from hf_posenc.schemes.bias.alibi import AlibiConfig
from hf_posenc.schemes.bias.t5 import T5Config
from hf_posenc.schemes.config import BuildContext, SchemeConfig, SubConfig
from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    SchemeParts,
)
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.registry import get_scheme, list_schemes, register_scheme, registered_configs, scheme_from_dict
from hf_posenc.schemes.rotary.p_rope import PRopeConfig
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.rotary.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
)
from hf_posenc.schemes.rotary.stock import from_rope_parameters, to_rope_parameters

__all__ = [
    "AdditiveEncoding",
    "AlibiConfig",
    "AttentionPairs",
    "BinaryConfig",
    "BuildContext",
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
    "Part",
    "Positions",
    "QueryKeyMap",
    "RopeConfig",
    "RopeScaling",
    "ScheduleConfig",
    "SchemeConfig",
    "SchemeParts",
    "SinusoidalConfig",
    "SubConfig",
    "T5Config",
    "YarnScaling",
    "from_rope_parameters",
    "get_scheme",
    "list_schemes",
    "register_scheme",
    "scheme_from_dict",
    "to_rope_parameters",
]


def __getattr__(name: str) -> Any:
    """The config class of a registered scheme, for those that are not listed above."""
    if not name.startswith("_"):
        for config_class in registered_configs():
            if config_class.__name__ == name:
                return config_class
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _module in pkgutil.walk_packages(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
