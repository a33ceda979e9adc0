"""One architecture from its name to its records: built, called, and checked in every part."""

from __future__ import annotations

from .attention import structural_reason
from .checks import check_pair
from .findings import Record
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
    records = check_pair(pair)
    for record in records:
        record.without = without
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
