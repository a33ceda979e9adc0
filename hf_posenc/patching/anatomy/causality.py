"""Determining by a run whether a stack is causal, if its config and its modules disagree."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.short_runs import attended_twice, seen_briefly
from hf_posenc.patching.anatomy.sites import Stack

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy

_TOKENS = 3
#: Maximum change of the first token, relative to the change of the last one, at which a stack still counts as causal.
#: It is not 0, because 8-bit quantisation shares a scale between tokens.
_MAX_RELATIVE_CHANGE = 1e-2


def refuse_misread_causality(anatomy: Anatomy, stacks: list[Stack]) -> None:
    """Checks by a run whether discovery was right about causality, for stacks where the evidence is contradictory.

    The model is run on three tokens, and its first attention layer again with another last token. In a causal stack,
    the output for the first token does not change. Only stacks whose attention modules have an `is_causal` that
    differs from the result of discovery are checked, and only if their architecture is not declared. Other models are
    not run. Models on the meta device are not checked.

    Raises:
        UnsupportedError: if a stack that was classified as causal is bidirectional, or the other way round.
    """
    doubtful = [stack for stack in stacks if stack.architecture.causal is None and _disagrees_with_discovery(stack)]
    if not doubtful or not anatomy.is_runnable:
        return
    first_last = functools.partial(attended_twice, chosen=lambda tokens: [*range(tokens - 1), 0])
    seen = seen_briefly(anatomy, doubtful, _TOKENS, first_last)
    for stack, results in zip(doubtful, seen, strict=True):
        observed, first = _observed(results), stack.attentions[0]
        if observed is not None and observed != first.causal:
            words = {True: "causal", False: "bidirectional"}
            raise UnsupportedError(
                f"{type(stack.module).__name__} was classified as {words[first.causal]}, but a run on {_TOKENS} tokens "
                f"shows that it is {words[observed]}: {first.path}.is_causal is {first.module.is_causal}, which "
                "contradicts the rest of the model. Some versions of transformers omit the mask of such a decoder "
                "(UMT5 with sdpa before 5.18). Load the model with attn_implementation='eager', or use another version "
                "or declare it: "
                f"hf_posenc.register_architecture({stack.config.model_type!r}, "
                f"architecture=hf_posenc.Architecture(causal={observed}))."
            )


def _disagrees_with_discovery(stack: Stack) -> bool:
    first = stack.attentions[0]
    own = getattr(first.module, "is_causal", None)
    return isinstance(own, bool) and own != first.causal


def _observed(results: list[tuple[Tensor, Tensor]]) -> bool | None:
    """Whether the stack is causal; `None` if the first call has not changed its last token."""
    for other, own in results[:1]:
        change = (other - own).float().abs()
        if float(change[:, -1].max()) > 0:
            return float(change[:, 0].max()) <= _MAX_RELATIVE_CHANGE * float(change[:, -1].max())
    return None
