"""The forms in which a bias reaches an attention function: what is known of it decides what it costs.

========================  ==================================================================================
`DistanceForm`            a function of distance: one vector per head
`SeparableForm`           a number per key minus one per query, of which softmax does not see the second
`RowsForm`                anything else: a function that computes the bias of some rows of queries
========================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DistanceForm:
    """A bias that depends on distance alone.

    Args:
        vector: `(heads, query_len + key_len - 1)` float32, by rising distance: query i and key j have
            `vector[:, j - i + query_len - 1]`.
        query_length: number of queries.
        key_length: number of keys.
        slopes: `(heads,)` float32 where the bias of every key behind the query is `slope * distance`.
    """

    vector: Tensor
    query_length: int
    key_length: int
    slopes: Tensor | None = None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.vector.shape[0]

    @property
    def requires_grad(self) -> bool:
        """Whether the bias is learned."""
        return self.vector.requires_grad

    def rows(self, start: int, stop: int, key_count: int | None = None) -> Tensor:
        """`(1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys."""
        if self.query_length == 1:
            row = self.vector[None, :, None]
            return row if key_count is None else row[..., :key_count]
        if torch.compiler.is_exporting():
            # A view would hold the length that the model was exported with.
            keys = torch.arange(self.key_length, device=self.vector.device)[:key_count]
            queries = torch.arange(start, stop, device=self.vector.device).unsqueeze(-1)
            return self.vector[:, keys - queries + self.query_length - 1].unsqueeze(0)
        own = self.vector[:, self.query_length - stop : self.query_length - start + self.key_length - 1]
        return own.unfold(-1, self.key_length, 1)[..., :key_count].flip(-2).unsqueeze(0)

    def dense(self) -> Tensor:
        """`(1, heads, query_len, key_len)` float32."""
        return self.rows(0, self.query_length)

    @property
    def batch(self) -> int:
        """Rows of the batch that have a bias of their own."""
        return 1

    def of_first(self, key_length: int) -> DistanceForm:
        """The same for the first `key_length` keys only."""
        vector = self.vector[:, : self.query_length + key_length - 1]
        return DistanceForm(vector, self.query_length, key_length, self.slopes)

    def double(self) -> DistanceForm:
        """The same in float64."""
        slopes = None if self.slopes is None else self.slopes.double()
        return DistanceForm(self.vector.double(), self.query_length, self.key_length, slopes)

    def separable(self) -> SeparableForm | None:
        """The same as a number per key, where that is possible for all keys behind a query."""
        if self.slopes is None:
            return None
        slots = torch.arange(self.key_length, device=self.vector.device)
        queries = torch.arange(self.query_length, device=self.vector.device) + (self.key_length - self.query_length)
        return SeparableForm((self.slopes.unsqueeze(-1) * slots).unsqueeze(0), queries)


@dataclass(frozen=True)
class SeparableForm:
    """`terms[j] - terms[i]` for query i and every key j that it sees.

    Args:
        terms: `(batch or 1, heads, key_len)` float32.
        query_slots: `(query_len,)` int64, which of the keys belongs to the same token as each query.
    """

    terms: Tensor
    query_slots: Tensor

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.terms.shape[1]

    @property
    def batch(self) -> int:
        """Rows of the batch that have a bias of their own."""
        return self.terms.shape[0]

    @property
    def requires_grad(self) -> bool:
        """Whether the bias is learned."""
        return self.terms.requires_grad

    def of_first(self, key_length: int) -> SeparableForm:
        """The same for the first `key_length` keys only."""
        return SeparableForm(self.terms[..., :key_length], self.query_slots)

    def double(self) -> SeparableForm:
        """The same in float64."""
        return SeparableForm(self.terms.double(), self.query_slots)

    def rows(self, start: int, stop: int, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys."""
        if len(self.query_slots) == 1:
            # The fewest operators for a decoding step, where each costs more than what it computes.
            own = self.terms.index_select(-1, self.query_slots)
            terms = self.terms if key_count is None else self.terms[..., :key_count]
            return (terms - own).unsqueeze(-2)
        own = self.terms.index_select(-1, self.query_slots[start:stop])
        return self.terms[..., :key_count].unsqueeze(-2) - own.unsqueeze(-1)

    def dense(self) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)` float32."""
        return self.rows(0, len(self.query_slots))


@dataclass(frozen=True)
class RowsForm:
    """A bias that has to be computed for every pair.

    Args:
        compute: `(start, stop, key_count)` -> `(batch or 1, heads, stop - start, key_count)` float32 of those queries
            and the first keys.
        query_length: number of queries.
        key_length: number of keys.
        heads: number of query heads.
    """

    compute: Callable[[int, int, int], Tensor]
    query_length: int
    key_length: int
    heads: int

    def of_first(self, key_length: int) -> RowsForm:
        """The same for the first `key_length` keys only, behind which no query sees any."""
        return RowsForm(self.compute, self.query_length, key_length, self.heads)

    def double(self) -> RowsForm:
        """The same in float64."""
        return RowsForm(lambda *rows: self.compute(*rows).double(), self.query_length, self.key_length, self.heads)

    def rows(self, start: int, stop: int, key_count: int | None = None) -> Tensor:
        """`(batch or 1, heads, rows, keys)` float32 of the queries `[start, stop)` and the first `key_count` keys.

        Where fewer than all keys are asked for, no query may see the others.
        """
        return self.compute(start, stop, self.key_length if key_count is None else key_count)

    def dense(self) -> Tensor:
        """`(batch or 1, heads, query_len, key_len)` float32."""
        return self.rows(0, self.query_length)


BiasForm = DistanceForm | SeparableForm | RowsForm
