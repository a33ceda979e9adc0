"""One architecture from its name to its records: built, called, and checked in every part."""

from __future__ import annotations

import torch

from .attention import structural_reason
from .checks import check_pair
from .findings import Record
from .inputs import call, inputs_for, tensors_of
from .part_checks import check_parts
from .population import Pair
from .tiny import tiny_model
from .unbuilt import UNBUILT


def examine(pair: Pair) -> list[Record]:
    """Runs every check of an architecture; one record for each of its parts."""
    reason = unbuilt_reason(pair)
    if reason:
        return [Record(pair.name, unbuilt=reason)]
    without = structural_reason(tiny_model(pair))
    if without and not pair.has_vocabulary_head:
        return [Record(pair.name, without=without)]
    records = [check_pair(pair)] if pair.has_vocabulary_head else check_parts(pair)
    for record in records:
        record.without = without or (
            "a sparse approximation of it" if "sparse or approximate" in record.refusal else ""
        )
    return records


def unbuilt_reason(pair: Pair) -> str:
    """Why a model cannot be built or called here: a declared reason, or a package that is missing."""
    if pair.model_type in UNBUILT:
        return UNBUILT[pair.model_type]
    try:
        tiny_model(pair)
    except ImportError as error:
        return " ".join(str(error).split())[:160]
    return ""


def smoke(pair: Pair) -> str:
    """What happens when a stock model is built and called once: "ok", or why it is not looked at.

    Raises:
        Exception: whatever building or calling raises.
    """
    reason = unbuilt_reason(pair)
    if reason:
        return f"not built: {reason}"
    model = tiny_model(pair)
    without = structural_reason(model)
    if without:
        return f"no softmax self-attention: {without}"
    if pair.has_vocabulary_head:
        return "ok"
    with torch.no_grad():
        tensors = tensors_of(call(model, inputs_for(model, pair)))
    if not tensors:
        raise TypeError("The output holds no numbers.")
    if any(one.isnan().any() for one in tensors):
        raise ArithmeticError("The output is not a number.")
    return "ok"
