"""The stock models that can carry a scheme, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_posenc.export.stock.bert import mpnet, roformer
from hf_posenc.export.stock.form import StockForm
from hf_posenc.export.stock.gpt_neox import gpt_neox
from hf_posenc.export.stock.own_class import own_class, own_table
from hf_posenc.export.stock.smollm3 import smollm3
from hf_posenc.export.stock.spectrum import own_spectrum


@dataclass(frozen=True)
class Carrier:
    """A way to express schemes in stock transformers.

    Args:
        name: in messages.
        form: returns the stock model, or raises `UnsupportedError` with the reason.
        model_types: architectures whose weights it takes; `None` for any.
    """

    name: str
    form: Callable[[PreTrainedModel], StockForm]
    model_types: tuple[str, ...] | None = None

    def fits(self, model: PreTrainedModel) -> bool:
        """Whether it is worth trying for this architecture."""
        return self.model_types is None or model.config.model_type in self.model_types


#: The model's own class comes first, because it is the one that other programs know.
CARRIERS = (
    Carrier("its own config", own_class),
    Carrier("its own class with other frequencies", own_spectrum),
    Carrier("its own class with another table of positions", own_table),
    Carrier("SmolLM3", smollm3, ("llama", "mistral", "smollm3")),
    Carrier("GPT-NeoX", gpt_neox, ("gpt2",)),
    Carrier("RoFormer", roformer, ("bert",)),
    Carrier("MPNet", mpnet, ("bert",)),
)
