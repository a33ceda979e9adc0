"""Schemes in GPT-like blocks of llama.cpp."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.alibi import refuse_other_biases
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.gpt_blocks import gpt_form, map_queries_and_keys
from hf_posenc.export.gguf.parts import ModelParts, Rotation, refuse_other_parts, rotations_of
from hf_posenc.export.gguf.rope_scaling import scaling_entries
from hf_posenc.export.layers import rows_of
from hf_posenc.schemes import RopeConfig

#: Divides positions if nothing rotates.
_STOPPED = 1e30
#: The slope of the last of 2^n heads is 2^-8 (arXiv:2108.12409).
_ALIBI = 8.0
#: Relative difference of two frequencies that count as equal. Those of RoPE are rounded to float32.
_EQUAL = 2e-6


def vectors(parts: ModelParts) -> GgufForm:
    """Vectors that are added to the embeddings, as a table of positions."""
    refuse_other_parts(parts, "additive")
    if parts.encoding.additive is None:
        raise UnsupportedError("the scheme adds no vectors to the embeddings")
    return _with_vectors(parts, _sequential(parts, "gpt2", "the architecture 'gpt2' with a table of positions"))


def alibi_after_norm(parts: ModelParts) -> GgufForm:
    """ALiBi in BLOOM, which also normalises its embeddings."""
    refuse_other_parts(parts, "logit_bias")
    refuse_other_biases(parts)
    return _sequential(parts, "bloom", "the architecture 'bloom', which has ALiBi")


def alibi_and_vectors(parts: ModelParts) -> GgufForm:
    """ALiBi, vectors, both, or none of them."""
    refuse_other_parts(parts, "logit_bias", "additive")
    biased = any(layer.logit_bias is not None for layer in parts.layers)
    if biased:
        refuse_other_biases(parts)
    added = parts.encoding.additive is not None
    what = [name for name, found in (("ALiBi", biased), ("a table of positions", added)) if found]
    form = _sequential(parts, "mpt", f"the architecture 'mpt' with {' and '.join(what) or 'no positions'}")
    if biased:
        form.metadata["attention.max_alibi_bias"] = _ALIBI
    return _with_vectors(parts, form) if added else form


def scaled_rotation(parts: ModelParts) -> GgufForm:
    """RoPE with linear scaling or YaRN, with the options that llama.cpp reads."""
    rotations = rotations_of(parts)
    entries = scaling_entries(parts.scheme, float(rotations[0].factors[0]))
    assert isinstance(parts.scheme, RopeConfig)
    kind = entries["rope.scaling.type"]
    # The metadata has the factor of cosine and sine.
    plain = [replace(one, factors=torch.ones_like(one.factors)) for one in rotations]
    return _rotated(parts, plain, parts.scheme.theta, entries, f"'gptneox' with rope.scaling.type {kind!r}")


def geometric_rotation(parts: ModelParts) -> GgufForm:
    """A rotation whose frequencies decrease by a constant factor; pairs may also stand still."""
    rotations = rotations_of(parts)
    turning = rotations[0].frequencies.abs()
    turning = turning[turning > 0].sort(descending=True).values
    count = len(turning)
    if count == 0:
        entries: dict[str, int | float | str | bool] = {"rope.scaling.type": "linear", "rope.scaling.factor": _STOPPED}
        return _rotated(parts, rotations, 10000.0, entries, "'gptneox' with stopped positions")
    # llama.cpp computes frequency * base ** (-pair / count).
    base = 10000.0 if count == 1 else float((turning[0] / turning[-1]) ** (count / (count - 1)))
    computed = turning[0] * base ** -(torch.arange(count, dtype=torch.float64) / count)
    if not torch.allclose(turning, computed, rtol=_EQUAL, atol=0):
        raise UnsupportedError("the frequencies do not decrease by a constant factor from pair to pair")
    entries = {}
    if abs(float(turning[0]) - 1) > _EQUAL:
        entries = {"rope.scaling.type": "linear", "rope.scaling.factor": 1 / float(turning[0])}
    return _rotated(parts, rotations, base, entries, "'gptneox'")


def _rotated(
    parts: ModelParts,
    rotations: list[Rotation],
    base: float,
    entries: dict[str, int | float | str | bool],
    name: str,
) -> GgufForm:
    """GPT-NeoX's blocks. llama.cpp rotates the first dimensions of a head, pair `m` at `m` and `m + pairs`."""
    form, head_dim = gpt_form(parts, "gptneox", f"the architecture {name}"), parts.layers[0].head_dim
    # Unlike the others, this architecture does not read its output from the embeddings.
    form.tensors.setdefault("output.weight", form.tensors["token_embd.weight"])
    frequencies = rotations[0].frequencies
    turning = [pair for pair in frequencies.abs().argsort(descending=True, stable=True).tolist() if frequencies[pair]]
    # A pair that turns backwards turns forwards with its dimensions exchanged.
    first = [2 * pair + int(frequencies[pair] < 0) for pair in turning]
    order = [*first, *(dimension ^ 1 for dimension in first)]
    order += [dimension for dimension in range(head_dim) if dimension // 2 not in turning]
    map_queries_and_keys(form, head_dim, lambda layer, rows: rotations[layer].folded(rows)[:, order])
    parallel = bool(getattr(parts.stack.config, "use_parallel_residual", False))
    rope = {"rope.dimension_count": 2 * len(turning) or head_dim, "rope.freq_base": base}
    form.metadata.update({"use_parallel_residual": parallel, **rope, **entries})
    return form


def _sequential(parts: ModelParts, architecture: str, carrier: str) -> GgufForm:
    if getattr(parts.stack.config, "use_parallel_residual", False):
        raise UnsupportedError(
            "the model adds attention and feed-forward to the same residual; this architecture of llama.cpp adds one "
            "after the other"
        )
    return gpt_form(parts, architecture, carrier)


def _with_vectors(parts: ModelParts, form: GgufForm) -> GgufForm:
    count = form.metadata["context_length"]
    assert parts.encoding.additive is not None
    assert isinstance(count, int)
    form.tensors["position_embd.weight"] = rows_of(parts.encoding.additive, count)
    return form
