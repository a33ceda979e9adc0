"""Fits all parts of a new encoding in a model to the old encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.recipes.initialization.logits import LayerHeads, layers_of, recorded_heads
from hf_posenc.recipes.initialization.parts import (
    BiasTarget,
    Fit,
    bias_target,
    fit_additive,
    fit_bias,
    fit_scale,
    is_fittable_bias,
    is_trained,
)
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.arrangement.blended import BlendedPart
from hf_posenc.schemes.parts import AdditiveEncoding, LogitBias, LogitScale, QueryKeyMap, SchemeParts

#: Number of positions to fit a formula at, if neither a table nor a sample determines it.
_POSITIONS = 512
#: Minimum length of a sample. A shorter sample has too few distances to average over.
SHORTEST_SAMPLE = 16


def fit_encoding(
    model: PreTrainedModel,
    old: PositionEncoding,
    new: PositionEncoding,
    sample: Tensor | None,
    table_extension: str | None,
) -> list[Fit]:
    """Fits all parts that can be fitted.

    Args:
        model: patched with `new`.
        old: the previous encoding, already removed.
        new: the encoding to fit, or a blend, of which the new parts are fitted.
        sample: `(batch, length)` token ids without padding; needed to fit a bias.
        table_extension: see `extended_rows`.

    Raises:
        ValueError: if a bias is to be fitted and the sample is missing or invalid.
    """
    fits: list[Fit] = []
    for name, stack in new.stacks.items():
        before = old.stacks[name]
        assert isinstance(stack, StackEncoding)
        assert isinstance(before, StackEncoding)
        additive = _new(stack.additive)
        if isinstance(additive, AdditiveEncoding) and is_trained(additive):
            length = _positions_of(before.additive)
            fits.append(fit_additive(additive, before.additive, length, table_extension, f"additive of {name}"))
    length = _POSITIONS if sample is None else sample.shape[-1]
    for scale, layers in _shared(new, "logit_scale").values():
        if isinstance(scale, LogitScale) and is_trained(scale):
            old_scale = layers_of(old)[layers[0]].logit_scale
            fits.append(fit_scale(scale, old_scale, length, f"logit_scale of {_layers(layers)}"))
    biases = {key: found for key, found in _shared(new, "logit_bias").items() if _fittable(found[0])}
    if biases and (_adds(old) or any(_acts(layer) for layer in layers_of(old))):
        targets = _bias_targets(model, old, new, _checked(sample))
        for bias, layers in biases.values():
            assert isinstance(bias, LogitBias)
            fits.append(fit_bias(bias, [targets[layer] for layer in layers], f"logit_bias of {_layers(layers)}"))
    return fits


def _new(part: nn.Module | None) -> nn.Module | None:
    return part.new if isinstance(part, BlendedPart) else part


def _fittable(part: nn.Module | None) -> bool:
    return isinstance(part, LogitBias) and is_fittable_bias(part)


def _acts(layer: LayerEncoding) -> bool:
    return any(part is not None for part in (layer.query_key_map, layer.logit_bias, layer.logit_scale))


def _adds(encoding: PositionEncoding) -> bool:
    return any(stack.additive is not None for stack in encoding.stacks.values())


def _positions_of(additive: AdditiveEncoding | None) -> int:
    """Returns the number of positions that an encoding has vectors for."""
    tables = [] if additive is None else [part for part in additive.modules() if isinstance(part, LearnedEncoding)]
    # A formula has vectors for all positions; with several tables the shortest counts.
    return min((table.num_positions for table in tables), default=2**31)


def _shared(encoding: PositionEncoding, name: str) -> dict[int, tuple[nn.Module | None, list[int]]]:
    """Returns the new parts of a kind, each with the layers that share it."""
    found: dict[int, tuple[nn.Module | None, list[int]]] = {}
    for index, layer in enumerate(layers_of(encoding)):
        part = _new(getattr(layer, name))
        if part is not None:
            found.setdefault(id(part), (part, []))[1].append(index)
    return found


def _layers(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


def _checked(sample: Tensor | None) -> Tensor:
    if sample is None:
        raise ValueError(
            "A learned bias is fitted to the logits of the old scheme on a sample of text: pass "
            "sample=tokenizer(text, return_tensors='pt').input_ids, without padding and long enough for the "
            "distances that matter, or use initialization='default'."
        )
    if sample.dim() != 2 or sample.is_floating_point() or sample.shape[-1] < SHORTEST_SAMPLE:
        raise ValueError(
            f"sample has the shape {tuple(sample.shape)} and dtype {sample.dtype}; expected token ids of shape (batch, "
            f"length) with a length of at least {SHORTEST_SAMPLE}."
        )
    return sample


def _bias_targets(
    model: PreTrainedModel, old: PositionEncoding, new: PositionEncoding, sample: Tensor
) -> list[BiasTarget]:
    """Computes the target of every layer's bias. Afterwards the model is patched with `new`."""
    sample = sample.to(next(model.parameters()).device)
    with Transaction(model).installed(old):
        before = recorded_heads(model, old, sample)
    after = _heads_without_bias(model, new, sample) if _adds(old) else before
    return [
        bias_target(index, layer.causal, _parts(layer, blended=False), heads, _parts(own, blended=True), unbiased)
        for index, (layer, heads, own, unbiased) in enumerate(
            zip(layers_of(old), before, layers_of(new), after, strict=True)
        )
    ]


def _heads_without_bias(model: PreTrainedModel, new: PositionEncoding, sample: Tensor) -> list[LayerHeads]:
    """Records the heads of layers under the new scheme, without its biases."""
    blends = [part for stack in new.stacks.values() for part in _blends(stack)]
    strengths = [part.strength for part in blends]
    layers = layers_of(new)
    biases = [layer.logit_bias for layer in layers]
    try:
        for part in blends:
            part.strength = 1.0
        for layer in layers:
            layer.logit_bias = None
        return recorded_heads(model, new, sample)
    finally:
        for part, strength in zip(blends, strengths, strict=True):
            part.strength = strength
        for layer, bias in zip(layers, biases, strict=True):
            layer.logit_bias = bias


def _blends(stack: nn.Module) -> list[BlendedPart[Any]]:
    assert isinstance(stack, StackEncoding)
    places: list[nn.Module | None] = [stack.additive]
    for layer in stack.layers:
        places += [layer.query_key_map, layer.logit_scale]
    return [part for part in places if isinstance(part, BlendedPart)]


def _parts(layer: LayerEncoding, *, blended: bool) -> SchemeParts:
    places = (layer.query_key_map, layer.logit_bias, layer.logit_scale)
    rotation, bias, scale = (_new(part) for part in places) if blended else places
    assert rotation is None or isinstance(rotation, QueryKeyMap)
    assert bias is None or isinstance(bias, LogitBias)
    assert scale is None or isinstance(scale, LogitScale)
    return SchemeParts(query_key_map=rotation, logit_bias=bias, logit_scale=scale)
