"""Parts whose weights accelerate keeps elsewhere (CPU or disk offload)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def weights_at_hand(part: nn.Module) -> Iterator[None]:
    """Brings the weights of a part to where it computes, as accelerate's hooks do around a module's `forward`.

    The engine calls other methods of a part too, around which those hooks do not fire.
    """
    hooked = [module for module in part.modules() if "_hf_hook" in module.__dict__]
    for module in hooked:
        module.__dict__["_hf_hook"].pre_forward(module)
    try:
        yield
    finally:
        for module in hooked:
            module.__dict__["_hf_hook"].post_forward(module, None)
