"""Positions that restart in every chunk, for all keys but those near the query (dual chunk attention)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.schemes.position_maps.pairwise import FarPositionsConfig, last_before
from hf_posenc.schemes.scheme import option, register_scheme


@register_scheme
class DualChunkConfig(FarPositionsConfig):
    """Restarts far positions in every chunk, to extend a model without training (DCA, arXiv:2402.17463, section 3).

    Chunks have `s = chunk_size - local_size` tokens. For query `i` and key `j <= i`, the scheme uses the distance::

        i - j                                    if j is in the chunk of i
        min(i mod s + s, chunk_size) - j mod s   if j is in the chunk before
        chunk_size - j mod s                     otherwise

    Pairs up to `local_size` apart keep their distance, and no distance is larger than `chunk_size`. It needs no
    training. A query uses `i` or `chunk_size` in the second line, so it has only one far position. A bias corrects the
    rotation of far pairs, so the cache holds the keys as rotated by the layer.

    This is what the paper's code (github.com/HKUNLP/ChunkLlama) and vLLM compute. In the paper, the largest distance is
    `chunk_size - 1`. Here, chunks are chunks of positions; these programs count tokens. vLLM's sparse attention, which
    skips keys of long prompts, is not included. As an extension of the paper, distance biases (`alibi`, `t5`) are
    supported too.

    Qwen2.5-1M (arXiv:2501.15383) has both options in its `dual_chunk_attention_config`. transformers ignores it, so the
    native scheme of these models is `rope`. If it has `original_max_position_embeddings`, `L`, vLLM multiplies all
    logits of a prompt of `n` tokens by `max(1, 1 + 0.1 * log(n / L)) ** 2`, and those of generated tokens by the
    factors of their query and key at the time. The paper's code has 0.05 instead of 0.1. Compose with
    `LogNScaleConfig(L, yarn_weight=0.1)` for that. It counts the tokens up to each query, which agrees with vLLM for
    the last token of a prompt, and gives the same numbers in generation and in one call.

    Args:
        inner: a rotation proportional to positions (`rope` with any scaling, `p_rope`), a distance bias, or both.
        chunk_size: the largest distance in tokens, 8192 in vLLM. The paper's code has 3/4 of the trained length.
        local_size: the distance up to which pairs never change, 1024 in vLLM, less than half of `chunk_size`. The
            paper's code has 1/8 of the trained length.
    """

    name: ClassVar[str] = "dual_chunk"

    chunk_size: int = option(8192, minimum=3)
    local_size: int = option(1024, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.local_size >= self.chunk_size:
            raise ValueError(
                f"DualChunkConfig.local_size is {self.local_size}, and chunk_size is {self.chunk_size}. Chunks have "
                "chunk_size - local_size tokens and must be longer than local_size, because pairs that are not in the "
                "same chunk or the next are always far. Give chunk_size in tokens, and a local_size of at most "
                f"{(self.chunk_size - 1) // 2}; the paper's code has a sixth of chunk_size."
            )

    @property
    def first_query(self) -> int:
        """The first query more than `local_size` tokens into a chunk that has another before it."""
        return self.chunk_size + 1

    def query(self, ids: Tensor) -> Tensor:
        """Returns `chunk_size`."""
        return torch.full_like(ids, self.chunk_size)

    def key(self, ids: Tensor) -> Tensor:
        """Returns `j mod s`."""
        return ids % (self.chunk_size - self.local_size)

    def last_key(self, ids: Tensor) -> Tensor:
        """Returns the end of the chunk before that of the query or, near the start of a chunk, of the one before it."""
        length = self.chunk_size - self.local_size
        # Rounded up, so that a query exactly `local_size` into its chunk is still near the chunk before.
        chunks = torch.div(self.local_size - ids, length, rounding_mode="floor")
        return last_before(chunks * -length - length)
