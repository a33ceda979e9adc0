"""Code for several kinds of blocks of llama.cpp: ALiBi, rotations, factors of logits, and GELU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.file import GgufForm, Metadata
from hf_posenc.export.layers import STOPPED, ModelParts, Rotation, rotations_of
from hf_posenc.patching.place.lengths import native_length
from hf_posenc.schemes import LinearScaling, RopeConfig, YarnScaling
from hf_posenc.schemes.bias.alibi import AlibiBias, alibi_slopes

#: Names of GELU and of its approximations in configs. llama.cpp computes all of them in the same way.
GELU_NAMES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")
#: The forms of GELU (erf, tanh, and other roundings of its constants) differ by less than 5e-4. QuickGELU, ReLU and
#: SiLU differ from it by more than 1e-2.
_SAME_FUNCTION = 1e-3
#: Relative difference of two constants that count as equal: a few roundings of float32.
EQUAL = 1e-6
#: Length of a model that states none (BLOOM). It only says how long prompts may be in llama-server.
_LENGTH = 2048
#: Norms of queries and of keys, of each head or of all heads at once.
_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
#: Names of the factor of the logits in attention modules.
_SCALINGS = ("scaling", "softmax_scale", "inv_norm_factor")


def model_length(parts: ModelParts) -> int:
    """Number of tokens that the file is made for."""
    lengths = None if parts.placed is None else parts.placed.lengths
    known = native_length(parts.model, [parts.stack]) if lengths is None else lengths.current
    longest = None if lengths is None else lengths.reach.length
    # BLOOM's checkpoints state their length in a field that its config class does not have.
    length = known or getattr(parts.stack.config, "seq_length", None) or _LENGTH
    return int(length if longest is None else min(length, longest))


def sizes(parts: ModelParts, tensors: dict[str, Tensor], length: int) -> Metadata:
    """The hyperparameters that all models with one stack have."""
    width = tensors.get("blk.0.ffn_up.weight", tensors.get("blk.0.ffn_up_exps.weight"))
    assert width is not None
    return {
        "block_count": len(parts.layers),
        "context_length": length,
        "embedding_length": tensors["token_embd.weight"].shape[1],
        "feed_forward_length": width.shape[-2],
        "attention.head_count": parts.stack.attentions[0].num_heads,
        "vocab_size": int(parts.stack.config.vocab_size),
    }


def refuse_without_logits(parts: ModelParts) -> None:
    """Refuses a model that does not predict tokens.

    Raises:
        UnsupportedError: saying which class does.
    """
    if parts.model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{parts.name} has no language model head, and these architectures of llama.cpp predict tokens. Export "
            "the class for causal language modelling"
        )


def refuse_other_activations(model: nn.Module, names: Sequence[str]) -> None:
    """Refuses activations other than GELU.

    Args:
        model: the model.
        names: its modules that compute an activation.

    Raises:
        UnsupportedError: with the difference.
    """
    grid = torch.linspace(-12.0, 12.0, 2401)
    expected = nn.functional.gelu(grid)
    for name in names:
        difference = float((model.get_submodule(name)(grid) - expected).abs().max())
        if not difference < _SAME_FUNCTION:
            kind = type(model.get_submodule(name)).__name__
            raise UnsupportedError(
                f"{type(model).__name__} has the activation {kind}, which differs from GELU by up to {difference:.2g}; "
                "these blocks of llama.cpp have GELU"
            )


def refuse_other_biases(parts: ModelParts) -> None:
    """Refuses a scheme that does not have ALiBi with its fixed slopes in every layer.

    For any number of heads, llama.cpp computes the slopes of `alibi_slopes`.

    Raises:
        UnsupportedError: with the other bias, or the difference of the slopes.
    """
    for layer in parts.layers:
        bias = layer.parts.logit_bias
        if type(bias) is not AlibiBias:
            what = "no bias" if bias is None else type(bias).__name__
            raise UnsupportedError(f"ALiBi is the only bias that llama.cpp has in these blocks; a layer has {what}")
        if bias.num_left is not None:
            raise UnsupportedError("llama.cpp has the same bias in both directions; a layer has the asymmetric ALiBi")
        slopes = bias.slopes.detach().double().cpu()
        fixed = torch.tensor(alibi_slopes(layer.parts.num_heads), dtype=torch.float64)
        if not torch.allclose(slopes, fixed, rtol=EQUAL, atol=0):
            raise UnsupportedError(
                f"llama.cpp computes ALiBi's slopes from the number of heads; those of this model differ by up to "
                f"{float((slopes / fixed - 1).abs().max()):.3g} of their value. Train with learnable=False to export"
            )


def logit_factors(parts: ModelParts) -> dict[int, float]:
    """The factors of the logits that llama.cpp does not apply, by layer. It divides by the root of a head's width."""
    factors = {}
    for index, attention in enumerate(parts.stack.attentions):
        scaling = next((getattr(attention.module, key) for key in _SCALINGS if hasattr(attention.module, key)), None)
        factors[index] = 1.0 if scaling is None else float(scaling) * attention.head_dim**0.5
    return {index: factor for index, factor in factors.items() if abs(factor - 1) > 1e-6}


def scale_queries(tensors: dict[str, Tensor], index: int, rows: int, factor: float) -> None:
    """Moves a factor of a layer's logits into the projection of its queries, with `rows` rows, or into their norm."""
    normed = f"blk.{index}.{_NORMS[0]}" in tensors
    for kind in _NORMS[:1] if normed else ("attn_q.weight", "attn_q.bias", "attn_qkv.weight", "attn_qkv.bias"):
        name = f"blk.{index}.{kind}"
        if name in tensors:
            tensors[name] = tensors[name].float().clone()
            tensors[name][:rows] *= factor


