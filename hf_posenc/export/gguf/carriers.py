"""What can carry a scheme in llama.cpp: one row each, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_posenc.export.gguf import bert_carriers, llama_carriers, t5_carriers
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.parts import ModelParts


@dataclass(frozen=True)
class Carrier:
    """A way to express schemes in llama.cpp.

    Args:
        name: in messages.
        blocks: the models whose blocks it has, in a few words.
        form: returns the content of the file, or raises `UnsupportedError` with the reason.
        model_types: architectures that only these rows are tried for; `None` for all others.
    """

    name: str
    blocks: str
    form: Callable[[ModelParts], GgufForm]
    model_types: tuple[str, ...] | None = None


_LLAMA = "Llama-like blocks"
_T5 = ("t5", "mt5", "umt5")
_BERT = ("bert",)

CARRIERS = (
    Carrier("llama with rope.scaling", _LLAMA, llama_carriers.scaling_metadata),
    Carrier("llama", _LLAMA, llama_carriers.shared_spectrum),
    Carrier("smollm3", _LLAMA, llama_carriers.every_fourth_layer_stopped),
    Carrier("llama with wide heads", _LLAMA, llama_carriers.spectrum_per_layer),
    Carrier("refact", _LLAMA, llama_carriers.alibi),
    Carrier("t5", "T5's blocks", t5_carriers.buckets, _T5),
    Carrier("bert", "BERT's blocks", bert_carriers.table, _BERT),
    Carrier("jina-bert-v2", "BERT's blocks", bert_carriers.alibi, _BERT),
    Carrier("jina-bert-v3", "BERT's blocks", bert_carriers.one_rope, _BERT),
)


def carriers_for(model: PreTrainedModel, carriers: Sequence[Carrier]) -> list[Carrier]:
    """The rows to try for a model: those that name its architecture, or else those that name none."""
    kind = model.config.model_type
    named = [row for row in carriers if row.model_types is not None and kind in row.model_types]
    return named or [row for row in carriers if row.model_types is None]
