"""The bias of a block of queries, and the gradient of a distance bias from the gradient of its scores.

A distance bias is a Toeplitz matrix, defined by one vector per head. With the queries in reverse order it becomes a
Hankel matrix, `bias[i, j] = vector[i + j]`, which is a *view* of the vector with both strides 1. Torch's kernels accept
it as an attention mask, and the full matrix is never allocated. The mask of a causal layer is part of the vector.

The gradient of the vector is the sum over each diagonal of the gradient of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.blockwise import Block, additive_mask, rows_of
from hf_posenc.attention.windows import Windows


class BlockBias:
    """The bias of a block, including the mask. Without mask and terms it is a view of the vector.

    Args:
        vector: `(heads, query_len + key_len - 1)` by rising distance, or `None`.
        terms: `(batch, heads, key_len)`, added to the logits of each key, or `None`.
        query_slots: `(query_len,)` int64, the keys whose terms are subtracted for each query; with `terms`.
        mask: the output of `fitting_mask`.
        query_length: number of queries.
        causal: whether query i does not see keys after key i.
        windows: the keys that are needed.
    """

    def __init__(
        self,
        vector: Tensor | None,
        terms: Tensor | None,
        query_slots: Tensor | None,
        mask: Tensor | None,
        query_length: int,
        causal: bool,
        windows: Windows | None,
    ) -> None:
        self.vector = None if vector is None else _masked(vector, query_length, causal, windows)
        self.terms = terms
        self.query_terms = None if terms is None or query_slots is None else terms.index_select(-1, query_slots)
        self.mask = mask
        self.query_length = query_length
        self.causal = causal
        self.windows = windows

    def of(self, block: Block) -> Tensor:
        """Returns `(batch or 1, heads, rows, keys)` float32, with queries reversed."""
        bias = None if self.vector is None else self._of_vector(self.vector, block)
        if self.terms is not None:
            of_terms = self._of_terms(self.terms, block)
            bias = of_terms if bias is None else of_terms.add_(bias)
        assert bias is not None
        if self.mask is not None:
            rows = rows_of(self.mask, block.items, block.heads, block.start, block.stop)
            mask = additive_mask(rows[..., block.keys].flip(-2), bias.dtype)
            return bias + mask if self.terms is None else bias.add_(mask)
        # Accelerator kernels need rows that start at aligned addresses.
        return bias if bias.device.type == "cpu" else bias.contiguous()

    def _of_vector(self, vector: Tensor, block: Block) -> Tensor:
        vector = vector[block.heads]
        farthest = self.query_length - block.stop + block.first
        shape = (1, vector.shape[0], block.stop - block.start, block.last - block.first)
        return vector.as_strided(shape, (0, vector.stride(0), 1, 1), vector.storage_offset() + farthest)

    def _of_terms(self, terms: Tensor, block: Block) -> Tensor:
        assert self.query_terms is not None
        rows = self.query_terms[block.items, block.heads, block.start : block.stop].flip(-1)
        bias = terms[block.items, block.heads, block.keys].unsqueeze(-2) - rows.unsqueeze(-1)
        if self.causal and self.vector is None and self.mask is None:
            # Only the queries' own keys, the last ones, can be later than one of them.
            count = block.stop - block.start
            later = torch.ones(count, count, dtype=torch.bool, device=bias.device).tril(-1).flip(-1)
            bias[..., block.start - block.first :].add_(additive_mask(~later, bias.dtype))
        return bias


def _masked(vector: Tensor, query_length: int, causal: bool, windows: Windows | None) -> Tensor:
    """The vector with -inf at the distances of hidden keys."""
    vector = vector.contiguous()
    if causal:
        vector = vector.clone()
        vector[:, query_length:] = -torch.inf
    if windows is not None:
        # A block contains keys that only some of its rows need. For the other rows, their weights would be subnormal
        # numbers, which are a hundred times slower on some processors.
        distances = torch.arange(vector.shape[1], device=vector.device) - (windows.key_length - 1)
        vector = vector.masked_fill(windows.unneeded(distances), -torch.inf)
    return vector


def diagonal_sums(scores: Tensor) -> Tensor:
    """Sums the entries of `(count, rows, keys)` with the same row plus key: `(count, rows + keys - 1)`.

    In a view with rows that are one element shorter, diagonals become columns. Only the columns at both ends contain
    two diagonals each.
    """
    count, rows, width = scores.shape
    if width <= 2 * rows + 1:
        return _sums_of_corner(scores)
    columns = scores.as_strided((count, rows, width - 1), (rows * width, width - 1, 1), scores.storage_offset()).sum(1)
    first = _sums_of_corner(scores[..., :rows])[:, :rows]
    last = _sums_of_corner(scores[..., -rows:])[:, rows - 1 :]
    return torch.cat((first, columns[:, rows:], last), dim=1)


def _sums_of_corner(scores: Tensor) -> Tensor:
    """Same as `diagonal_sums`, using a copy in which each row is shifted by one more element."""
    count, rows, width = scores.shape
    pitch = rows + width
    longer = scores.new_zeros(count, rows, pitch)
    longer.as_strided(scores.shape, (rows * pitch, pitch + 1, 1)).copy_(scores)
    return longer[..., : rows + width - 1].sum(1)
