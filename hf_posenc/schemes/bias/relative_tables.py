"""Products of queries or keys with vectors that depend on their distance, without storing a vector per pair."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.parts import DeviceConstant
from hf_posenc.schemes.positions import AttentionPairs, Positions
from hf_posenc.schemes.weights import traced

#: For larger `u`, `(1 - u**2) * exp(-u**2 / 2)` is below 2e-9, which is negligible in float32 next to its peak of 1.
RICKER_SUPPORT = 7.0
#: Maximum number of products of keys with all rows of a table that are stored at a time, 4 bytes each.
_MOST_PRODUCTS = 2**23
#: Up to this many rows, products with all of them cost less than selecting those that can occur.
_FEW_ROWS = 64
#: From this many on, it pays to look for keys that are far from all queries.
_MANY_KEYS = 256


def check_whole_positions(keys: Positions, owner: str, remedy: str) -> None:
    """Raises if positions are not integers, which happens with some position maps or `position_ids`.

    Raises:
        UnsupportedError: with the scheme, the dtype found and the remedy.
    """
    if keys.ids.is_floating_point():
        raise UnsupportedError(
            f"{owner} looks up integer distances in a table, but these positions are floating-point "
            f"({keys.ids.dtype}), from a position map or from position_ids. {remedy}"
        )


def clipped_rows(
    pairs: AttentionPairs, first: int, last: int, back: bool = False, buckets: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, tuple[int, int]]:
    """Rows for `selected_products`, in a table of the distances, or `buckets` of them, `first` to `last`.

    With `back`, distances are those from key to query. The second result is the range of rows that can occur, as
    (first, count). Rows are counted from the first.
    """

    def find() -> tuple[Tensor, tuple[int, int]]:
        few = last - first < _FEW_ROWS
        nearest, farthest = (first, last) if few else pairs.occurring(first, last, buckets)
        distance = -pairs.distance if back else pairs.distance
        rows = (distance if buckets is None else buckets(distance)).clamp(nearest, farthest) - nearest
        return rows, (nearest - first, farthest - nearest + 1)

    return pairs.remembered(("rows", first, last, back, buckets), find)


def run_to_newest(pairs: AttentionPairs, behind: int | None = None) -> tuple[int, int] | None:
    """Where the rows of all keys are in a table of distances that a cache keeps, by rising position of the key.

    While tokens are decoded, the distances of the newest token are a run of such a table, so nothing is selected.

    Args:
        pairs: the queries and keys.
        behind: number of rows before that of the query's own token; `None` for as many as there are keys.

    Returns:
        The first row and the number of keys; `None` if these are not the keys up to one query, without gaps, or if it
        is not known.
    """
    length = pairs.key.shape[-2]
    if pairs.query.shape[-2] > 1 or not pairs.keys.keeps_values or (behind is not None and length > behind + 1):
        return None

    def find() -> bool:
        distance = pairs.distance
        if traced() or not distance.is_cpu:
            return False  # It would have to be read from the device.
        return bool((distance == torch.arange(1 - length, 1, device=distance.device)).all())

    return (0 if behind is None else behind + 1 - length, length) if pairs.remembered("is newest", find) else None


def distances_of_run(pairs: AttentionPairs) -> Tensor | None:
    """`(2 * query_len - 1,)` int64: the distances of all pairs, rising, in a training step on a short text.

    All layers together then compute a vector for each of them (`Positions.of_weights`). `None` if the tokens are not
    adjacent, or if it is not known, and in function transforms, which do not support the views of `at_distances`.
    """
    length = pairs.key.shape[-2]
    if not (torch.is_grad_enabled() and pairs.is_small and pairs.query.shape[-2] == length > 1):
        return None
    if type(pairs.query) is not Tensor or torch._C._are_functorch_transforms_active():
        return None

    def find() -> Tensor | None:
        distance = pairs.distance
        if not distance.is_cpu:
            return None  # It would have to be read from the device.
        rising = torch.arange(1 - length, length, device=distance.device)
        return rising if bool((distance == at_distances(rising.repeat(length, 1))).all()) else None

    return pairs.remembered("distances of a run", find)


def at_distances(products: Tensor) -> Tensor:
    """Those of each pair, `(..., query_len, key_len)`, out of products of each query with all vectors of a run.

    Args:
        products: `(..., query_len, 2 * query_len - 1)`, by rising distance.
    """
    length, last = products.shape[-2], products.stride(-1)
    strides = (*products.stride()[:-2], products.stride(-2) - last, last)
    return products.as_strided((*products.shape[:-1], length), strides, products.storage_offset() + (length - 1) * last)


def products_with_vectors(pairs: AttentionPairs, of_keys: Tensor, of_queries: Tensor) -> Tensor:
    """Each key times its vector, plus a single query times that of the key, `(batch, heads, 1, key_len)` float32.

    Args:
        pairs: a query and keys.
        of_keys: `(heads, key_len or 1, head_dim)`.
        of_queries: `(heads, key_len, head_dim)`.
    """
    products = torch.addcmul(pairs.expanded_key.float() * of_keys, pairs.query.float(), of_queries)
    return products.sum(-1).unsqueeze(-2)


def products_of_rows(
    part: nn.Module, pairs: AttentionPairs, table: Tensor, rows: Tensor, occurring: tuple[int, int]
) -> Tensor:
    """The product of each query with the row of the pair in a table, times the layer's factor.

    While tokens are decoded, a cache keeps the transposed, scaled table in float32.

    Args:
        part: the part that owns the table.
        pairs: the queries and keys.
        table: `(..., rows, head_dim)`.
        rows: of `clipped_rows`.
        occurring: of `clipped_rows`.

    Returns:
        `(batch, heads, query_len, key_len)` float32.
    """
    query, factor = pairs.query.float(), pairs.query_scaling
    # A tensor may have the shape of the logits.
    number = 1.0 if isinstance(factor, Tensor) else factor
    # A part without weights may be used on several devices.
    name = "table", number, table.device
    vectors = pairs.keys.kept(part, name, lambda: table.float().transpose(-1, -2) * number)
    vectors = vectors if occurring[1] == table.shape[-2] else vectors.narrow(-1, *occurring)
    products = selected_products(query, vectors, rows)
    return products * factor if isinstance(factor, Tensor) else products


def selected_products(query: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Multiplies, for every pair, the query with the vector of the pair's distance.

    Args:
        query: `(batch, heads, query_len, width)` float32.
        table: `(..., width, rows)` float32.
        rows: `(batch or 1, query_len, key_len)` int64, which row belongs to each pair.

    Returns:
        `(batch, heads, query_len, key_len)`.
    """
    batch, heads, length, width = query.shape
    alike = length == rows.shape[0] == 1
    if alike and table.dim() == 2 and not traced():
        # Torch would expand the table for every head.
        products = torch.mm(query.reshape(-1, width), table)
        return products.index_select(-1, rows.view(-1)).view(batch, heads, 1, rows.shape[-1])
    products, same = query @ table, leading_keys_of_one_row(rows)
    if same == 0 and alike:
        return products.index_select(-1, rows.view(-1))
    near = rows if same == 0 else rows[..., same:]
    selected = products.gather(-1, near.unsqueeze(1).expand(*products.shape[:2], -1, -1))
    if same == 0:
        return selected
    row = int(rows[0, 0, 0])
    return torch.cat((products[..., row : row + 1].expand(-1, -1, -1, same), selected), dim=-1)


