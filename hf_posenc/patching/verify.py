"""Comparing a model's own mechanism, as a declaration describes it, with what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.apply import build_encoding
from hf_posenc.patching.exchange import temporarily
from hf_posenc.patching.observe import run_briefly
from hf_posenc.patching.sites import Stack
from hf_posenc.schemes.config import SchemeConfig

_TOKENS = 8
#: Largest difference of outputs, relative to their size: sums in another order, or one rounding more in each layer.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2


def verify_native(model: PreTrainedModel, config: SchemeConfig, stacks: list[Stack]) -> None:
    """Runs a stock model on a few tokens, with its own mechanism and with the scheme in its place.

    Nothing is compared on the meta device.

    Args:
        model: the stock model.
        config: the scheme that its own mechanism is said to be.
        stacks: its stacks.

    Raises:
        UnsupportedError: if the outputs differ, or the scheme cannot be placed.
    """
    hooked = any("_hf_hook" in module.__dict__ for module in model.modules())
    if not hooked and any(parameter.device.type == "meta" for parameter in model.parameters()):
        return
    stock = _outputs(model)
    # The weights of a part are drawn before it adopts the model's own; the caller's generator must not notice.
    with torch.random.fork_rng(devices=[]):
        encoding = build_encoding(config, model, stacks)
        with temporarily(model, encoding):
            replaced = _outputs(model)
    difference = float((replaced - stock).abs().max() / stock.abs().max().clamp(min=1.0))
    if not difference <= _TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
        raise UnsupportedError(
            f"The position mechanism of this {type(model).__name__} is not what its architecture declares: with "
            f"{config} in its place the outputs for {_TOKENS} tokens differ by {difference:.2g} of their size. A "
            "table or a setting of its mechanism is not the usual one. It can be replaced, and unpatch_model "
            "brings it back."
        )


def _outputs(model: PreTrainedModel) -> Tensor:
    result: Any = run_briefly(model, _TOKENS)
    logits = result.get("logits")
    found: Tensor = (result[0] if logits is None else logits).float()
    return found
