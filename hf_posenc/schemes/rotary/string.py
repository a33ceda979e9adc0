"""Rotations in a learned basis (STRING)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DeviceConstant, Positions, QueryKeyMap
from hf_posenc.schemes.rotary.learned_frequencies import LearnedFrequenciesMap
from hf_posenc.schemes.rotary.rope import RotaryConfig, RotaryMap, by_frequencies_alone
from hf_posenc.schemes.rotary.rotation_kernel import (
    RotationFactors,
    apply_rotation,
    factors_of_angles,
    rotation_factors,
)
from hf_posenc.schemes.scheme import BuildContext, option, register_scheme
from hf_posenc.schemes.weights import Layers, traced


class RotationInBasis(QueryKeyMap):
    """Changes the basis of queries and keys and then rotates them.

    Args:
        rotation: the rotation in the new basis.
        num_key_heads: number of key heads if every key head has a separate basis; `None` for one basis.
    """

    rotary_dim: int
    reads_magnitude = False

    def __init__(self, rotation: RotaryMap, num_key_heads: int | None) -> None:
        super().__init__()
        self.rotation = by_frequencies_alone(rotation, type(self).__name__)
        self.rotary_dim = rotation.rotary_dim
        self.whole_heads = num_key_heads is not None

    def basis(self) -> Tensor:
        """An orthogonal matrix with the basis in its rows, `(key_value_heads or 1, rotary_dim, rotary_dim)` float32."""
        raise NotImplementedError

    def phases(self, positions: Positions) -> tuple[Tensor, ...]:
        """Returns the angle of each pair, `(batch or 1, key_value_heads or 1, query_len, rotary_dim / 2)` in radians,
        and the transposed basis.

        For one token at the same position in every row, returns only the transposed basis after the token's rotation,
        `(1, key_value_heads or 1, rotary_dim, rotary_dim)`: queries and keys then need nothing but a product with it.
        """
        return self._phases(Layers([self]), positions)

    def _phases(self, layers: Layers, positions: Positions) -> tuple[Tensor, ...]:
        """The phases of several layers, with an axis of layers in front, or of one layer without it."""

        def of_weights() -> tuple[Tensor, Tensor]:
            whole = self if len(layers) == 1 else layers.stacked()
            frequencies, columns = whole.rotation.inverse_frequencies(positions.lengths), whole.basis().mT
            axes = () if whole is self else (len(layers), 1)
            return frequencies.reshape(*axes, -1, 1, frequencies.shape[-1]), columns

        def of_one_token() -> tuple[Tensor, ...]:
            frequencies, columns = of_weights()
            layout, flat = self.rotation.layout, columns.flatten(0, -3)
            quarter = rotation_factors(torch.zeros_like(flat), torch.ones_like(flat), layout, flat.dtype)
            turned = apply_rotation(flat.unsqueeze(1), quarter, layout).view(columns.shape)
            shape = (*columns.shape[:-3], -1, 1, columns.shape[-1])
            return self.rotation.for_both_of_pair(frequencies).view(shape), columns, turned

        ids = positions.remembered("ids of pairs", lambda: positions.ids[:, None, :, None].float(), positions.ids)
        if not traced() and ids.numel() == 1:
            frequencies, columns, turned = positions.kept(layers, "turned basis", of_one_token)
            angles = ids * frequencies
            return (torch.addcmul(columns * angles.cos(), turned, angles.sin()),)
        frequencies, columns = positions.kept(layers, "basis", of_weights)
        return ids * frequencies, columns

    def prepared(self, phases: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns the factors of a rotation that the basis lacks, and the basis, in the dtype of the heads."""
        *angles, columns = phases
        return *(factors_of_angles(tensor, self.rotation.layout, dtype) for tensor in angles), columns.to(dtype)

    def map_query(self, query: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """`(batch, heads, query_len, head_dim)` -> the same shape and dtype."""
        *factors, columns = phases
        if columns.dtype != query.dtype or (factors and not isinstance(factors[0], RotationFactors)):
            *factors, columns = self.prepared(phases, query.dtype)
        width, key_heads = query.shape[-1], columns.shape[-3]
        if key_heads not in (1, query.shape[1]):
            if query.shape[-2] == 1 and not traced():  # As in `apply_rotation`.
                grouped = query.reshape(query.shape[0], key_heads, -1, width)
                return self.map_query(grouped, (*factors, columns)).view(query.shape)
            columns = columns.repeat_interleave(query.shape[1] // key_heads, dim=-3)
        whole = self.rotary_dim == width
        if whole and query.shape[:2] == (1, columns.shape[-3]):
            # Fewer operators than a product of four dimensions.
            changed = torch.bmm(query.squeeze(0), columns.flatten(0, -3)).unsqueeze(0)
        else:
            changed = (query if whole else query[..., : self.rotary_dim]) @ columns
        if not whole:
            changed = torch.cat((changed, query[..., self.rotary_dim :]), dim=-1)
        changed = changed.to(query.dtype)
        return apply_rotation(changed, factors[0], self.rotation.layout) if factors else changed

    def map_key(self, key: Tensor, phases: tuple[Any, ...]) -> Tensor:
        """`(batch, key_value_heads, query_len, head_dim)` -> the same shape and dtype."""
        return self.map_query(key, phases)


class CayleyMap(RotationInBasis):
    """A rotation in a basis learned as the Cayley transform of an antisymmetric matrix."""

    def __init__(self, rotation: RotaryMap, num_key_heads: int | None) -> None:
        super().__init__(rotation, num_key_heads)
        width = self.rotary_dim
        self._above_diagonal = DeviceConstant(torch.triu_indices(width, width, offset=1, device="cpu"))
        # At first, the basis is the identity.
        self.skew = self.learned("skew", (num_key_heads or 1, width * (width - 1) // 2), nn.init.zeros_)
        self._fixed: Tensor | None = None

    def fix_weights(self) -> None:
        """Computes the basis, because ONNX has no operator that solves a linear system."""
        self._fixed = self.basis().detach()

    def basis(self) -> Tensor:
        """Returns `(I - S) (I + S)**-1`; the parameter is the part of `S` above the diagonal."""
        if self._fixed is not None:
            return self._fixed
        entries = self.skew.float()
        rows, columns = self._above_diagonal.on(entries.device)
        upper = entries.new_zeros(*entries.shape[:-1], self.rotary_dim, self.rotary_dim)
        upper[..., rows, columns] = entries
        skew = upper - upper.mT
        identity = torch.eye(self.rotary_dim, dtype=torch.float32, device=entries.device)
        # The two factors commute. I + S is never singular, so no check is needed, which would synchronise a GPU.
        return torch.linalg.solve_ex(identity + skew, identity - skew)[0]

    @classmethod
    def of_layers(cls, layers: Layers, positions: Positions, dtype: torch.dtype) -> list[tuple[Any, ...]] | None:
        """What `prepared` returns for each of several layers; `None` if their frequencies or bases are fixed."""
        first = layers[0]
        if any(layer._fixed is not None for layer in layers) or type(first.rotation) is not LearnedFrequenciesMap:
            return None
        *angles, columns = first._phases(layers, positions)
        *factors, columns = first.prepared((*(tensor.flatten(0, 1) for tensor in angles), columns), dtype)
        if not factors:
            return [(tensor,) for tensor in columns.unbind(0)]
        direct, other = (_apart(factor, len(layers)) for factor in factors[0])
        return list(zip(map(RotationFactors, direct, other), columns.unbind(0), strict=True))


def _apart(factor: Tensor | None, layers: int) -> Any:
    return (None,) * layers if factor is None else torch.unflatten(factor, 0, (layers, -1)).unbind(0)


class CirculantRotation(RotaryMap):
    """The rotation that an antisymmetric circulant matrix generates, in the basis of the discrete Fourier transform.

    The pairs ("half" layout) are cosine and sine of the Fourier frequencies `1 .. d/2 - 1`. The last pair is the mean
    and the alternating sum, which antisymmetric circulant matrices do not rotate.

    Args:
        inverse_frequencies: `(rotary_dim / 2,)` float32, the initial frequencies; the last is not used.
        num_key_heads: number of key heads if every key head has its own generator; `None` for one.
    """

    def __init__(self, inverse_frequencies: Tensor, num_key_heads: int | None) -> None:
        super().__init__(inverse_frequencies, "half")
        self.whole_heads = num_key_heads is not None
        width, turning = self.rotary_dim, self.rotary_dim // 2 - 1
        steps = torch.arange(1, turning + 1, dtype=torch.float64, device="cpu")
        sines = (2 * math.pi / width * steps * steps.unsqueeze(-1)).sin()
        # The sine transform is its own inverse up to a factor.
        initial = 2 / width * inverse_frequencies[:turning].double() @ sines
        self._sines = DeviceConstant(sines.float())
        self._initial = DeviceConstant(initial.float())
        self.generator_offsets = self.learned("generator_offsets", (num_key_heads or 1, turning), nn.init.zeros_)

    def generator(self) -> Tensor:
        """`(key_value_heads or 1, d/2 - 1)` float32: `l[1] .. l[d/2 - 1]` in the first column of the generator."""
        return self._initial.on(self.generator_offsets.device) + self.generator_offsets.float()

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """`(rotary_dim / 2,)` or `(key_value_heads, rotary_dim / 2)` float32: the generator's eigenvalues."""
        generator = self.generator()
        eigenvalues = 2 * (generator.unsqueeze(-1) * self._sines.on(generator.device)).sum(dim=-2)
        frequencies = nn.functional.pad(eigenvalues, (0, 1))
        return frequencies if self.whole_heads else frequencies[0]


class CirculantMap(RotationInBasis):
    """A rotation in the Fourier basis. Queries and keys are not transformed back, because inner products are the same.

    Args:
        rotation: the rotation that a circulant matrix generates.
        num_key_heads: as given to the rotation.
    """

    def __init__(self, rotation: CirculantRotation, num_key_heads: int | None) -> None:
        super().__init__(rotation, num_key_heads)
        self._basis = DeviceConstant(real_fourier_basis(self.rotary_dim))

    def basis(self) -> Tensor:
        """`(1, rotary_dim, rotary_dim)`."""
        return self._basis.on(next(self.rotation.parameters()).device)


def real_fourier_basis(width: int) -> Tensor:
    """`(1, width, width)` float32 with orthonormal rows, in the order of `CirculantRotation`."""
    steps = torch.arange(width, dtype=torch.float64, device="cpu")
    angles = 2 * math.pi / width * steps[1 : width // 2].unsqueeze(-1) * steps
    constant, alternating = torch.ones_like(steps) / math.sqrt(2), (math.pi * steps).cos() / math.sqrt(2)
    rows = torch.cat((angles.cos(), constant.unsqueeze(0), angles.sin(), alternating.unsqueeze(0)))
    return (math.sqrt(2 / width) * rows).float().unsqueeze(0)


@register_scheme
class StringConfig(RotaryConfig):
    """RoPE in a learned orthogonal basis, the most general relative rotation (STRING, arXiv:2502.02562, section 3).

    A query or key `x` at position `p` becomes, in the two forms of the paper::

        cayley:     rope(P x, p)         P = (I - S) (I + S) ** -1,  S antisymmetric         (eq. 10)
        circulant:  exp(p (C - C^T)) x   C[i, j] = c[(i - j) mod rotary_dim]                 (eq. 11)

    "cayley" learns the `rotary_dim * (rotary_dim - 1) / 2` entries of `S` above the diagonal, initially zero, and the
    frequencies of RoPE as in `learned_rope`, so the untrained scheme is RoPE. "circulant" learns the antisymmetric half
    of `c`, `l[m] = c[m] - c[-m]` for `m = 1 .. rotary_dim / 2 - 1` (the other half cancels), as a difference from its
    initial value. The paper does not specify this value. Here the generator starts with RoPE's frequencies except the
    lowest, in the Fourier basis in which all circulant matrices are diagonal and in which the scheme is computed.

    Queries and keys share `P` or `C`. The paper has one matrix per head. Here there is one per key head of every layer;
    query heads use the matrix of their key head. Not to be confused with ShifTed Rotary position embeddING
    (arXiv:2410.18745), which has the same name.

    Args:
        variant: "cayley" (better in the paper) or "circulant" (fewer parameters).
        theta: the base of the initial frequencies.
        per_head: whether every key head has its own matrix; `False` for one per layer.
        learned_frequencies: whether "cayley" learns the frequencies too, as the paper does.
        rotary_dim: number of leading dimensions of a head that are mapped; `None` as in `RopeConfig`.
        layout: the pairing for "cayley", as in `RopeConfig`; "circulant" has no pairs.
    """

    name: ClassVar[str] = "string"
    per_layer: ClassVar[bool] = True

    variant: str = option("cayley", choices=("cayley", "circulant"))
    theta: float = 10000.0
    per_head: bool = option(True)
    learned_frequencies: bool = option(True)
    rotary_dim: int | None = None
    layout: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "circulant" and not self.learned_frequencies:
            raise ValueError(
                "StringConfig.learned_frequencies is False, but the variant 'circulant' learns only frequencies. Use "
                "True, the variant 'cayley', or the scheme 'rope'."
            )
        if self.variant == "circulant" and self.layout != "auto":
            raise ValueError(
                f"StringConfig.layout is {self.layout!r}, but the variant 'circulant' mixes all rotated dimensions and "
                "has no pairs. Leave it out, or use the variant 'cayley'."
            )

    @property
    def leaves_layout_open(self) -> bool:
        """Only "cayley" has pairs; "circulant" stays without a layout."""
        return self.variant == "cayley" and super().leaves_layout_open

    def rotation(self, context: BuildContext) -> RotationInBasis:
        """The map of queries and keys.

        Raises:
            ValueError: as `frequencies`, or if the rotary width is 2 for "circulant".
        """
        frequencies = self.frequencies(context)
        heads = context.key_heads if self.per_head else None
        if self.variant == "circulant":
            if len(frequencies) < 2:
                raise ValueError(
                    "StringConfig with the variant 'circulant' would map 2 dimensions, but an antisymmetric circulant "
                    "matrix of that size is zero. Give rotary_dim=4 or more."
                )
            return CirculantMap(CirculantRotation(frequencies, heads), heads)
        rotation = RotaryMap(frequencies, self.layout)
        if self.learned_frequencies:
            rotation = LearnedFrequenciesMap(frequencies, self.layout, heads)
        return CayleyMap(rotation, heads)