def select_rows_of_keys(key: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Multiplies the key of every pair with the vector of the pair's distance.

    All queries of a block share the keys, so that products of keys with all rows of a table would be needed for every
    block. Keys that are far from the whole block are multiplied with one row only, and the others a part at a time.

    Args:
        key: `(batch, heads, key_len, width)` float32.
        table: `(heads, rows, width)` float32.
        rows: `(batch or 1, query_len, key_len)` int64, which row belongs to each pair.

    Returns:
        `(batch, heads, query_len, key_len)`.
    """
    if rows.shape[1] == 1:
        if rows.shape[0] == 1:
            vectors = table.index_select(1, rows.view(-1))
        else:
            vectors = table[:, rows.squeeze(1)].transpose(0, 1)
        return (key * vectors).sum(-1).unsqueeze(-2)
    length = key.shape[-2]
    before = leading_keys_of_one_row(rows)
    near = length - (leading_keys_of_one_row(rows.flip(-1)) if _MANY_KEYS <= length > before else 0)
    pieces = []
    if before:
        pieces.append(_of_one_row(key[..., :before, :], table, rows[..., :before]))
    for start, stop in _pieces(before, near, key.shape[0] * table.shape[0] * table.shape[1]):
        products = key[..., start:stop, :] @ table.transpose(-1, -2)
        index = rows[..., start:stop].transpose(-1, -2).unsqueeze(1).expand(*products.shape[:2], -1, -1)
        pieces.append(products.gather(-1, index).transpose(-1, -2))
    if near < length:
        pieces.append(_of_one_row(key[..., near:, :], table, rows[..., near:]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def _of_one_row(key: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Like `select_rows_of_keys`, for keys whose pairs all have the same row."""
    vector = table[:, int(rows[0, 0, 0])].unsqueeze(-1)
    return (key @ vector).transpose(-1, -2).expand(-1, -1, rows.shape[1], -1)


def _pieces(start: int, stop: int, products_per_key: int) -> list[tuple[int, int]]:
    """Divides the keys `[start, stop)`. A traced program has one piece, because its lengths are open."""
    if traced():
        return [(start, stop)]
    size = max(_MOST_PRODUCTS // products_per_key, 1)
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def leading_keys_of_one_row(rows: Tensor) -> int:
    """Returns how many leading keys share one row of a clipped table for all queries, because they are far from all.

    Args:
        rows: `(batch or 1, query_len, key_len)` int64.
    """
    if torch.compiler.is_compiling() or not rows.is_cpu or rows.shape[-1] < _MANY_KEYS or rows.numel() == 0:
        # The result is a Python number, which breaks a compiled graph and requires a device synchronization.
        return 0
    others = (rows != rows[0, 0, 0]).any(1).any(0).nonzero()
    return int(others[0]) if len(others) else rows.shape[-1]


@functools.lru_cache(maxsize=64)
def turn_frequencies(width: int, base: float) -> DeviceConstant:
    """`(width / 2,)` float64, in turns per position: `base ** (-2 m / width) / (2 pi)`. All layers share it."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return DeviceConstant(base**-exponents / (2 * math.pi))


def angles_of_turns(positions: Tensor, frequencies: DeviceConstant) -> Tensor:
    """`(*positions.shape, width / 2)` float32: angles at positions or distances, for those of `turn_frequencies`."""
    # Full turns are removed in float64 (which mps lacks), because float32 angles are off by 1e-4 at position 4096.
    where = torch.device("cpu") if positions.device.type == "mps" else positions.device
    turns = positions.to(where).unsqueeze(-1).double() * frequencies.on(where)
    return ((turns - turns.round()).float() * (2 * math.pi)).to(positions.device)


def sinusoidal_vectors(positions: Tensor, frequencies: DeviceConstant) -> Tensor:
    """`(*positions.shape, width)` float32: all sines, then all cosines, of `angles_of_turns`."""
    angles = angles_of_turns(positions, frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def sinusoidal_products(
    query: Tensor, frequencies: DeviceConstant, pairs: AttentionPairs, mirrored: bool = False
) -> Tensor:
    """`scaling * query . sinusoid(key position - query position)` of all pairs, by the addition theorems.

    The sinusoid of a difference is the sinusoid of the key, rotated by the position of the query. So each query is
    rotated back once and multiplied with the unrotated sinusoids of the keys. This also works for positions with gaps
    and for real positions. Positions are counted from the first key, so that neither later tokens nor a shift of all
    positions change the result. A single query is multiplied with the sinusoids of the distances themselves.

    Args:
        query: `(batch, heads, query_len, width)` float32; components as in `sinusoidal_vectors`.
        frequencies: of `turn_frequencies`.
        pairs: the positions, and the layer's factor. Layers share the sinusoids.
        mirrored: whether the distance is that from the key to the query instead.

    Returns:
        `(batch, heads, query_len, key_len)` float32.
    """
    factor, name = pairs.query_scaling, (id(frequencies), mirrored)

    def of_distances() -> Tensor:
        distance = -pairs.distance if mirrored else pairs.distance
        return sinusoidal_vectors(distance, frequencies).transpose(-1, -2) * factor

    if query.shape[-2] == 1 and not isinstance(factor, Tensor) and not traced():
        return query @ pairs.remembered(("sinusoids of distances", name, factor), of_distances)
    keys, query_positions = pairs.keys, pairs.query_positions
    origin = keys.ids[:, :1]

    def of_queries() -> tuple[Tensor, Tensor]:
        sine, cosine = sinusoidal_vectors(query_positions - origin, frequencies).unsqueeze(1).chunk(2, dim=-1)
        direct = torch.cat((-cosine if mirrored else cosine, cosine), dim=-1)
        return direct, torch.cat((sine, sine if mirrored else -sine), dim=-1)

    def of_keys() -> Tensor:
        return sinusoidal_vectors(keys.ids - origin, frequencies).unsqueeze(1).transpose(-1, -2)

    direct, exchanged = keys.remembered(("turns", name), of_queries, pairs.query_slots, keys.ids)
    vectors = keys.remembered(("sinusoids", name), of_keys, keys.ids)
    halves_exchanged = query.roll(query.shape[-1] // 2, dims=-1)
    return torch.addcmul(query * direct, halves_exchanged, exchanged) @ vectors * factor


def plus(first: Tensor, second: Tensor, factor: float | Tensor) -> Tensor:
    """`first + factor * second`, in one kernel if the factor is a number."""
    return first + second * factor if isinstance(factor, Tensor) else torch.add(first, second, alpha=factor)


def ricker_wavelets(distance: Tensor, scales: Tensor, shifts: Tensor) -> Tensor:
    """`(1 - u**2) * exp(-u**2 / 2)` with `u = (distance - shift) / scale`, `(*distance.shape, len(scales))` float32."""
    squares = ((distance.unsqueeze(-1).float() - shifts) / scales).square()
    # Beyond u = 10 they are 0 instead of below 1e-19: some processors are slow with subnormal numbers.
    return ((1.0 - squares) * torch.exp(-0.5 * squares)).masked_fill(squares > 100.0, 0.0)