def scaled_entries(parts: ModelParts, rotations: list[Rotation]) -> tuple[Metadata, list[Rotation]]:
    """Linear scaling and YaRN with the options that llama.cpp reads.

    Returns:
        The base of RoPE and its scaling, and the rotations without the factor of cosine and sine, which these have.

    Raises:
        UnsupportedError: for another scheme.
    """
    scheme = parts.scheme
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
            "rope.scaling.attn_factor": rotations[0].scaling / (0.1 * math.log(scaling.factor) + 1.0),
        }
    return entries, [replace(rotation, scaling=1.0) for rotation in rotations]


def geometric_entries(rotation: Rotation) -> Metadata:
    """Frequencies `first * base ** (-pair / pairs)`, as a base and a linear scaling. Some pairs may not rotate.

    Raises:
        UnsupportedError: for other frequencies.
    """
    turning = rotation.all_frequencies.abs()
    turning = turning[turning > 0].sort(descending=True).values
    count = len(turning)
    if count == 0:
        return {"rope.freq_base": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": STOPPED}
    first = float(turning[0])
    base = 10000.0 if count == 1 else float((turning[0] / turning[-1]) ** (count / (count - 1)))
    computed = first * base ** -(torch.arange(count, dtype=torch.float64) / count)
    # The frequencies of RoPE are rounded to float32.
    if not torch.allclose(turning, computed, rtol=2 * EQUAL, atol=0):
        raise UnsupportedError(
            "the frequencies do not decrease by a constant factor from pair to pair, so they are not those of RoPE, "
            "and these blocks have no table of frequencies"
        )
    scaling: Metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 1 / first}
    return {"rope.freq_base": base, **(scaling if abs(first - 1) > EQUAL else {})}


def stated_rotation(place: Callable[..., GgufForm], parts: ModelParts, *, scaled: bool) -> GgufForm:
    """A rotation that options of llama.cpp state: linear scaling and YaRN, or frequencies by a constant factor.

    Args:
        place: `(parts, rotations, entries, words about them)` -> the form that has them.
        parts: the model.
        scaled: whether the options describe a scaling.
    """
    rotations = rotations_of(parts)
    if scaled:
        entries, rotations = scaled_entries(parts, rotations)
        return place(parts, rotations, entries, f" with rope.scaling.type {entries['rope.scaling.type']!r}")
    entries = geometric_entries(rotations[0])
    stopped = entries.get("rope.scaling.factor") == STOPPED
    return place(parts, rotations, entries, " with stopped positions" if stopped else "")


def rotate_halves(form: GgufForm, rotations: list[Rotation], entries: Metadata) -> None:
    """Rotates the first dimensions of every head, pair `m` at `m` and `m + pairs`, as GPT-NeoX does."""
    fold_rotations(form, rotations, _halves)
    pairs = int(rotations[0].all_frequencies.count_nonzero())
    form.metadata.update({"rope.dimension_count": 2 * pairs or rotations[0].head_dim, **entries})


def _halves(rotation: Rotation) -> list[int]:
    """The dimensions of a head: the first and then the second of each turning pair, the fastest first; then others."""
    frequencies, neighbours = rotation.all_frequencies, rotation.neighbours()
    turning = [pair for pair in frequencies.abs().argsort(descending=True, stable=True).tolist() if frequencies[pair]]
    # A pair that turns backwards turns forwards with its dimensions exchanged.
    first = [2 * pair + int(frequencies[pair] < 0) for pair in turning]
    rest = [dimension for dimension in range(rotation.head_dim) if dimension // 2 not in turning]
    return [neighbours[dimension] for dimension in (*first, *(dimension ^ 1 for dimension in first), *rest)]


def fold_rotations(form: GgufForm, rotations: list[Rotation], order: Callable[[Rotation], list[int]]) -> None:
    """Moves the parts of a rotation that llama.cpp does not compute into the projections of queries and keys.

    Args:
        form: the model.
        rotations: the rotation of each layer.
        order: the dimensions of a head, in the order in which llama.cpp rotates them.

    Raises:
        UnsupportedError: for a basis, if queries and keys are normalised before it.
    """
    heads = int(form.metadata["attention.head_count"])
    key_heads = int(form.metadata.get("attention.head_count_kv", heads))
    for index, rotation in enumerate(rotations):
        dimensions = order(rotation)
        norms = [name for name in (f"blk.{index}.{kind}" for kind in _NORMS) if name in form.tensors]
        if norms and rotation.basis is not None:
            raise UnsupportedError(
                "the scheme multiplies queries and keys by a basis after their norm, and llama.cpp does not"
            )
        for name in [*(f"blk.{index}.attn_{kind}" for kind in ("q.weight", "q.bias", "k.weight", "k.bias")), *norms]:
            if name in form.tensors:
                # A norm would undo a factor before it, so its own weight gets the factor.
                scaled = not norms or name in norms
                form.tensors[name] = rotation.folded(form.tensors[name].float(), dimensions, scaled=scaled)
        for name in (f"blk.{index}.attn_qkv.weight", f"blk.{index}.attn_qkv.bias"):
            if name in form.tensors:
                rows = form.tensors[name].float()
                ends = (heads * rotation.head_dim, (heads + key_heads) * rotation.head_dim)
                query, key, value = rows.tensor_split(ends)
                folded = [rotation.folded(part, dimensions, scaled=True) for part in (query, key)]
                form.tensors[name] = torch.cat((*folded, value))
