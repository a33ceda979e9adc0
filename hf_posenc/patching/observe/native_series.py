"""The native scheme of modules that add positions to the embeddings of a series."""

from __future__ import annotations

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.series.found import VectorModule
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.observe.fixed_tables import sinusoids_like
from hf_posenc.schemes import LearnedConfig
from hf_posenc.schemes.config import SchemeConfig

#: Number of positions at which sinusoids are compared with their formula.
_COMPARED = 512


def series_schemes(stack: Stack) -> list[SchemeConfig]:
    """The schemes that have the same vectors as the architecture.

    Raises:
        UnsupportedError: for a convolution, or for sinusoids that follow no known formula.
    """
    assert stack.series is not None
    found = [_of_vectors(one, stack) for one in stack.series.vectors]
    return [*found, *(LearnedConfig(num_positions=table.weight.shape[0]) for table in stack.series.parameters)]


def _of_vectors(found: VectorModule, stack: Stack) -> SchemeConfig:
    owner = f"{found.path} ({type(found.module).__name__}) of this {type(stack.module).__name__}"
    if found.kind == "convolution":
        raise UnsupportedError(
            f"{owner} computes its positions with a convolution over neighbouring embeddings. They depend on the "
            "content of the sequence, so no scheme of this library describes them. Any scheme can replace them, and "
            "unpatch_model restores them."
        )
    with torch.no_grad():
        rows = found.module(seq_length=_COMPARED)[0].float()
    formula = sinusoids_like(rows)
    if formula is not None:
        return formula
    raise UnsupportedError(
        f"{owner} computes sinusoids that follow no formula of this library. Any scheme can replace them, and "
        "unpatch_model restores them."
    )
