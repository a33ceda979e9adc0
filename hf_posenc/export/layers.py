"""What a scheme does in each layer of a patched model, in terms that other programs have: spectra, biases, vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import find_stacks
from hf_posenc.patching.anatomy.sites import AttentionLayer, Stack
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.schemes.outer_parts import ChainedMap
from hf_posenc.schemes.parts import AdditiveEncoding, LogitBias, LogitScale, QueryKeyMap
from hf_posenc.schemes.position_maps.affine import AffineMap
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.string import RotationInBasis

#: Methods of a rotation. A subclass that overrides one computes more than a rotation by fixed frequencies.
_ROTATION = ("angles", "phases", "prepared", "query_phases", "key_phases", "map_query", "map_key", "rotate")


#: A pair whose frequency is divided by this does not move: its angle stays below 1e-20 at any position.
STOPPED = 1e30

#: An entry of `rope_parameters` that is no part of a rotation: the attention of Ministral 3 reads it, and multiplies
#: queries at positions beyond `original_max_position_embeddings`, whatever the scheme is.
QUERY_FACTOR = "llama_4_scaling_beta"


@dataclass(frozen=True)
class PlacedLayer:
    """One attention layer of a patched model and the parts that act in it.

    Args:
        stack: the stack it belongs to.
        attention: the layer.
        query_key_map: change of queries and keys, if there is one.
        logit_bias: bias, if there is one.
        logit_scale: factor of the logits, if there is one.
    """

    stack: Stack
    attention: AttentionLayer
    query_key_map: QueryKeyMap | None
    logit_bias: LogitBias | None
    logit_scale: LogitScale | None

    @property
    def name(self) -> str:
        """The module path of the layer in the model."""
        return ".".join(filter(None, (self.stack.path, self.attention.path)))


@dataclass(frozen=True)
class Spectrum:
    """A rotation by fixed frequencies, the same in all heads of a layer.

    Args:
        frequencies: `(rotary_dim / 2,)` float32, in radians per position.
        layout: which dimensions form a pair, "half" or "interleaved", as in `RotaryMap`.
        scaling: factor of cosine and sine.
        basis: `(key_value_heads or 1, rotary_dim, rotary_dim)` float32 if queries and keys are multiplied with it
            before they are rotated.
    """

    frequencies: Tensor
    layout: str
    scaling: float
    basis: Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return 2 * self.frequencies.shape[-1]

    def turns_as(self, other: Spectrum) -> bool:
        """Whether both rotate by the same angles. Pairs and basis may differ: `folded` moves them into weights."""
        return torch.equal(self.frequencies, other.frequencies) and self.scaling == other.scaling

    def folded(self, rows: Tensor, heads: int, head_dim: int, layout: str) -> Tensor:
        """Moves pairs and basis into the weight or bias of a projection of queries or keys.

        Args:
            rows: `(heads * head_dim, ...)`.
            heads: number of heads of the projection.
            head_dim: width of a head.
            layout: which dimensions form a pair in the result, "half" or "interleaved".

        Raises:
            UnsupportedError: if pairs in a part of a head would have to be reordered.
        """
        if self.basis is None and layout == self.layout:
            return rows
        by_head = rows.unflatten(0, (heads, head_dim)).reshape(heads, head_dim, -1).clone()
        width = self.rotary_dim
        if self.basis is not None:
            basis = self.basis.to(rows.device).repeat_interleave(heads // self.basis.shape[0], dim=0)
            by_head[:, :width] = (basis @ by_head[:, :width].float()).to(rows)
        if layout != self.layout:
            if width != head_dim:
                raise UnsupportedError("The pairs of a part of a head cannot be reordered.")
            order = torch.arange(head_dim, device=rows.device).view(-1, 2).T.reshape(-1)
            by_head = by_head[:, order if layout == "half" else order.argsort()]
        return by_head.reshape(rows.shape).contiguous()


def placed_layers(model: PreTrainedModel) -> list[PlacedLayer]:
    """The attention layers of a patched model, stack by stack."""
    return [
        PlacedLayer(stack, attention, layer.query_key_map, layer.logit_bias, layer.logit_scale)
        for stack, encoding in _stacks(model)
        for attention, layer in zip(stack.attentions, encoding.layers, strict=True)
    ]


def placed_additives(model: PreTrainedModel) -> list[tuple[Stack, AdditiveEncoding | None]]:
    """The vectors that a scheme adds in each stack of a patched model."""
    return [(stack, encoding.additive) for stack, encoding in _stacks(model)]


def _stacks(model: PreTrainedModel) -> Iterator[tuple[Stack, StackEncoding]]:
    return zip(find_stacks(model), model.position_encoding.stacks.values(), strict=True)


def refuse_beyond_rotation(layers: list[PlacedLayer], carrier: str) -> None:
    """Refuses a scheme that does more in a layer than change queries and keys.

    Raises:
        UnsupportedError: with the kind of part.
    """
    for layer in layers:
        for part in (layer.logit_bias, layer.logit_scale):
            if part is not None:
                kind = "bias" if isinstance(part, LogitBias) else "scale"
                raise UnsupportedError(f"{carrier} has no such logit {kind}.")


def spectrum_of(part: QueryKeyMap | None) -> Spectrum | None:
    """The rotation that a map of queries and keys is, or `None` without a map.

    Raises:
        UnsupportedError: if it is another map: with frequencies that depend on the length or on the head, or anything
            but one rotation.
    """
    if part is None:
        return None
    if isinstance(part, ChainedMap) and isinstance(part.position_map, AffineMap):
        # An offset is not visible, because a rotation depends on distances only.
        inner = spectrum_of(part.members()[0])
        assert inner is not None
        return dataclasses.replace(inner, frequencies=inner.frequencies * part.position_map.factor)
    name = type(part).__name__
    if isinstance(part, RotationInBasis) and _keeps(part, RotationInBasis, ("phases", "map_query", "map_key")):
        inner = spectrum_of(part.rotation)
        assert inner is not None
        return dataclasses.replace(inner, basis=part.basis().detach().float().cpu())
    if not isinstance(part, RotaryMap) or not _keeps(part, RotaryMap, _ROTATION):
        raise UnsupportedError(f"{name} is more than a rotation by fixed frequencies.")
    if part.length_dependent:
        raise UnsupportedError(f"The frequencies of {name} depend on the length of the sequence.")
    frequencies = part.inverse_frequencies(torch.zeros(1, 1, dtype=torch.int64)).detach().float().cpu()
    rows = frequencies.reshape(-1, frequencies.shape[-1])
    if not torch.equal(rows, rows[:1].expand_as(rows)):
        raise UnsupportedError(f"The frequencies of {name} differ between heads.")
    if part.layout == "half_reversed":
        return Spectrum(-rows[0], "half", float(part.attention_scaling))
    return Spectrum(rows[0], part.layout, float(part.attention_scaling))


def one_spectrum(layers: list[PlacedLayer], carrier: str) -> tuple[list[Spectrum], Spectrum]:
    """The rotation of each layer, for a carrier that turns by the same angles in all of them, and the first.

    Raises:
        UnsupportedError: if a layer does not rotate, or they turn by other angles.
    """
    spectra = [spectrum for layer in layers if (spectrum := spectrum_of(layer.query_key_map)) is not None]
    if len(spectra) < len(layers) or any(not one.turns_as(spectra[0]) for one in spectra):
        raise UnsupportedError(f"{carrier} has the same rotation in all layers.")
    return spectra, spectra[0]


def refuse_vectors(model: PreTrainedModel, reason: str) -> None:
    """Refuses a scheme that adds vectors to the embeddings.

    Raises:
        UnsupportedError: with the reason.
    """
    if any(encoding.additive is not None for _, encoding in _stacks(model)):
        raise UnsupportedError(reason)


def _keeps(part: QueryKeyMap, base: type, methods: tuple[str, ...]) -> bool:
    """Whether a part overrides none of some methods of its base class."""
    return all(getattr(type(part), method) is getattr(base, method) for method in methods)


@torch.no_grad()
def rows_of(additive: AdditiveEncoding, count: int) -> Tensor:
    """The vectors that are added at the positions from 0, `(count, hidden)` float32.

    Raises:
        UnsupportedError: if a vector depends on more than its position.
    """
    if additive.length_dependent or additive.needs_whole_sequence:
        raise UnsupportedError(f"The vectors of {type(additive).__name__} depend on the length of the sequence.")
    device = next((one.device for one in (*additive.parameters(), *additive.buffers())), torch.device("cpu"))
    positions = Positions(torch.arange(count, device=device).unsqueeze(0), torch.tensor([[count]], device=device))
    return additive(positions)[0].float()
