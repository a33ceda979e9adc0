"""Mean attention logits of a scheme by distance, on a sample of text."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import TEXT, Anatomy
from hf_posenc.patching.call.attention_site import AttentionSite
from hf_posenc.patching.place.encoding import LayerEncoding, PositionEncoding, stacks_in_part
from hf_posenc.preserve import evaluation_mode
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.outer_parts import SummedPairwiseBias
from hf_posenc.schemes.parts import PairwiseBias, QueryKeyMap, SchemeParts
from hf_posenc.schemes.positions import AttentionPairs, Positions


class _RecordingMap(QueryKeyMap):
    """A map that records its inputs."""

    #: The recorder needs full queries and keys, even if the architecture passes slices.
    whole_heads = True
    query: Tensor
    key: Tensor

    def __init__(self, inner: QueryKeyMap | None) -> None:
        super().__init__()
        self.inner = inner
        self.symmetric = inner is None or inner.symmetric
        self.width_factor = 1 if inner is None else inner.width_factor

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        return () if self.inner is None else self.inner.phases(positions)

    def map_query(self, query: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        self.query = query.float()
        return query if self.inner is None else self.inner.map_query(query, phases)

    def map_key(self, key: Tensor, phases: tuple[Tensor, ...]) -> Tensor:
        self.key = key.float()
        return key if self.inner is None else self.inner.map_key(key, phases)


class _RecordingBias(PairwiseBias):
    """A bias of zeros that records the layer's other inputs."""

    pairs: AttentionPairs

    def forward(self, pairs: AttentionPairs) -> Tensor:
        self.pairs = pairs
        _, heads, queries, _ = pairs.query.shape
        return pairs.query.new_zeros(1, heads, 1, 1).float().expand(-1, -1, queries, pairs.key.shape[-2])


def layers_of(encoding: PositionEncoding, part: str) -> list[LayerEncoding]:
    """Returns the layers of all stacks of a part of a model, in order. The encoding is or was in force."""
    return [layer for stack in stacks_in_part(encoding, part).values() for layer in stack.layers]


def readers_of(anatomy: Anatomy, part: str) -> list[nn.Module]:
    """Returns the modules that run a part of a model on token ids: the whole model, or the stacks of one part of it.

    The list is empty for a part that does not read token ids.
    """
    stacks = [stack.module for stack in anatomy.stacks([part])]
    readers = [anatomy.model] if len(anatomy.parts) == 1 else stacks
    reads_ids = all("input_ids" in inspect.signature(type(module).forward).parameters for module in (*readers, *stacks))
    return readers if reads_ids else []


@contextmanager
def _recording(layers: list[LayerEncoding], biases: bool) -> Iterator[list[tuple[_RecordingMap, _RecordingBias]]]:
    """Wraps the maps and biases of layers in recorders inside a `with` block; without `biases`, these do not act."""
    before = [(layer.query_key_map, layer.logit_bias, layer.kind) for layer in layers]
    recorders = [(_RecordingMap(rotation), _RecordingBias()) for rotation, *_ in before]
    try:
        for layer, (recording, recorder) in zip(layers, recorders, strict=True):
            bias = layer.logit_bias if biases else None
            recorded = recorder if bias is None else SummedPairwiseBias([bias, recorder])
            layer.exchange(query_key_map=recording, logit_bias=recorded, kind=None)
        yield recorders
    finally:
        for layer, parts in zip(layers, before, strict=True):
            layer.exchange(query_key_map=parts[0], logit_bias=parts[1], kind=parts[2])


def recorded_heads(
    anatomy: Anatomy, encoding: PositionEncoding, sample: Tensor, part: str = TEXT, *, biases: bool = True
) -> list[AttentionPairs]:
    """Runs a part of a patched model on a sample and returns the inputs of the logits of each layer, before any map.

    Queries and keys are without the factors that their architecture multiplies them with; `scaling` contains them.

    Args:
        anatomy: of a model that is patched with `encoding`. Dropout is disabled during the run, and the mode of every
            module is restored.
        encoding: the current encoding.
        sample: `(batch, length)` token ids without padding.
        part: a part that reads token ids.
        biases: whether the biases of the scheme act during the run.

    Raises:
        UnsupportedError: if several processes share the heads of a layer.
    """
    for site in encoding.record.journal.forwards():
        if isinstance(site, AttentionSite) and site.encoding.shard is not None:
            raise UnsupportedError(
                "The layers of this model are split over several processes (tensor parallelism), so that none of them "
                "has the logits of all heads, which fitting needs. Swap the scheme of a model that is loaded without "
                'tp_plan, save it, and load the saved model with tp_plan, or pass initialization="default".'
            )
    with evaluation_mode(anatomy.model), _recording(layers_of(encoding, part), biases) as recorders:
        for module in readers_of(anatomy, part):
            known = inspect.signature(type(module).forward).parameters
            inputs: dict[str, Any] = {name: sample for name in ("input_ids", "decoder_input_ids") if name in known}
            module(**inputs, **({"use_cache": False} if hasattr(module.config, "use_cache") else {}))
    recorded = []
    for recorder, bias in recorders:
        scaling = bias.pairs.scaling * bias.pairs.query_factor * bias.pairs.key_factor
        heads: dict[str, Any] = {"query": recorder.query, "key": recorder.key, "scaling": scaling}
        recorded.append(dataclasses.replace(bias.pairs, **heads, query_factor=1.0, key_factor=1.0))
    return recorded


@torch.no_grad()
def mean_logits(parts: SchemeParts, heads: AttentionPairs, causal: bool) -> Tensor:
    """Computes the mean logit of every head by distance, over all visible pairs of a sample.

    Args:
        parts: the scheme's parts at this layer.
        heads: the recorded heads.
        causal: whether queries see only keys at or before their own position.

    Returns:
        `(heads, distances)` float32; distance is key position minus query position, from `1 - length` up to 0, or to
        `length - 1` in a bidirectional layer.
    """
    logits = positional_logits(parts, heads.query, heads.key, heads.keys, heads.hidden_states, heads.scaling).float()
    mean, length = logits.mean(0), logits.shape[-1]
    distances = range(1 - length, 1 if causal else length)
    return torch.stack([mean.diagonal(distance, dim1=-2, dim2=-1).mean(-1) for distance in distances], dim=-1)
