"""The names with which the config of a scheme is written. Those for its parts are in `hf_posenc.schemes.parts`."""

from hf_posenc.schemes.config import (
    BuildContext as BuildContext,
    OuterConfig as OuterConfig,
    SchemeConfig as SchemeConfig,
    SharedConfig as SharedConfig,
)
from hf_posenc.schemes.registry import register_scheme as register_scheme
from hf_posenc.schemes.validation import option as option
