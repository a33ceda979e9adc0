"""Position-encoding schemes in pure torch. They do not depend on transformers.

Importing this package imports every module in it, which registers every scheme. A new scheme only needs a file. Its
config class then becomes an attribute of this package and of `hf_posenc`.
"""

import importlib
import pkgutil
from typing import Any

from hf_posenc.errors import missing_attribute
from hf_posenc.schemes.additive.binary import BinaryConfig
from hf_posenc.schemes.additive.integer import IntegerConfig, NormalizedIntegerConfig
from hf_posenc.schemes.additive.learned import LearnedConfig
from hf_posenc.schemes.additive.sinusoidal import SinusoidalConfig
from hf_posenc.schemes.arrangement.blended import BlendedConfig
from hf_posenc.schemes.arrangement.composed import ComposedConfig
from hf_posenc.schemes.arrangement.native import NativeConfig
from hf_posenc.schemes.arrangement.schedule import InterleavedConfig, LayeredConfig, LocalGlobalConfig, ScheduleConfig
from hf_posenc.schemes.bias.alibi import AlibiConfig
from hf_posenc.schemes.bias.cope import CopeConfig
from hf_posenc.schemes.bias.fire import FireConfig
from hf_posenc.schemes.bias.forget_gate import ForgetGateConfig
from hf_posenc.schemes.bias.grape import GrapeConfig
from hf_posenc.schemes.bias.kerple import KerpleConfig
from hf_posenc.schemes.bias.low_rank_relative import LowRankRelativeConfig
from hf_posenc.schemes.bias.sandwich import SandwichConfig
from hf_posenc.schemes.bias.shaw import ShawConfig
from hf_posenc.schemes.bias.t5 import T5Config
from hf_posenc.schemes.bias.transformer_xl import TransformerXLConfig
from hf_posenc.schemes.bias.wavelet import WaveletConfig
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
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig, PositionShiftConfig
from hf_posenc.schemes.position_maps.clamped import PositionClampConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig
from hf_posenc.schemes.position_maps.rerope import ReRopeConfig
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.reach import Reach
from hf_posenc.schemes.registry import (
    as_scheme,
    get_scheme,
    list_schemes,
    register_scheme,
    registered_configs,
    scheme_from_dict,
)
from hf_posenc.schemes.rotary.fope import FopeConfig
from hf_posenc.schemes.rotary.hope import HopeConfig
from hf_posenc.schemes.rotary.learned_frequencies import LearnedRopeConfig
from hf_posenc.schemes.rotary.mrope import MRopeConfig
from hf_posenc.schemes.rotary.p_rope import PRopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.resonance import ResonanceConfig, ResonanceScaling
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig
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
from hf_posenc.schemes.rotary.string import StringConfig
from hf_posenc.schemes.rotary.xpos import XposConfig
from hf_posenc.schemes.scale.llama4_scale import Llama4ScaleConfig
from hf_posenc.schemes.scale.log_n_scale import LogNScaleConfig
from hf_posenc.schemes.scale.ssmax import SSMaxConfig

__all__ = [
    "AdditiveEncoding",
    "AlibiConfig",
    "AttentionPairs",
    "BinaryConfig",
    "BlendedConfig",
    "BuildContext",
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
    "Part",
    "PopeConfig",
    "PositionClampConfig",
    "PositionScaleConfig",
    "PositionShiftConfig",
    "Positions",
    "QueryKeyMap",
    "RandomizedConfig",
    "ReRopeConfig",
    "Reach",
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
    "ShawConfig",
    "SinusoidalConfig",
    "StringConfig",
    "SubConfig",
    "T5Config",
    "TransformerXLConfig",
    "WaveletConfig",
    "XposConfig",
    "YarnScaling",
    "as_scheme",
    "from_rope_parameters",
    "get_scheme",
    "list_schemes",
    "register_scheme",
    "registered_configs",
    "scheme_from_dict",
    "to_rope_parameters",
]


def __getattr__(name: str) -> Any:
    """Returns the config class of a registered scheme that is not imported above."""
    registered = {} if name.startswith("_") else {found.__name__: found for found in registered_configs()}
    if name in registered:
        return registered[name]
    raise missing_attribute(__name__, name, [*__all__, *registered])


for _module in pkgutil.walk_packages(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
