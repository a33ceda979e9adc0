"""Schemes in BERT's blocks of llama.cpp."""

from __future__ import annotations

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.alibi import refuse_other_biases
from hf_posenc.export.gguf.bert_blocks import bert_form, fold_rotations, model_length
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.parts import EQUAL, ModelParts, refuse_other_parts, rotations_of
from hf_posenc.export.layers import rows_of


def table(parts: ModelParts) -> GgufForm:
    """Vectors that are added to the embeddings, as rows of BERT's table; without a scheme, zeros."""
    refuse_other_parts(parts, "additive")
    form, additive = bert_form(parts, "bert"), parts.encoding.additive
    count, width = model_length(parts), int(parts.model.config.hidden_size)
    rows = torch.zeros(count, width) if additive is None else rows_of(additive, count)
    form.tensors["position_embd.weight"] = rows
    return form


def alibi(parts: ModelParts) -> GgufForm:
    """ALiBi with its fixed slopes, the same in both directions."""
    refuse_other_parts(parts, "logit_bias")
    refuse_other_biases(parts)
    return bert_form(parts, "jina-bert-v2")


def one_rope(parts: ModelParts) -> GgufForm:
    """One spectrum of RoPE in all layers, with any base and factor, in all of a head or its first dimensions."""
    rotations = rotations_of(parts)
    frequencies = rotations[0].frequencies
    pairs = int(frequencies.count_nonzero())
    turning = frequencies[:pairs]
    if not pairs or not turning.all():
        raise UnsupportedError("RoPE rotates the first dimensions of every head")
    # Frequencies `factor * theta ** (-m / pairs)`: a straight line in logarithms.
    step = float((turning[-1] / turning[0]).abs()) ** (1 / max(pairs - 1, 1))
    factor, theta = float(turning[0]), step**-pairs
    expected = factor * step ** torch.arange(pairs, dtype=torch.float64)
    if not torch.allclose(turning, expected, rtol=EQUAL, atol=0):
        raise UnsupportedError("the frequencies are not those of RoPE, and these blocks have no table of frequencies")
    form = bert_form(parts, "jina-bert-v3")
    fold_rotations(form, rotations)
    form.metadata.update({"rope.dimension_count": 2 * pairs, "rope.freq_base": theta})
    if abs(factor - 1) > EQUAL:
        form.metadata.update({"rope.scaling.type": "linear", "rope.scaling.factor": 1 / factor})
    return form
