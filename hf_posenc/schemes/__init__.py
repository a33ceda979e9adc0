"""Position-encoding schemes in pure torch. They do not depend on transformers.

Importing this package imports every module in it, which registers every scheme. A new scheme only needs a file. Its
config class then becomes an attribute of this package and of `hf_posenc`.
"""

import importlib
import pkgutil
from typing import Any as _Any

from hf_posenc.errors import missing_attribute as _missing_attribute
from hf_posenc.schemes.additive.binary import BinaryConfig as BinaryConfig
from hf_posenc.schemes.additive.integer import (
    IntegerConfig as IntegerConfig,
    NormalizedIntegerConfig as NormalizedIntegerConfig,
)
from hf_posenc.schemes.additive.learned import LearnedConfig as LearnedConfig
from hf_posenc.schemes.additive.sinusoidal import SinusoidalConfig as SinusoidalConfig
from hf_posenc.schemes.arrangement.blended import BlendedConfig as BlendedConfig
from hf_posenc.schemes.arrangement.composed import ComposedConfig as ComposedConfig
from hf_posenc.schemes.arrangement.cross_attention import CrossAttentionConfig as CrossAttentionConfig
from hf_posenc.schemes.arrangement.native import NativeConfig as NativeConfig
from hf_posenc.schemes.arrangement.of_parts import PartsConfig as PartsConfig
from hf_posenc.schemes.arrangement.schedule import (
    InterleavedConfig as InterleavedConfig,
    LayeredConfig as LayeredConfig,
    LocalGlobalConfig as LocalGlobalConfig,
    ScheduleConfig as ScheduleConfig,
)
from hf_posenc.schemes.bias.alibi import AlibiConfig as AlibiConfig
from hf_posenc.schemes.bias.cope import CopeConfig as CopeConfig
from hf_posenc.schemes.bias.disentangled import DisentangledConfig as DisentangledConfig
from hf_posenc.schemes.bias.distance_function import (
    distance_bias as distance_bias,
    learned_per_head as learned_per_head,
)
from hf_posenc.schemes.bias.fire import FireConfig as FireConfig
from hf_posenc.schemes.bias.forget_gate import ForgetGateConfig as ForgetGateConfig
from hf_posenc.schemes.bias.grape import GrapeConfig as GrapeConfig
from hf_posenc.schemes.bias.grape_ap import GrapeApConfig as GrapeApConfig
from hf_posenc.schemes.bias.kerple import KerpleConfig as KerpleConfig
from hf_posenc.schemes.bias.log_cpb import LogCpbConfig as LogCpbConfig
from hf_posenc.schemes.bias.low_rank_relative import LowRankRelativeConfig as LowRankRelativeConfig
from hf_posenc.schemes.bias.sandwich import SandwichConfig as SandwichConfig
from hf_posenc.schemes.bias.shaw import ShawConfig as ShawConfig
from hf_posenc.schemes.bias.swin import SwinConfig as SwinConfig
from hf_posenc.schemes.bias.t5 import T5Config as T5Config
from hf_posenc.schemes.bias.tisa import TisaConfig as TisaConfig
from hf_posenc.schemes.bias.transformer_xl import TransformerXLConfig as TransformerXLConfig
from hf_posenc.schemes.bias.tupe import TupeConfig as TupeConfig
from hf_posenc.schemes.bias.wavelet import WaveletConfig as WaveletConfig
from hf_posenc.schemes.config import (
    BuildContext as BuildContext,
    SchemeConfig as SchemeConfig,
    SubConfig as SubConfig,
)
from hf_posenc.schemes.none import NoneConfig as NoneConfig
from hf_posenc.schemes.parts import (
    AdditiveEncoding as AdditiveEncoding,
    DistanceBias as DistanceBias,
    LogitBias as LogitBias,
    LogitScale as LogitScale,
    PairwiseBias as PairwiseBias,
    Part as Part,
    QueryKeyMap as QueryKeyMap,
    Reach as Reach,
    SchemeParts as SchemeParts,
)
from hf_posenc.schemes.position_maps.affine import (
    PositionScaleConfig as PositionScaleConfig,
    PositionShiftConfig as PositionShiftConfig,
)
from hf_posenc.schemes.position_maps.attention_sinks import AttentionSinksConfig as AttentionSinksConfig
from hf_posenc.schemes.position_maps.clamped import PositionClampConfig as PositionClampConfig
from hf_posenc.schemes.position_maps.dual_chunk import DualChunkConfig as DualChunkConfig
from hf_posenc.schemes.position_maps.hierarchical import HierarchicalConfig as HierarchicalConfig
from hf_posenc.schemes.position_maps.randomized import RandomizedConfig as RandomizedConfig
from hf_posenc.schemes.position_maps.rerope import ReRopeConfig as ReRopeConfig
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig as SelfExtendConfig
from hf_posenc.schemes.positions import (
    AttentionPairs as AttentionPairs,
    Positions as Positions,
)
from hf_posenc.schemes.registry import (
    as_scheme as as_scheme,
    get_scheme as get_scheme,
    list_schemes as list_schemes,
    register_scheme as register_scheme,
    registered_configs as registered_configs,
    scheme_from_dict as scheme_from_dict,
)
from hf_posenc.schemes.rotary.fope import FopeConfig as FopeConfig
from hf_posenc.schemes.rotary.grape_m import GrapeMConfig as GrapeMConfig
from hf_posenc.schemes.rotary.hope import HopeConfig as HopeConfig
from hf_posenc.schemes.rotary.learned_frequencies import LearnedRopeConfig as LearnedRopeConfig
from hf_posenc.schemes.rotary.mrope import MRopeConfig as MRopeConfig
from hf_posenc.schemes.rotary.p_rope import PRopeConfig as PRopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig as PopeConfig
from hf_posenc.schemes.rotary.repo import RepoConfig as RepoConfig
from hf_posenc.schemes.rotary.resonance import (
    ResonanceConfig as ResonanceConfig,
    ResonanceScaling as ResonanceScaling,
)
from hf_posenc.schemes.rotary.rope import RopeConfig as RopeConfig
from hf_posenc.schemes.rotary.rope_nd import RopeNdConfig as RopeNdConfig
from hf_posenc.schemes.rotary.rope_pp import RopePpConfig as RopePpConfig
from hf_posenc.schemes.rotary.scaling import (
    ClippedScaling as ClippedScaling,
    DynamicScaling as DynamicScaling,
    DynamicYarnScaling as DynamicYarnScaling,
    LinearScaling as LinearScaling,
    Llama3Scaling as Llama3Scaling,
    LongRopeScaling as LongRopeScaling,
    NtkScaling as NtkScaling,
    RopeScaling as RopeScaling,
    YarnScaling as YarnScaling,
)
from hf_posenc.schemes.rotary.selective_rope import SelectiveRopeConfig as SelectiveRopeConfig
from hf_posenc.schemes.rotary.stock import (
    from_rope_parameters as from_rope_parameters,
    to_rope_parameters as to_rope_parameters,
)
from hf_posenc.schemes.rotary.string import StringConfig as StringConfig
from hf_posenc.schemes.rotary.xpos import XposConfig as XposConfig
from hf_posenc.schemes.scale.llama4_scale import Llama4ScaleConfig as Llama4ScaleConfig
from hf_posenc.schemes.scale.log_n_scale import LogNScaleConfig as LogNScaleConfig
from hf_posenc.schemes.scale.ssmax import SSMaxConfig as SSMaxConfig
from hf_posenc.schemes.validation import option as option


def __getattr__(name: str) -> _Any:
    """Returns the config class of a registered scheme that is not imported above, or the names in `__all__`."""
    public = [known for known, value in globals().items() if callable(value) and not known.startswith("_")]
    if name == "__all__":
        return sorted(public)
    registered = {} if name.startswith("_") else {config.__name__: config for config in registered_configs()}
    if name in registered:
        return registered[name]
    raise _missing_attribute(__name__, name, [*public, *registered])


for _module in pkgutil.walk_packages(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
