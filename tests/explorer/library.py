"""What the page computes, recomputed in torch with the parts of the library."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from docs.explorer.recorded import layer as attention_layer, positions
from hf_posenc.metrics.statistics import relative_l2
from hf_posenc.schemes import BuildContext, SchemeParts
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.bias.fire import FireBias
from hf_posenc.schemes.bias.kerple import KerpleBias
from hf_posenc.schemes.bias.t5 import T5Bias
from hf_posenc.schemes.bias.tisa import TisaBias
from hf_posenc.schemes.registry import scheme_from_dict
from tests.explorer.conftest import DOCS

__all__ = ["attention_layer", "build", "data", "dog_distance", "positions"]

HIDDEN_SIZE = HEAD_DIM = 64
DATA = DOCS / "explorer" / "data"


def data(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def build(config: dict[str, Any], heads: int, causal: bool, weights: str | None) -> SchemeParts:
    """The parts of a config as the page describes it, with the weights that the page uses.

    Args:
        config: with names instead of nested configs.
        weights: "initial", "trained" or "minilm"; `None` for the start value of a nested scheme.
    """
    context = BuildContext(HIDDEN_SIZE, heads, HEAD_DIM, causal=causal, max_positions=64)
    parts = scheme_from_dict(config).build(context)
    for part in parts:
        part.eval().requires_grad_(False)
        for module in part.modules():
            _set_weights(module, weights, "causal" if causal else "masked", context)
    return parts


def dog_distance(outputs: Tensor, first: int, second: int) -> float:
    return relative_l2(outputs[first], outputs[second])


def _set_weights(module: nn.Module, weights: str | None, task: str, context: BuildContext) -> None:
    """Copies the numbers of the page into one part. They were drawn or trained for more heads and rows."""
    tables, heads = data("tables"), context.num_heads
    trained = data("trained")["schemes"]
    own = weights in (None, "trained")
    if isinstance(module, T5Bias):
        table = torch.tensor(trained["t5"][task]["weight"] if own else tables["t5"])
        module.weight.copy_(table[: module.num_buckets, :heads] * (1.0 if own else module.initializer_range))
    elif isinstance(module, KerpleBias):
        numbers = trained["kerple"][task] if own else tables["kerple"]
        largest = (1.0, 1.0) if own else (2.0, 1.0) if module.variant == "log" else (1.0, 2.0)
        module.r1.copy_(torch.tensor(numbers["r1"][:heads]) * largest[0])
        if module.r2 is not None:
            module.r2.copy_(torch.tensor(numbers["r2"][:heads]) * largest[1])
    elif isinstance(module, TisaBias):
        for name, values in (trained["tisa"][task] if own else tables["tisa"]).items():
            parameter = module.get_parameter(name)
            parameter.copy_(torch.tensor(values)[:heads, : parameter.shape[1]])
    elif isinstance(module, FireBias):
        for name, values in (trained["fire"][task] if own else tables["fire"]).items():
            rows = torch.tensor(values)
            module.get_parameter(name).copy_(rows[:heads] if name.startswith("output") else rows)
    elif isinstance(module, LearnedEncoding):
        found = {"initial": "initial", "minilm": "minilm", None: "minilm"}.get(weights)
        rows = torch.tensor(tables["learned"][found] if found else trained["learned"][task]["weight"])
        module.weight.copy_(rows[: module.num_positions] * (0.02 if found == "initial" else 1.0))
