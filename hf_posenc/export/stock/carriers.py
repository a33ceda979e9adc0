"""The stock models that can carry a scheme, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_posenc.export.stock.form import StockForm
from hf_posenc.export.stock.own_class import own_class


@dataclass(frozen=True)
class Carrier:
    """A way to express schemes in stock transformers.

    Args:
        name: in messages.
        form: returns the stock model, or raises `UnsupportedError` with the reason.
    """

    name: str
    form: Callable[[PreTrainedModel], StockForm]


CARRIERS = (Carrier("the model's own class", own_class),)
