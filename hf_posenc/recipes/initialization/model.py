"""Fits all parts of a new encoding in a model to the old encoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.place.encoding import LayerEncoding, PositionEncoding, stacks_in_part
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.recipes.gradual import places_of_parts
from hf_posenc.recipes.initialization.logits import layers_of, mean_logits, readers_of, recorded_heads
from hf_posenc.recipes.initialization.parts import (
    Fit,
    fit_additive,
    fit_bias,
    fit_scale,
    is_fittable_bias,
    is_trained,
)
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.outer_parts import is_blend
from hf_posenc.schemes.parts import AdditiveEncoding, SchemeParts
from hf_posenc.schemes.positions import AttentionPairs

#: Number of positions to fit a formula at, if neither a table nor a sample determines it.
_POSITIONS = 512
#: Minimum length of a sample. A shorter sample has too few distances to average over.
SHORTEST_SAMPLE = 16


def fit_encoding(
    transaction: Transaction,
    old: PositionEncoding,
    new: PositionEncoding,
    sample: Tensor | None,
    table_extension: str | None,
    part: str,
) -> list[Fit]:
    """Fits everything that can be fitted in one part of a model.

    Args:
        transaction: of a model that is patched with `new`.
        old: the previous encoding, already removed.
        new: the encoding to fit, or a blend, of which the new parts are fitted.
        sample: `(batch, length)` token ids without padding; needed to fit a bias.
        table_extension: see `extended_rows`.
        part: the part of the model whose scheme differs between them.

    Raises:
        ValueError: if a bias is to be fitted and the sample is missing or invalid, or for a sample of a part that does
            not read token ids.
    """
    fits: list[Fit] = []
    anatomy = transaction.anatomy
    readers = readers_of(anatomy, part)
    if sample is not None and not readers:
        raise ValueError(
            f"The {part} part of {type(anatomy.model).__name__} does not read token ids, so `sample` cannot be run "
            "there, and biases are not fitted. Leave `sample` out: they start as in patch_model."
        )
    if sample is not None:
        sample = checked_tokens(sample, "sample", anatomy.model, SHORTEST_SAMPLE)
    stacks, old_stacks = stacks_in_part(new, part), stacks_in_part(old, part)
    for name, stack in stacks.items():
        additive, previous = _new(stack.additive), old_stacks[name].additive
        modules = [module for encoding in (additive, previous) if encoding is not None for module in encoding.modules()]
        # Vectors on a grid belong to places, which a range of positions does not contain.
        if is_trained(additive) and not any(getattr(module, "reads_coordinates", False) for module in modules):
            where = f"additive of {name}"
            fits.append(fit_additive(additive, previous, _positions_of(previous), table_extension, where))
    old_layers, new_layers = layers_of(old, part), layers_of(new, part)
    length = _POSITIONS if sample is None else sample.shape[-1]
    for scale, layers in _shared(new_layers, "logit_scale"):
        if is_trained(scale):
            old_scale = old_layers[layers[0]].logit_scale
            fits.append(fit_scale(scale, old_scale, length, f"logit_scale of {_layers(layers)}"))
    biases = [(bias, layers) for bias, layers in _shared(new_layers, "logit_bias") if is_fittable_bias(bias)]
    if biases and readers and any(place is not None for place in places_of_parts(old_stacks)):
        if sample is None:
            raise ValueError(
                "A learned bias is fitted to the logits of the old scheme on a sample of text: pass "
                "sample=tokenizer(text, return_tensors='pt').input_ids, without padding and long enough for the "
                "distances that matter, or use initialization='default'."
            )
        sample = sample.to(next(anatomy.model.parameters()).device)
        targets = _bias_targets(transaction, old, new, sample, part)
        for bias, layers in biases:
            where = f"logit_bias of {_layers(layers)}"
            fits.append(fit_bias(bias, [targets[layer] for layer in layers], sample.shape[-1], where))
    return fits


def _new(part: Any) -> Any:
    """The part itself, or the new one of a blend."""
    return part.new if is_blend(part) else part


def _positions_of(additive: AdditiveEncoding | None) -> int:
    """Returns the number of positions that an encoding has vectors for."""
    tables = [] if additive is None else [part for part in additive.modules() if isinstance(part, LearnedEncoding)]
    # A formula has vectors for all positions; with several tables the shortest counts.
    return min((table.num_positions for table in tables), default=2**31)


def _shared(layers: list[LayerEncoding], name: str) -> list[tuple[Any, list[int]]]:
    """Returns the new parts of a kind, each with the layers that share it."""
    by_part: dict[int, tuple[Any, list[int]]] = {}
    for index, layer in enumerate(layers):
        part = _new(getattr(layer, name))
        if part is not None:
            by_part.setdefault(id(part), (part, []))[1].append(index)
    return list(by_part.values())


def _layers(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def checked_tokens(ids: Any, name: str, model: Any, shortest: int) -> Tensor:
    """Returns token ids, `(batch, length)`, that a model can read. Raises `ValueError` for anything else."""
    problem = f"a {type(ids).__name__}"
    if isinstance(ids, Tensor):
        problem = f"a tensor of the shape {tuple(ids.shape)} and dtype {ids.dtype}"
        if ids.dim() == 2 and len(ids) and ids.shape[1] >= shortest and not ids.is_floating_point():
            vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", math.inf)
            lowest, highest = (int(end) for end in torch.aminmax(ids))
            if lowest >= 0 and highest < vocabulary:
                return ids
            problem = f"token ids from {lowest} to {highest}, and this {type(model).__name__} has {vocabulary}"
    raise ValueError(
        f"{name} is {problem}; expected a tensor (batch, length) of token ids of this model's own tokenizer, with a "
        f"length of at least {shortest}."
    )


def _bias_targets(
    transaction: Transaction, old: PositionEncoding, new: PositionEncoding, sample: Tensor, part: str
) -> list[Tensor]:
    """Computes the target of every layer's bias: the mean logits by distance of the old scheme minus those of the new
    scheme without its bias. Afterwards the model is patched with `new`.
    """
    anatomy = transaction.anatomy
    with transaction.installed(old):
        before = recorded_heads(anatomy, old, sample, part)
    adds = any(stack.additive is not None for stack in stacks_in_part(old, part).values())
    after = _heads_without_bias(anatomy, new, sample, part) if adds else before
    return [
        mean_logits(SchemeParts(None, layer.query_key_map, layer.logit_bias, layer.logit_scale), heads, layer.causal)
        - mean_logits(SchemeParts(None, _new(fresh.query_key_map), None, _new(fresh.logit_scale)), bare, layer.causal)
        for layer, heads, fresh, bare in zip(layers_of(old, part), before, layers_of(new, part), after, strict=True)
    ]


def _heads_without_bias(anatomy: Anatomy, new: PositionEncoding, sample: Tensor, part: str) -> list[AttentionPairs]:
    """Records the heads of layers under the new scheme, without its biases."""
    blends = [place for place in places_of_parts(stacks_in_part(new, part)) if is_blend(place)]
    strengths = [blend.strength for blend in blends]
    try:
        for blend in blends:
            blend.strength = 1.0
        return recorded_heads(anatomy, new, sample, part, biases=False)
    finally:
        for blend, strength in zip(blends, strengths, strict=True):
            blend.strength = strength
