"""What can carry a scheme in llama.cpp: one row each, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_posenc.export.gguf import llama_carriers
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.parts import ModelParts


@dataclass(frozen=True)
class Carrier:
    """A way to express schemes in llama.cpp.

    Args:
        name: in messages.
        blocks: the models whose blocks it has, in a few words.
        form: returns the content of the file, or raises `UnsupportedError` with the reason.
    """

    name: str
    blocks: str
    form: Callable[[ModelParts], GgufForm]


_LLAMA = "Llama-like blocks"

CARRIERS = (
    Carrier("llama with rope.scaling", _LLAMA, llama_carriers.scaling_metadata),
    Carrier("llama", _LLAMA, llama_carriers.shared_spectrum),
    Carrier("smollm3", _LLAMA, llama_carriers.every_fourth_layer_stopped),
    Carrier("llama with wide heads", _LLAMA, llama_carriers.spectrum_per_layer),
    Carrier("refact", _LLAMA, llama_carriers.alibi),
)
