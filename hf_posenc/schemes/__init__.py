"""Position-encoding schemes: pure torch, without any knowledge of transformers.

Importing this package registers every scheme it holds.
"""

from hf_posenc.schemes.alibi import AlibiConfig
from hf_posenc.schemes.base import (
    AdditiveEncoding,
    BuildContext,
    LogitBias,
    Part,
    Positions,
    QueryKeyMap,
    SchemeConfig,
    SchemeParts,
    SubConfig,
)
from hf_posenc.schemes.binary import BinaryConfig
from hf_posenc.schemes.composed import ComposedConfig
from hf_posenc.schemes.integer import IntegerConfig, NormalizedIntegerConfig
from hf_posenc.schemes.learned import LearnedConfig
from hf_posenc.schemes.none import NoneConfig
from hf_posenc.schemes.p_rope import PRopeConfig
from hf_posenc.schemes.registry import get_scheme, list_schemes, register_scheme, scheme_from_dict
from hf_posenc.schemes.rope import RopeConfig
from hf_posenc.schemes.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
)
from hf_posenc.schemes.schedule import ScheduleConfig
from hf_posenc.schemes.sinusoidal import SinusoidalConfig
from hf_posenc.schemes.stock import from_rope_parameters, to_rope_parameters
from hf_posenc.schemes.t5 import T5Config

__all__ = [
    "AdditiveEncoding",
    "AlibiConfig",
    "BinaryConfig",
    "BuildContext",
    "ComposedConfig",
    "DynamicScaling",
    "IntegerConfig",
    "LearnedConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LogitBias",
    "LongRopeScaling",
    "NoneConfig",
    "NormalizedIntegerConfig",
    "NtkScaling",
    "PRopeConfig",
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
