"""What can carry a scheme in llama.cpp: one row each, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf import bert, gpt, llama, t5
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.parts import ModelParts


@dataclass(frozen=True)
class Blocks:
    """Blocks of a kind, which several architectures of llama.cpp have.

    Args:
        name: in messages.
        fits: whether a model has them, as far as its config says.
    """

    name: str
    fits: Callable[[PreTrainedModel], bool]


@dataclass(frozen=True)
class Carrier:
    """A way to express schemes in llama.cpp.

    Args:
        name: in messages.
        blocks: the blocks it has. It is only tried for models with these.
        form: returns the content of the file, or raises `UnsupportedError` with the reason.
    """

    name: str
    blocks: Blocks
    form: Callable[[ModelParts], GgufForm]


def _of(*model_types: str) -> Callable[[PreTrainedModel], bool]:
    return lambda model: model.config.model_type in model_types


_LLAMA = Blocks("Llama's (RMSNorm, gated feed-forward)", llama.is_llama)
_GPT = Blocks(
    "GPT-2's (LayerNorm, feed-forward with GELU, one projection of queries, keys and values)", _of(*gpt.SOURCES)
)
#: BLOOM also normalises its embeddings.
_BLOOM = Blocks(_GPT.name, _of("bloom"))
_T5 = Blocks("T5's", _of("t5", "mt5", "umt5"))
_BERT = Blocks("BERT's", _of("bert"))

CARRIERS = (
    Carrier("llama with rope.scaling", _LLAMA, llama.scaling_metadata),
    Carrier("llama", _LLAMA, llama.shared_spectrum),
    Carrier("smollm3", _LLAMA, llama.every_fourth_layer_stopped),
    Carrier("llama with wide heads", _LLAMA, llama.spectrum_per_layer),
    Carrier("refact", _LLAMA, llama.alibi),
    Carrier("gpt2", _GPT, gpt.vectors),
    Carrier("bloom", _BLOOM, gpt.alibi_after_norm),
    Carrier("mpt", _GPT, gpt.alibi_and_vectors),
    Carrier("gptneox with rope.scaling", _GPT, gpt.scaled_rotation),
    Carrier("gptneox", _GPT, gpt.geometric_rotation),
    Carrier("t5", _T5, t5.buckets),
    Carrier("bert", _BERT, bert.table),
    Carrier("jina-bert-v2", _BERT, bert.alibi),
    Carrier("jina-bert-v3", _BERT, bert.one_rope),
)


def refuse_other_blocks(model: PreTrainedModel) -> None:
    """Refuses a model whose blocks no carrier has.

    Raises:
        UnsupportedError: with the blocks that there are.
    """
    if not any(carrier.blocks.fits(model) for carrier in CARRIERS):
        names = dict.fromkeys(carrier.blocks.name for carrier in CARRIERS)
        raise UnsupportedError(
            f"{type(model).__name__} ({model.config.model_type}) has other blocks than those that are written: "
            f"{'; '.join(names)}"
        )
