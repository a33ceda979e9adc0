"""Attention with random weights over the embeddings of a sentence, to measure only what a position encoding adds."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hf_posenc.metrics.properties.specimen import build_parts
from hf_posenc.metrics.statistics import relative_l2
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.logits import attention_pairs, pairwise_bias
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.positions import Positions, integer_range


class AttentionProbe(nn.Module):
    """Bidirectional multi-head self-attention with random weights, in which any scheme can be placed.

    The network is that of "You could have designed state of the art positional encoding" (Hugging Face blog, 2024):
    projections without bias for query, key and value, then multi-head attention whose weights and biases are drawn from
    N(0, 0.1^2). It has no mask, no normalisation and no residual connection. Without a scheme, equal tokens therefore
    get equal outputs at every position.

    These outputs are equal bit for bit, which a batched computation does not guarantee: the rows of one matrix product
    may go through different kernels (full tiles and remainders) and differ in the last bit. Each token is therefore
    projected separately and each query attends separately, with the same operations on tensors of the same shape.

    Args:
        hidden_size: width of the embeddings, `hidden`.
        num_heads: number of heads, `heads`; must divide `hidden_size`.
        seed: seed of the weights.

    Raises:
        ValueError: if `num_heads` does not divide `hidden_size`.
    """

    projections: Tensor
    in_projection: Tensor
    in_bias: Tensor
    out_projection: Tensor
    out_bias: Tensor

    def __init__(self, hidden_size: int, num_heads: int = 4, seed: int = 0) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide hidden_size={hidden_size}.")
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return 0.1 * torch.randn(*shape, generator=generator, dtype=torch.float64)

        # The initialisation of nn.Linear: uniform up to 1 / sqrt(inputs).
        uniform = torch.rand(3, hidden_size, hidden_size, generator=generator, dtype=torch.float64)
        self.register_buffer("projections", (2 * uniform - 1) / math.sqrt(hidden_size))
        self.register_buffer("in_projection", normal(3, hidden_size, hidden_size))
        self.register_buffer("in_bias", normal(3, hidden_size))
        self.register_buffer("out_projection", normal(hidden_size, hidden_size))
        self.register_buffer("out_bias", normal(hidden_size))

    def forward(self, embeddings: Tensor, parts: SchemeParts | None = None) -> Tensor:
        """Returns the outputs for all tokens of one sentence.

        Args:
            embeddings: `(length, hidden)` of any dtype; computed in float64.
            parts: the scheme to place in the attention; `None` for no positions.

        Returns:
            `(length, hidden)` float64.
        """
        parts = SchemeParts() if parts is None else parts
        length = embeddings.shape[0]
        positions = Positions(ids=integer_range(0, length), lengths=torch.tensor([[length]]))
        inputs = embeddings.double()
        if parts.additive is not None:
            inputs = inputs + parts.additive(positions)[0].double()
        query, key, value = (self._project(inputs, index).unsqueeze(0) for index in range(3))
        pairs = attention_pairs(parts, query, key, positions, inputs.float().unsqueeze(0), self.head_dim**-0.5)
        query, key, value = pairs.query[0], pairs.key[0], value[0]
        bias = query.new_zeros(self.num_heads, length, length)
        if parts.logit_bias is not None:
            bias = pairwise_bias(parts.logit_bias, pairs)[0].double()
        if parts.logit_scale is not None:
            scale = parts.logit_scale(positions)[0].double().unsqueeze(-1)
            query, bias = query * scale, bias * scale
        rows = [self._attend(query[:, index].contiguous(), key, value, bias[:, index]) for index in range(length)]
        return torch.stack(rows)

    def _project(self, inputs: Tensor, index: int) -> Tensor:
        """`(length, hidden)` -> `(heads, length, head_dim)`, for query, key or value (`index` 0, 1, 2)."""
        first, second, bias = self.projections[index], self.in_projection[index], self.in_bias[index]
        rows = [second.mv(first.mv(row.clone())) + bias for row in inputs]
        return torch.stack(rows).unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1).contiguous()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Attends from one query `(heads, head_dim)` to all keys; `bias` is `(heads, length)`. Returns `(hidden,)`."""
        logits = (query.unsqueeze(1) * key).sum(-1) / math.sqrt(self.head_dim) + bias
        mixed = (logits.softmax(-1).unsqueeze(-1) * value).sum(1)
        return self.out_projection.mv(mixed.flatten()) + self.out_bias


def probe_heads(hidden_size: int) -> int:
    """Returns the number of heads of a probe: 4 as published, or fewer if 4 heads of an even width do not fit."""
    for num_heads in (4, 2, 1):
        if hidden_size % (2 * num_heads) == 0:
            return num_heads
    raise ValueError(f"A probe needs embeddings of an even width, got {hidden_size}.")


def probe_distance(
    probe: AttentionProbe,
    embeddings: Tensor,
    first: tuple[int, ...],
    second: tuple[int, ...],
    scheme: SchemeConfig | None = None,
    *,
    seed: int = 0,
) -> float:
    """Returns the relative L2 distance between the probe's outputs for two occurrences of a word.

    Args:
        probe: the random attention.
        embeddings: `(length, hidden)`, the embeddings of the sentence, from any model.
        first: indices of the tokens of the first occurrence.
        second: indices of the tokens of the second occurrence.
        scheme: the scheme to place in the probe, newly initialised; `None` for no positions.
        seed: seed of the scheme's weights.

    Raises:
        ValueError: if the scheme cannot be built at this width.
    """
    parts = None
    if scheme is not None:
        context = BuildContext(
            hidden_size=embeddings.shape[1],
            num_heads=probe.num_heads,
            head_dim=probe.head_dim,
            causal=False,
            max_positions=max(512, embeddings.shape[0]),
        )
        parts = build_parts(scheme, context, seed)
    with torch.no_grad():
        outputs = probe(embeddings.detach().cpu(), parts)
    return relative_l2(outputs[list(first)], outputs[list(second)])
