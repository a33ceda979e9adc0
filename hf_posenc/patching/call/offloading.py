"""Parts whose weights accelerate keeps elsewhere (CPU or disk offload)."""

from __future__ import annotations

from types import TracebackType

from torch import nn


class weights_at_hand:
    """Brings the weights of a part to where it computes, as accelerate's hooks do around a module's `forward`.

    The engine calls other methods of a part too, around which those hooks do not fire.

    Args:
        part: the part that is about to compute.
    """

    def __init__(self, part: nn.Module) -> None:
        # Most parts have no parts of their own, and walking over modules is slow in every layer of a decoding step.
        modules = part.modules() if part._modules else (part,)
        self.hooked = [module for module in modules if "_hf_hook" in module.__dict__]

    def __enter__(self) -> None:
        for module in self.hooked:
            module.__dict__["_hf_hook"].pre_forward(module)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self.hooked:
            module.__dict__["_hf_hook"].post_forward(module, None)
