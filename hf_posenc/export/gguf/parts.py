"""The parts of the scheme in force, layer by layer, for patched and for stock models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import Metadata
from hf_posenc.export.layers import Spectrum, spectrum_of
from hf_posenc.patching.anatomy.anatomy import find_stacks
from hf_posenc.patching.anatomy.sites import Stack
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.inspection import native_scheme
from hf_posenc.patching.place.encoding import build_encoding, current_encoding
from hf_posenc.patching.place.lengths import native_length
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.schemes import LinearScaling, RopeConfig, SchemeConfig, YarnScaling
from hf_posenc.schemes.bias.alibi import AlibiBias, alibi_slopes

#: Relative difference of two constants that count as equal: a few roundings of float32.
EQUAL = 1e-6
#: Length of a model that states none (BLOOM). It only says how long prompts may be in llama-server.
_LENGTH = 2048


@dataclass(frozen=True)
class ModelParts:
    """A model and the parts of its scheme.

    Args:
        model: the model.
        scheme: the scheme in force.
        stacks: its stacks with the parts in each; an encoder-decoder has two.
    """

    model: PreTrainedModel
    scheme: SchemeConfig
    stacks: tuple[tuple[Stack, StackEncoding], ...]

    @property
    def only(self) -> tuple[Stack, StackEncoding]:
        """The stack of a model with one, and its parts. A model with several is refused."""
        if len(self.stacks) != 1:
            raise UnsupportedError(
                f"{type(self.model).__name__} has {len(self.stacks)} stacks of attention layers, and these blocks of "
                "llama.cpp are one."
            )
        return self.stacks[0]

    @property
    def stack(self) -> Stack:
        """The only stack."""
        return self.only[0]

    @property
    def encoding(self) -> StackEncoding:
        """The parts in the only stack."""
        return self.only[1]

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
    found = tuple((stack, encoding.stacks[stack.name]) for stack in stacks)
    for stack, parts in found if placed is None else ():
        parts.adopt(stack)
    return ModelParts(model, scheme, found)


def model_length(parts: ModelParts) -> int:
    """Number of tokens that the file is made for."""
    placed = current_encoding(parts.model)
    lengths = None if placed is None else placed.lengths
    known = native_length(parts.model, [parts.stack]) if lengths is None else lengths.current
    longest = None if lengths is None else lengths.reach.length
    # BLOOM's checkpoints state their length in a field that its config class does not have.
    length = known or getattr(parts.stack.config, "seq_length", None) or _LENGTH
    return int(length if longest is None else min(length, longest))


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


def scaled_rotations(parts: ModelParts, rotations: list[Rotation]) -> tuple[Metadata, list[Rotation]]:
    """Linear scaling and YaRN with the options that llama.cpp reads.

    Returns:
        The base of RoPE and its scaling, and the rotations without the factor of cosine and sine, which these have.

    Raises:
        UnsupportedError: for another scheme.
    """
    scheme, found = parts.scheme, float(rotations[0].factors[0])
    scaling = scheme.scaling if isinstance(scheme, RopeConfig) else None
    if not isinstance(scheme, RopeConfig) or not isinstance(scaling, LinearScaling | YarnScaling):
        raise UnsupportedError("the scheme is not RoPE with linear scaling or YaRN")
    kind = "linear" if isinstance(scaling, LinearScaling) else "yarn"
    entries: Metadata = {"rope.freq_base": float(scheme.theta), "rope.scaling.type": kind}
    entries["rope.scaling.factor"] = float(scaling.factor)
    if isinstance(scaling, YarnScaling):
        if not scaling.truncate:
            raise UnsupportedError("llama.cpp rounds the ends of YaRN's ramp, and truncate=False does not")
        entries |= {
            "rope.scaling.original_context_length": scaling.original_max_positions,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
            # llama.cpp multiplies the factor of the formula by this one.
            "rope.scaling.attn_factor": found / (0.1 * math.log(scaling.factor) + 1.0),
        }
    return entries, [replace(one, factors=torch.ones_like(one.factors)) for one in rotations]


def geometric_entries(frequencies: Tensor) -> Metadata | None:
    """Frequencies `first * base ** (-pair / pairs)`, as a base and a linear scaling; `None` for others."""
    count, first = len(frequencies), float(frequencies[0])
    base = 10000.0 if count == 1 else float((frequencies[0] / frequencies[-1]).abs() ** (count / (count - 1)))
    computed = first * base ** -(torch.arange(count, dtype=torch.float64) / count)
    # Those of RoPE are rounded to float32.
    if not torch.allclose(frequencies, computed, rtol=2 * EQUAL, atol=0):
        return None
    scaling: Metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 1 / first}
    return {"rope.freq_base": base, **(scaling if abs(first - 1) > EQUAL else {})}


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
    for _, encoding in parts.stacks:
        found.append(("additive", encoding.additive))
        for layer in encoding.layers:
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


def refuse_other_biases(parts: ModelParts) -> None:
    """Refuses a scheme that does not have ALiBi with its fixed slopes in every layer.

    For any number of heads, llama.cpp computes the slopes of `alibi_slopes`.

    Raises:
        UnsupportedError: with the other bias, or the difference of the slopes.
    """
    for layer in parts.layers:
        bias = layer.logit_bias
        if not isinstance(bias, AlibiBias):
            what = "no bias" if bias is None else type(bias).__name__
            raise UnsupportedError(f"llama.cpp has no bias but ALiBi in these blocks; a layer has {what}")
        if bias.num_left is not None:
            raise UnsupportedError("llama.cpp has the same bias in both directions; a layer has the asymmetric ALiBi")
        slopes = bias.slopes.detach().double().cpu()
        fixed = torch.tensor(alibi_slopes(layer.num_heads), dtype=torch.float64)
        if not torch.allclose(slopes, fixed, rtol=EQUAL, atol=0):
            raise UnsupportedError(
                f"llama.cpp computes ALiBi's slopes from the number of heads; those of this model differ by up to "
                f"{float((slopes / fixed - 1).abs().max()):.3g} of their value. Train with learnable=False to export"
            )
