"""The positions in a call of a stack that reads features."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.patching.call.forward_state import ForwardState

#: The number of tokens of a call in which only the modules of the stack know it.
UNKNOWN = -1


@dataclass
class SeriesState(ForwardState):
    """The positions of a call whose number of tokens follows from convolutions or patches inside the stack.

    Every module asks for the positions of as many tokens as it receives. They are counted from 0, or from the end of
    the cache. The mask of the call has a column per frame or sample. It shows which tokens are padding only if there
    are as many tokens as columns.

    Args:
        expected: the number of tokens that convolutions make of this input, in an encoder with a fixed input; 0 if
            unknown.
    """

    expected: int = 0

    def by_slots(self, length: int) -> ForwardState:
        """The state of a module with `length` tokens."""
        end = length if self.offset is None or not isinstance(self.offset, int) else self.offset + length
        mask, given = self.attention_mask, self.position_ids
        return ForwardState(
            length,
            offset=self.offset,
            position_ids=None if given is None or given.shape[-1] != length else given,
            attention_mask=None if mask is None or mask.shape[-1] != end else mask,
            cache_object=self.cache_object,
            cache_changed=self.cache_changed,
            memo=self.memo,
        )
