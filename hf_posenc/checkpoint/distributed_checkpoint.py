"""Checks for `torch.distributed.checkpoint.load`: compares schemes before any weights are read.

torch reads only the entries of the state dict to fill and ignores all others, so it would load the weights of a patched
model into a stock model. The marks of a checkpoint are listed in its metadata and are read with a separate small load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_posenc.entry import ATTRIBUTE, MARK, find_marks
from hf_posenc.wrapping import Call

_REMEDY = (
    " To load only the weights, pass planner=DefaultLoadPlanner(allow_partial_load=True) from "
    "torch.distributed.checkpoint."
)


def load(call: Call) -> Any:
    """Wraps the function that all functions which load distributed checkpoints call."""
    state_dict = call["state_dict"]
    if getattr(call["planner"], "allow_partial_load", False):
        # Only the weights are requested. Marks of two schemes differ in size, which torch would refuse.
        with _without_marks(state_dict):
            return call.run()

    _compare(call)
    return call.run()


@contextmanager
def _without_marks(state_dict: dict[str, Any]) -> Iterator[None]:
    """Removes the marks from a state dict, also from nested ones, and restores them afterwards."""
    taken: list[tuple[dict[str, Any], str, Any]] = []

    def take(entries: dict[str, Any]) -> None:
        for name in find_marks(entries):
            taken.append((entries, name, entries.pop(name)))
        for value in entries.values():
            if isinstance(value, dict):
                take(value)

    take(state_dict)
    try:
        yield
    finally:
        for entries, name, mark in taken:
            entries[name] = mark


def _compare(call: Call) -> None:
    """Compares the marks of a checkpoint with those of the state dict to fill.

    Raises:
        SchemeMismatchError: if they differ; names both schemes.
    """
    here = dict(_entries(call["state_dict"]))
    try:
        stored = call["storage_reader"].read_metadata().state_dict_metadata
    except Exception:
        return  # If a checkpoint cannot be read, torch reports it on all processes.
    shared = here.keys() & stored.keys()
    found, placed = (
        [name for name in find_marks(names) if _has_other_weights(name, shared)] for names in (stored, here)
    )
    if not found and not placed:
        return
    from hf_posenc.checkpoint.agreement import NamedSchemes
    from hf_posenc.schemes.registry import scheme_from_dict

    marks: dict[str, Any] = {name: torch.empty(stored[name].size, dtype=torch.uint8) for name in found}
    if marks:
        call.run(state_dict=marks, planner=None)
    wanted = NamedSchemes.of({name: here[name] for name in placed}).schemes
    NamedSchemes.of(marks, "this checkpoint").compare(
        {name: scheme_from_dict(scheme) for name, scheme in wanted.items()}, "this state dict", _REMEDY
    )


def _has_other_weights(mark: str, names: Any) -> bool:
    """Whether `names` include other weights of the model that a mark belongs to."""
    model = mark.removesuffix(f"{ATTRIBUTE}.{MARK}")
    return any(name.startswith(model) and name != mark for name in names)


def _entries(state_dict: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Returns the entries by the names under which torch saves them."""
    for name, value in state_dict.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
