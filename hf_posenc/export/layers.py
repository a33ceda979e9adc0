"""The effect of a scheme in each layer of a model, in terms that other programs have: rotations, biases, vectors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import TEXT, Anatomy, Stack
from hf_posenc.patching.anatomy.sites import AttentionLayer
from hf_posenc.patching.inspection import native_scheme
from hf_posenc.patching.place.encoding import LayerEncoding, StackEncoding, build_encoding, current_encoding
from hf_posenc.patching.place.install import adopt_native
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig, walk
from hf_posenc.schemes.needs import Need
from hf_posenc.schemes.outer_parts import ChainedMap
from hf_posenc.schemes.parts import AdditiveEncoding, Part, QueryKeyMap
from hf_posenc.schemes.position_maps.affine import AffineMap
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary.rope import LengthDependentRotaryMap, RotaryMap
from hf_posenc.schemes.rotary.string import RotationInBasis
from hf_posenc.schemes.statements import MAP_METHODS, overrides

#: A pair whose frequency is divided by this does not move: its angle stays below 1e-20 at any position.
STOPPED = 1e30
#: An entry of `rope_parameters` that is not part of a rotation: the attention of Ministral 3 reads it, and multiplies
#: queries at positions beyond `original_max_position_embeddings`, whatever the scheme is.
QUERY_FACTOR = "llama_4_scaling_beta"


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model and the parts that act in it.

    Args:
        stack: the stack it belongs to.
        attention: the layer.
        parts: the parts of the scheme.
    """

    stack: Stack
    attention: AttentionLayer
    parts: LayerEncoding

    @property
    def name(self) -> str:
        """The module path of the layer in the model."""
        return ".".join(filter(None, (self.stack.path, self.attention.path)))


class ModelParts:
    """A model and the parts of its scheme. For a stock model, they are built from its native scheme and weights.

    Args:
        model: a transformers model without adapters, patched or stock.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.name = type(model).__name__
        #: The scheme that is placed in the model; `None` for a stock model.
        self.placed = current_encoding(model)

    @cached_property
    def scheme(self) -> SchemeConfig:
        """The scheme in force: the one the model was patched with, or its native one."""
        return native_scheme(self.model) if self.placed is None else self.placed.config

    @property
    def text_scheme(self) -> SchemeConfig:
        """The scheme of the text part, the only one with a scheme in a composite model that is exported."""
        return self.scheme.by_part()[TEXT] if isinstance(self.scheme, PartsConfig) else self.scheme

    def theta(self, attention: AttentionLayer | None = None) -> float:
        """The base of RoPE in the scheme of a layer, by default of any layer, or else in the model's own rotation."""
        placed, layer_type = self.scheme.for_part(TEXT), None if attention is None else attention.layer_type
        if attention is not None and placed is not None:
            placed = placed.for_layer(attention.layer, layer_type)
        for scheme in () if placed is None else walk(placed):
            if isinstance(theta := getattr(scheme, "theta", None), float):
                return theta
        config = self.model.config.get_text_config()
        parameters = getattr(config, "rope_parameters", None) or {}
        flat = parameters.get(layer_type, parameters)
        return float(flat.get("rope_theta") or getattr(config, "default_theta", 10000.0))

    @property
    def label(self) -> str:
        """The scheme for messages; "stock" if the model has positions that no scheme describes."""
        try:
            return self.scheme.label
        except UnsupportedError:
            return "stock"

    @cached_property
    def stacks(self) -> list[tuple[Stack, StackEncoding]]:
        """The stacks with the parts in each; an encoder-decoder has two.

        Raises:
            UnsupportedError: for a stock model that no scheme describes.
        """
        stacks = Anatomy(self.model).stacks()
        known: dict[str, StackEncoding] = {} if self.placed is None else dict(self.placed.stacks.items())
        # Other parts of the model may be patched, and these not.
        native = [stack for stack in stacks if stack.name not in known]
        if native:
            known |= build_encoding(native_scheme(self.model, part=native[0].part), native).stacks.items()
        for stack in native:
            adopt_native(known[stack.name], stack)
        return [(stack, known[stack.name]) for stack in stacks]

    @cached_property
    def layers(self) -> list[Layer]:
        """The attention layers, stack by stack."""
        layers = ((stack, zip(stack.attentions, encoding.layers, strict=True)) for stack, encoding in self.stacks)
        return [Layer(stack, attention, parts) for stack, pairs in layers for attention, parts in pairs]

    @property
    def stack(self) -> Stack:
        """The stack of a model with one. A model with several is refused."""
        if len(self.stacks) != 1:
            raise UnsupportedError(
                f"{self.name} has {len(self.stacks)} stacks of attention layers, but these llama.cpp blocks form one."
            )
        return self.stacks[0][0]

    @property
    def additive(self) -> AdditiveEncoding | None:
        """The vectors that are added in the first stack."""
        return self.stacks[0][1].additive

    def needs(self) -> dict[Need, Part]:
        """The needs of the scheme."""
        return {need: part for _, encoding in self.stacks for need, part in encoding.needs().items()}


