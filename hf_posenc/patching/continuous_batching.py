"""Continuous batching of a patched model: refuses at the call what would otherwise fail in its worker thread.

Transformers runs `generate_batch` in a thread that logs its errors and returns empty results. All ways in go through
`init_continuous_batching`, which runs in the caller's thread.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.checked_method import CheckedMethod
from hf_posenc.patching.encoding import PositionEncoding, StackEncoding, is_length_dependent
from hf_posenc.patching.scores_attention import ScoresAttention


class CheckedContinuousBatching(CheckedMethod):
    """Stands in for `init_continuous_batching`."""

    method = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Starts continuous batching.

        Raises:
            UnsupportedError: for a scheme that pages of keys cannot serve.
        """
        if self.in_force:
            refuse_pages(self.encoding, self.model)
        return self.__wrapped__(*args, **kwargs)


def refuse_pages(encoding: PositionEncoding, model: nn.Module) -> None:
    """Refuses a scheme that needs more than the position of each new token.

    Raises:
        UnsupportedError: with the reason.
    """
    reason = _outside_interface(encoding) or _of_layers(encoding) or _of_lengths(encoding)
    if reason:
        raise UnsupportedError(
            f"Continuous batching cannot run the scheme {encoding.config.name!r} in this {type(model).__name__}: "
            f"{reason}. Use model.generate() with a batch that is padded on the left."
        )


def _outside_interface(encoding: PositionEncoding) -> str:
    for site in encoding.journal.forwards():
        if isinstance(site, ScoresAttention):
            return (
                f"{type(site.module).__name__} computes its scores itself, without the attention interface through "
                "which pages of keys are read"
            )
    return ""


def _of_layers(encoding: PositionEncoding) -> str:
    stacks = [stack for stack in encoding.stacks.values() if isinstance(stack, StackEncoding)]
    for layer in [layer for stack in stacks for layer in stack.layers]:
        if layer.logit_bias is not None:
            return (
                f"its {type(layer.logit_bias).__name__} adds a bias to the logit of every key, and keys lie in pages "
                "that the attention function alone reads, so the bias could not be placed"
            )
        if layer.query_key_map is not None and layer.query_key_map.width_factor != 1:
            return (
                f"its {type(layer.query_key_map).__name__} makes heads {layer.query_key_map.width_factor} times as "
                "wide, and pages are as wide as the model's own heads"
            )
    return ""


def _of_lengths(encoding: PositionEncoding) -> str:
    if not is_length_dependent(encoding):
        return ""
    return (
        "it encodes a token by the length of its sequence, or by tokens that a cache does not keep, and keys in pages "
        "are never computed again"
    )
