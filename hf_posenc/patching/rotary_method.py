"""Rotary modules and methods as a patched stack sees them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_posenc.patching.runtime import StackRuntime
from hf_posenc.patching.scores_attention import ScoresAttention


class RotaryModuleSite:
    """Stands in for the `forward` of a rotary module: notes the positions it is asked for.

    Its phases are computed as before; layers whose rotation is replaced or skipped do not look at them.
    """

    def __init__(self, module: nn.Module, runtime: StackRuntime) -> None:
        self.module = module
        self.runtime = runtime

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Same as the module's own forward."""
        position_ids = args[0] if args else kwargs.get("position_ids")
        if self.runtime.state is not None and isinstance(position_ids, Tensor):
            self.runtime.state.rotary_position_ids = position_ids
        return type(self.module).forward(self.module, x, *args, **kwargs)


class RotaryMethodSite:
    """Stands in for an attention method `(phases, query, key)` that rotates both."""

    def __init__(self, site: ScoresAttention) -> None:
        self.site = site

    def __call__(self, phases: Any, query: Tensor, key: Tensor) -> Any:
        """`query` and `key` are `(batch, heads, query_len, head_dim)`."""
        return self.site.rotate_pair(query, key)