@dataclass(frozen=True)
class Rotation:
    """A rotation of queries and keys by fixed frequencies, the same in all heads of a layer.

    `folded` moves the basis, and the order of pairs, into weights.

    Args:
        head_dim: width of a head.
        frequencies: `(rotary_dim / 2,)` float32, in radians per position; empty for a layer that does not rotate.
        layout: which dimensions form a pair, "half" or "interleaved", as in `RotaryMap`.
        scaling: factor of cosine and sine.
        basis: `(key_value_heads or 1, rotary_dim, rotary_dim)` float32 if queries and keys are multiplied with it
            before they are rotated.
    """

    head_dim: int
    frequencies: Tensor = field(default_factory=lambda: torch.zeros(0))
    layout: str = "interleaved"
    scaling: float = 1.0
    basis: Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return 2 * self.frequencies.shape[-1]

    @property
    def all_frequencies(self) -> Tensor:
        """The frequencies of all pairs of a head, `(head_dim / 2,)` float64; 0 for those that are not rotated."""
        stopped = torch.zeros(self.head_dim // 2 - len(self.frequencies), dtype=torch.float64)
        return torch.cat((self.frequencies.double(), stopped))

    @property
    def spectrum(self) -> tuple[float, ...]:
        """The frequencies as a value that can be compared."""
        return tuple(self.all_frequencies.tolist())

    def neighbours(self) -> list[int]:
        """The dimensions of a head in the order in which the two of each pair are next to each other."""
        pairs = len(self.frequencies)
        order = [*range(self.rotary_dim)]
        if self.layout == "half":
            order = [dimension for pair in range(pairs) for dimension in (pair, pair + pairs)]
        return [*order, *range(self.rotary_dim, self.head_dim)]

    def in_layout(self, layout: str) -> list[int]:
        """The dimensions of a head in the order in which its pairs have another layout.

        Raises:
            UnsupportedError: if pairs in a part of a head would have to be reordered.
        """
        if layout == self.layout:
            return [*range(self.head_dim)]
        if self.rotary_dim != self.head_dim:
            raise UnsupportedError("The pairs of a part of a head cannot be reordered.")
        order = self.neighbours()
        return [*order[::2], *order[1::2]] if layout == "half" else order

    def folded(self, rows: Tensor, order: list[int], *, scaled: bool = False) -> Tensor:
        """Moves the basis into the weight or bias of a projection of queries or keys, and reorders its dimensions.

        Args:
            rows: `(heads * head_dim, ...)`.
            order: the dimensions of a head.
            scaled: whether to move the factor of cosine and sine into it, too.
        """
        by_head = rows.reshape(-1, self.head_dim, rows[0].numel())
        rotated, rest = by_head.split((self.rotary_dim, self.head_dim - self.rotary_dim), dim=1)
        if self.basis is not None:
            basis = self.basis.to(rows.device).repeat_interleave(len(by_head) // len(self.basis), dim=0)
            rotated = (basis @ rotated.float()).to(rows)
        if scaled:
            rotated = rotated * self.scaling
        return torch.cat((rotated, rest), dim=1)[:, order].reshape(rows.shape)


def rotation_of(layer: Layer) -> Rotation:
    """The rotation that a layer applies to queries and keys.

    Raises:
        UnsupportedError: if its map is another one: with frequencies that depend on the length or on the head, or
            anything but one rotation.
    """
    part = layer.parts.query_key_map
    return Rotation(layer.parts.head_dim) if part is None else _rotation(part, layer.parts.head_dim)


def _rotation(part: QueryKeyMap, head_dim: int) -> Rotation:
    if isinstance(part, ChainedMap) and type(part.position_map) is AffineMap and len(part.members()) == 1:
        # An offset is not visible, because a rotation depends on distances only.
        inner = _rotation(part.members()[0], head_dim)
        return dataclasses.replace(inner, frequencies=inner.frequencies * part.position_map.factor)
    name = type(part).__name__
    if isinstance(part, RotationInBasis) and not any(overrides(type(part), name, "basis") for name in MAP_METHODS):
        return dataclasses.replace(_rotation(part.rotation, head_dim), basis=part.basis().detach().float().cpu())
    if isinstance(part, LengthDependentRotaryMap):
        raise UnsupportedError(f"The frequencies of {name} depend on the length of the sequence.")
    if not isinstance(part, RotaryMap) or not part.turns_by_frequencies:
        raise UnsupportedError(f"{name} is more than a rotation by fixed frequencies.")
    frequencies = part.inverse_frequencies(torch.zeros(1, 1, dtype=torch.int64)).detach().float().cpu()
    rows = frequencies.reshape(-1, frequencies.shape[-1])
    if not torch.equal(rows, rows[:1].expand_as(rows)):
        raise UnsupportedError(f"The frequencies of {name} differ between heads.")
    if part.layout == "half_reversed":
        return Rotation(head_dim, -rows[0], "half", float(part.attention_scaling))
    return Rotation(head_dim, rows[0], part.layout, float(part.attention_scaling))


def rotations_of(parts: ModelParts, *, same: bool = True) -> list[Rotation]:
    """The rotation of each layer.

    Args:
        parts: the model.
        same: whether all have to turn by the same frequencies.

    Raises:
        UnsupportedError: if a layer does something else to queries and keys.
    """
    rotations = [rotation_of(layer) for layer in parts.layers]
    if same and any(rotation.spectrum != rotations[0].spectrum for rotation in rotations):
        raise UnsupportedError("the layers have different frequencies")
    return rotations


@torch.no_grad()
def rows_of(additive: AdditiveEncoding, count: int) -> Tensor:
    """The vectors that are added at the positions from 0, `(count, hidden)` float32.

    Raises:
        UnsupportedError: if a vector depends on more than its position.
    """
    if additive.length_dependent or additive.needs_whole_sequence:
        raise UnsupportedError(f"The vectors of {type(additive).__name__} depend on the length of the sequence.")
    device = next((tensor.device for tensor in (*additive.parameters(), *additive.buffers())), torch.device("cpu"))
    positions = Positions(torch.arange(count, device=device).unsqueeze(0), torch.tensor([[count]], device=device))
    return additive(positions)[0].float()
