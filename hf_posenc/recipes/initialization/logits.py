"""Mean attention logits of a scheme by distance, on a sample of text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.schemes.logits import pairwise_bias, positional_logits
from hf_posenc.schemes.parts import LogitBias, PairwiseBias, QueryKeyMap, SchemeParts
from hf_posenc.schemes.positions import AttentionPairs, Positions


@dataclass(frozen=True)
class LayerHeads:
    """The queries and keys of one layer, before any map.

    Args:
        query: `(batch, heads, length, head_dim)`.
        key: `(batch, key_value_heads, length, head_dim)`.
        positions: positions of the tokens.
        scaling: the layer's factor of `query . key`.
        hidden_states: `(batch, length, hidden)`, the layer's input.
    """

    query: Tensor
    key: Tensor
    positions: Positions
    scaling: float
    hidden_states: Tensor | None


class _RecordingMap(QueryKeyMap):
    """A map that records its inputs."""

    #: The recorder needs full queries and keys, even if the architecture passes slices.
    whole_heads = True

    def __init__(self, inner: QueryKeyMap | None) -> None:
        super().__init__()
        self.inner = inner
        self.symmetric = inner is None or inner.symmetric
        self.width_factor = 1 if inner is None else inner.width_factor
        self.query: Tensor | None = None
        self.key: Tensor | None = None

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        return () if self.inner is None else self.inner.phases(positions)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        self.query = query
        return query if self.inner is None else self.inner.map_query(query, phases)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        self.key = key
        return key if self.inner is None else self.inner.map_key(key, phases)


class _RecordingBias(PairwiseBias):
    """A bias that records the layer's other inputs."""

    def __init__(self, inner: LogitBias | None) -> None:
        super().__init__()
        self.inner = inner
        self.num_features = inner.num_features if isinstance(inner, PairwiseBias) else 0
        self.pairs: AttentionPairs | None = None

    def key_features(self, hidden_states: Tensor) -> Tensor:
        assert isinstance(self.inner, PairwiseBias)
        return self.inner.key_features(hidden_states)

    def forward(self, pairs: AttentionPairs) -> Tensor:
        self.pairs = pairs
        if self.inner is None:
            return pairs.query.new_zeros(1, pairs.query.shape[1], 1, 1, dtype=torch.float32).expand(
                -1, -1, pairs.query.shape[-2], pairs.key.shape[-2]
            )
        return pairwise_bias(self.inner, pairs)


@contextmanager
def _recording(layers: list[LayerEncoding]) -> Iterator[list[tuple[_RecordingMap, _RecordingBias]]]:
    """Wraps the maps and biases of layers in recorders inside a `with` block."""
    before = [(layer.query_key_map, layer.logit_bias) for layer in layers]
    recorders = [(_RecordingMap(rotation), _RecordingBias(bias)) for rotation, bias in before]
    try:
        for layer, (map_recorder, bias_recorder) in zip(layers, recorders, strict=True):
            layer.query_key_map, layer.logit_bias = map_recorder, bias_recorder
        yield recorders
    finally:
        for layer, (rotation, bias) in zip(layers, before, strict=True):
            layer.query_key_map, layer.logit_bias = rotation, bias


@torch.no_grad()
def recorded_heads(model: PreTrainedModel, encoding: PositionEncoding, sample: Tensor) -> list[LayerHeads]:
    """Runs a patched model on a sample and returns the inputs of every layer's logits.

    Args:
        model: patched with `encoding`. Dropout is disabled during the run, and the mode is restored.
        encoding: the current encoding.
        sample: `(batch, length)` token ids without padding.
    """
    layers = layers_of(encoding)
    training = model.training
    model.eval()
    try:
        with _recording(layers) as recorders:
            inputs = {"input_ids": sample}
            if model.config.is_encoder_decoder:
                inputs["decoder_input_ids"] = sample
            if hasattr(model.config, "use_cache"):
                model(**inputs, use_cache=False)
            else:
                model(**inputs)
    finally:
        model.train(training)
    found = []
    for rotation, bias in recorders:
        pairs = bias.pairs
        assert rotation.query is not None
        assert rotation.key is not None
        assert pairs is not None
        found.append(
            LayerHeads(rotation.query.float(), rotation.key.float(), pairs.keys, pairs.scaling, pairs.hidden_states)
        )
    return found


def layers_of(encoding: PositionEncoding) -> list[LayerEncoding]:
    """Returns the layers of all stacks, in order."""
    found = []
    for stack in encoding.stacks.values():
        assert isinstance(stack, StackEncoding)
        found += stack.layers
    return found


@torch.no_grad()
def mean_logits(parts: SchemeParts, heads: LayerHeads, causal: bool) -> Tensor:
    """Computes the mean logit of every head by distance, over all visible pairs of a sample.

    Args:
        parts: the scheme's parts at this layer.
        heads: the recorded heads.
        causal: whether queries see only keys at or before their own position.

    Returns:
        `(heads, distances)` float32; distance is key position minus query position, from `1 - length` up to 0, or to
        `length - 1` in a bidirectional layer.
    """
    logits = positional_logits(
        parts, heads.query, heads.key, heads.positions, heads.hidden_states, heads.scaling
    ).float()
    length = logits.shape[-1]
    summed = logits.mean(0)
    last = 0 if causal else length - 1
    return torch.stack(
        [summed.diagonal(distance, dim1=-2, dim2=-1).mean(-1) for distance in range(1 - length, last + 1)], dim=-1
    )


def pair_counts(length: int, causal: bool) -> Tensor:
    """Returns the number of pairs of one sequence at each distance, `(distances,)` float32, in the order of
    `mean_logits`.
    """
    past = torch.arange(1, length + 1).float()
    return past if causal else torch.cat((past, past[:-1].flip(0)))
