"""Comparing the outputs of a stock model with those of the scheme that its declaration names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.short_runs import run_briefly
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy
    from hf_posenc.patching.anatomy.layout import TemporaryChanges

_TOKENS = 8
#: Maximum difference of outputs, relative to their size: another order of summation, or an extra rounding per layer.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2


def verify_native(anatomy: Anatomy, config: SchemeConfig, stacks: list[Stack], changes: TemporaryChanges) -> None:
    """Runs a stock model on a few tokens, with its native mechanism and with the scheme in its place.

    Models on the meta device are not checked.

    Args:
        anatomy: the anatomy of the stock model.
        config: the scheme that is declared to be equivalent to the native mechanism.
        stacks: the stacks of the model.
        changes: places the scheme for a run.

    Raises:
        UnsupportedError: if the outputs differ, or the scheme cannot be placed.
    """
    difference = _difference(anatomy, config, stacks, changes)
    if difference is not None:
        raise UnsupportedError(
            f"The position mechanism of this {type(anatomy.model).__name__} does not match the declaration of its "
            f"architecture: with {config} in its place the outputs for {_TOKENS} tokens differ by {difference:.2g} of "
            "their size. A table or a setting of the mechanism is unusual. Any scheme can replace it, and "
            "unpatch_model restores it."
        )


def verify_adopted_tables(anatomy: Anatomy, stacks: list[Stack], changes: TemporaryChanges) -> None:
    """Makes the same comparison before any scheme is placed in a model whose native bias tables a scheme can adopt.

    With the native tables, the declared scheme must reproduce the stock outputs, whatever values the tables hold. If
    it does not, this version of transformers uses the tables differently, or discovery has failed, and adopted tables
    would have another meaning. Models without such tables are not run.

    Raises:
        UnsupportedError: if the outputs differ.
    """
    model = anatomy.model
    declared = [
        stack
        for stack in stacks
        if any(stack.architecture.native_bias_table(stack, one) is not None for one in stack.attentions)
    ]
    native = {stack.architecture.native(stack) for stack in declared if stack.architecture.native is not None}
    for config in native - {None}:
        assert config is not None
        difference = _difference(anatomy, config, stacks, changes)
        if difference is not None:
            raise UnsupportedError(
                f"This {type(model).__name__} does not compute the same as {config} with its bias tables: the outputs "
                f"for {_TOKENS} tokens differ by {difference:.2g} of their size. hf_posenc does not support this "
                f"architecture ({model.config.model_type}) as implemented in transformers {transformers.__version__}, "
                "so no scheme can be placed in it. Try a version of transformers that hf_posenc was tested with."
            )


def _difference(anatomy: Anatomy, config: SchemeConfig, stacks: list[Stack], changes: TemporaryChanges) -> float | None:
    """The difference of the outputs relative to their size; `None` if it is within the tolerance."""
    if not anatomy.is_runnable:
        return None
    stock = _outputs(anatomy, stacks)
    # Building a part draws its initial weights. The caller's random generator must keep its state.
    with torch.random.fork_rng(devices=[]), changes.with_scheme(config, stacks):
        replaced = _outputs(anatomy, stacks)
    difference = float((replaced - stock).abs().max() / stock.abs().max().clamp(min=1.0))
    return None if difference <= _TOLERANCE.get(anatomy.model.dtype, _HALF_TOLERANCE) else difference


def _outputs(anatomy: Anatomy, stacks: list[Stack]) -> Tensor:
    found = []
    for result in run_briefly(anatomy, stacks, _TOKENS):
        logits = result.get("logits") if hasattr(result, "get") else None
        output: Any = result if logits is None else logits
        while not isinstance(output, Tensor):  # Some models nest it in tuples.
            output = output[0]
        found.append(output.float().flatten())
    return torch.cat(found)
