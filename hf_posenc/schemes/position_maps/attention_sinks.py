"""A window, and the first tokens of the text at its far end (attention sinks)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.position_maps.pairwise import FarPositionsConfig, last_before
from hf_posenc.schemes.scheme import option, register_scheme


@register_scheme
class AttentionSinksConfig(FarPositionsConfig):
    """A window and the first tokens of the text, as in the rolling cache of StreamingLLM (arXiv:2309.17453, fig. 4).

    For query `i` and key `j <= i`, the scheme uses the distance::

        i - j                           if i - j < window
        min(i, sinks + window - 1) - j  otherwise, if j < sinks: they stay where they are once the cache is full
        (hidden)                        otherwise

    A model that was trained without such a window can then continue to read at its trained distances, because a trained
    model puts much of its attention on the first tokens. It does not remember tokens that have left the window, and
    needs no training. `hf_posenc.SinkCache` has the same memory at any length; with another cache or without one, the
    results are the same. The official code counts a window without the query's own token (`recent_size = window - 1`),
    and in a call of several tokens, its sinks are nearer than here. As an extension of the paper, distance biases other
    than `alibi` are supported too, and models without positions. `sinks=0` is a sliding window.

    Args:
        inner: a rotation proportional to positions (`rope` with any scaling, `p_rope`), a distance bias, or both; or
            `none`.
        sinks: number of first tokens that every token sees, 4 in the paper.
        window: number of last tokens that a token sees, itself included: 1020 in the paper.
    """

    name: ClassVar[str] = "attention_sinks"
    hides = True

    sinks: int = option(4, minimum=0)
    window: int = option(1020, minimum=1)

    @property
    def first_query(self) -> int:
        """The first query that no longer sees all tokens before it."""
        return self.sinks + self.window

    def query(self, ids: Tensor) -> Tensor:
        """Returns the place in the cache, which is the last one as soon as the cache is full."""
        return ids.clamp(max=self.first_query - 1)

    def key(self, ids: Tensor) -> Tensor:
        """Returns the positions themselves."""
        return ids

    def last_key(self, ids: Tensor) -> Tensor:
        """Returns the last sink, or the last key before the window."""
        before_window = ids - self.window
        if not ids.is_floating_point():
            return before_window.clamp(max=self.sinks - 1)
        return before_window.minimum(last_before(torch.full_like(ids, self.sinks)))

    def last_hidden(self, ids: Tensor) -> Tensor:
        """Returns the last key before the window."""
        return ids - self.window
