"""The parts of the scheme in force, layer by layer, for patched and for stock models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import Spectrum, spectrum_of
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.find.discovery import find_stacks
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.observe.native_scheme import native_scheme
from hf_posenc.patching.place.encoding import build_encoding, current_encoding
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.schemes import SchemeConfig

#: Relative difference of two constants that count as equal: a few roundings of float32.
EQUAL = 1e-6


@dataclass(frozen=True)
class StackParts:
    """A stack of a model, and the parts of the scheme in it.

    Args:
        stack: the stack.
        encoding: its parts.
    """

    stack: Stack
    encoding: StackEncoding


@dataclass(frozen=True)
class ModelParts:
    """A model and the parts of its scheme.

    Args:
        model: the model.
        scheme: the scheme in force.
        stacks: its stacks; an encoder-decoder has two.
    """

    model: PreTrainedModel
    scheme: SchemeConfig
    stacks: tuple[StackParts, ...]

    @property
    def only(self) -> StackParts:
        """The stack of a model with one.

        Raises:
            UnsupportedError: for a model with several.
        """
        if len(self.stacks) != 1:
            raise UnsupportedError(
                f"{type(self.model).__name__} has {len(self.stacks)} stacks of attention layers, and these blocks of "
                "llama.cpp are one."
            )
        return self.stacks[0]

    @property
    def stack(self) -> Stack:
        """The only stack."""
        return self.only.stack

    @property
    def encoding(self) -> StackEncoding:
        """The parts in the only stack."""
        return self.only.encoding

    @property
    def layers(self) -> list[LayerEncoding]:
        """The parts of each layer of the only stack."""
        return self.encoding.layers


def parts_of(model: PreTrainedModel) -> ModelParts:
    """Returns the parts of a model's scheme. Those of a stock model are built from its native scheme and weights.

    Raises:
        UnsupportedError: for a stock model that no scheme describes.
    """
    stacks = find_stacks(model)
    placed = current_encoding(model)
    scheme = native_scheme(model) if placed is None else placed.config
    encoding = build_encoding(scheme, stacks) if placed is None else placed
    found = [StackParts(stack, encoding.stacks[stack.name]) for stack in stacks]
    if placed is None:
        for one in found:
            one.encoding.adopt(one.stack)
    return ModelParts(model, scheme, tuple(found))


@dataclass(frozen=True)
class Rotation:
    """What a layer does to queries and keys: pairs of dimensions that turn with the position.

    Args:
        frequencies: radians per position of each pair, `(pairs,)` float64. All pairs of a head are listed; those that
            the scheme does not rotate have 0.
        order: the dimensions of a head, two for each pair, so that pair `m` is at `2 m` and `2 m + 1`.
        factors: what cosine and sine of each pair are multiplied by, `(pairs,)` float64.
        given: the rotation of the scheme, which may have a basis; `None` without one.
    """

    frequencies: Tensor
    order: list[int]
    factors: Tensor
    given: Spectrum | None

    def spectrum(self) -> tuple[float, ...]:
        """The frequencies as a value that can be compared."""
        return tuple(self.frequencies.tolist())

    def folded(self, rows: Tensor) -> Tensor:
        """Moves basis, pairs and factors into a projection of queries or keys, `(heads, head_dim, in)` in float32."""
        heads, width = rows.shape[:2]
        if self.given is not None:
            rows = self.given.folded(rows.flatten(0, 1), heads, width, self.given.layout).view_as(rows)
        return rows[:, self.order] * self.factors.repeat_interleave(2).unsqueeze(-1).to(rows)


def rotation_of(layer: LayerEncoding) -> Rotation:
    """Describes the query-key map of a layer. A layer without one is a rotation in which no pair turns.

    Raises:
        UnsupportedError: for a map that is not a rotation by the position times a constant.
    """
    width, given = layer.head_dim, spectrum_of(layer.query_key_map)
    frequencies, factors = torch.zeros(width // 2, dtype=torch.float64), torch.ones(width // 2, dtype=torch.float64)
    if given is None:
        return Rotation(frequencies, list(range(width)), factors, None)
    rotated = given.rotary_dim
    pairs = rotated // 2
    frequencies[:pairs], factors[:pairs] = given.frequencies.double(), given.scaling
    order = list(range(rotated))
    if given.layout == "half":
        order = [index for pair in range(pairs) for index in (pair, pair + pairs)]
    return Rotation(frequencies, [*order, *range(rotated, width)], factors, given)


def rotations_of(parts: ModelParts, *, same: bool = True) -> list[Rotation]:
    """The rotation of each layer, of a scheme that does nothing else.

    Args:
        parts: the model.
        same: whether they have to turn by the same frequencies.

    Raises:
        UnsupportedError: for another scheme.
    """
    refuse_other_parts(parts, "query_key_map")
    rotations = [rotation_of(layer) for layer in parts.layers]
    if same and len({rotation.spectrum() for rotation in rotations}) > 1:
        raise UnsupportedError("the layers have different frequencies")
    return rotations


#: What parts do, by their kind.
_ACTIONS = {
    "additive": "adds vectors to the embeddings",
    "query_key_map": "changes queries and keys",
    "logit_bias": "adds a bias to attention",
    "logit_scale": "scales attention by the position",
}


def refuse_other_parts(parts: ModelParts, *allowed: str) -> None:
    """Refuses parts that a carrier cannot express.

    Args:
        parts: the model.
        *allowed: names of the kinds that the carrier expresses: "query_key_map", "logit_bias", "additive".

    Raises:
        UnsupportedError: naming the first other part.
    """
    found: list[tuple[str, object]] = []
    for one in parts.stacks:
        found.append(("additive", one.encoding.additive))
        for layer in one.encoding.layers:
            found += [(kind, getattr(layer, kind)) for kind in ("query_key_map", "logit_bias", "logit_scale")]
    for kind, part in found:
        if part is not None and kind not in allowed:
            raise UnsupportedError(f"the scheme {_ACTIONS[kind]} ({type(part).__name__}), and llama.cpp does not here")


def refuse_without_logits(parts: ModelParts) -> None:
    """Refuses a model that does not predict tokens.

    Raises:
        UnsupportedError: saying which class does.
    """
    if parts.model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{type(parts.model).__name__} has no language model head, and these architectures of llama.cpp predict "
            "tokens. Export the class for causal language modelling"
        )
