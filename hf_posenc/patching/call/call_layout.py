"""What a call has to find out about the tokens of a stack, which depends on their kind."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from hf_posenc.patching.call.forward_state import ForwardState


class CallLayout:
    """The answers for tokens on one axis, one for each id or embedding that the caller passes."""

    #: Whether its tokens have places on several axes, whatever the positions of a call are.
    has_axes: ClassVar[bool] = False

    def state_of_call(self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardState:
        """The places of tokens on several axes, as far as the arguments of a call show them."""
        raise NotImplementedError

    def features_among(self, arguments: dict[str, Any]) -> Tensor | None:
        """The features in place of tokens, whose shape does not show the number of tokens; `None` without any."""
        return None

    def tokens_of(self, features: Tensor) -> int:
        """The number of tokens that a stack with a fixed input makes of features; 0 if it is unknown."""
        return 0
