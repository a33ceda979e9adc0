"""The arguments of a call of any tiny model, from the signature of its forward and from its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import input_exceptions, input_pictures, input_series, input_sounds, input_tokens
from .input_context import Context, NotYet
from .population import Pair

Rule = Callable[[Context], Any]

#: What an argument of this name gets; `None` leaves it out. Later rules see what earlier ones gave.
RULES: dict[str, Rule] = input_pictures.RULES | input_sounds.RULES | input_series.RULES | input_tokens.RULES


def inputs_for(model: PreTrainedModel, pair: Pair, *, seed: int = 7, size: int = 0) -> dict[str, Any]:
    """Arguments for one call with two samples.

    Args:
        size: 0 for the size that the config names, 1 for another resolution or duration.
    """
    context = Context(running(model), pair, torch.Generator().manual_seed(seed), size)
    own = input_exceptions.RULES.get(pair.model_type, {})
    rules = {name: rule for name, rule in RULES.items() if name in context.parameters} | own
    # The number of placeholders follows from all other inputs.
    first = {name: rule for name, rule in rules.items() if name not in input_tokens.RULES}
    waiting = _follow_all(context, first)
    waiting = _follow_all(context, {name: rules[name] for name in input_tokens.RULES if name in rules} | waiting)
    if waiting:
        raise KeyError(f"{', '.join(waiting)} need arguments that nothing gives.")
    return {name: value for name, value in context.given.items() if value is not None}


def _follow_all(context: Context, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Follows rules in the order of what they need; returns those that need something else."""
    pending = rules
    while True:
        waiting = {name: rule for name, rule in pending.items() if not _followed(context, name, rule)}
        if len(waiting) == len(pending):
            return waiting
        pending = waiting


def _followed(context: Context, name: str, rule: Rule) -> bool:
    """Whether a rule could be followed; a rule that reads a missing argument has to wait."""
    try:
        value = rule(context)
    except NotYet:
        return False
    if value is not None:
        context.given[name] = value
    return True


def running(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or the first one inside it that has a forward: some models only generate, through others."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((one for one in models if type(one).forward is not nn.Module.forward), model)


def call(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    """One forward with arguments from `inputs_for`; the caller's tensors stay as they are."""
    return running(model)(
        **{name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    )


def tensors_of(output: Any) -> list[Tensor]:
    """Every floating tensor in an output, in a fixed order, without caches."""
    found: list[Tensor] = []
    pending = [output]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Tensor):
            found += [value] if value.is_floating_point() else []
        elif isinstance(value, dict) or hasattr(value, "to_tuple"):
            items = value.items() if isinstance(value, dict) else vars(value).items()
            pending += [one for name, one in items if "past_key_values" not in name and "cache" not in name]
        elif isinstance(value, list | tuple):
            pending += list(value)
    return found


def accepted(function: Any) -> set[str]:
    """Names of the parameters of a function."""
    return set(inspect.signature(function).parameters)
