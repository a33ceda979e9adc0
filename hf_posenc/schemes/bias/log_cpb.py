"""Log-spaced continuous position bias (Log-CPB), as in Swin v2."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.grids import GridBias, entries_of_pairs
from hf_posenc.schemes.parts import DistanceBias, LogitBias, Positions
from hf_posenc.schemes.scheme import BuildContext, SharedConfig, option, register_scheme
from hf_posenc.schemes.validation import LARGEST_FACTOR, LARGEST_WIDTH, SMALLEST_FACTOR
from hf_posenc.schemes.weights import of_stacked, traced

#: Swin v2 gives the longest displacement in a window this coordinate before the logarithm, whose base it is too.
_EDGE = 8.0


class LogCpbNetwork(LogitBias):
    """A small network of the logarithms of a displacement, limited to the range of a sigmoid."""

    no_weight_decay = frozenset({"hidden_weight", "hidden_bias", "output_weight"})

    def __init__(self, config: LogCpbConfig, context: BuildContext) -> None:
        super().__init__()
        self.axes = config.axes
        self.window = config.window
        self.limit = config.limit
        self.hidden_weight = self.learned("hidden_weight", (config.width, config.axes), std=context.initializer_range)
        self.hidden_bias = self.learned("hidden_bias", config.width, nn.init.zeros_)
        self.output_weight = self.learned(
            "output_weight", (context.num_heads, config.width), std=context.initializer_range
        )

    @torch.no_grad()
    def adopt(self, native: Tensor) -> bool:
        """Copies a stock network, a row for each hidden unit: its weights, its offset, and its weights in the heads."""
        parts = (self.hidden_weight, self.hidden_bias.unsqueeze(-1), self.output_weight.T)
        widths = [part.shape[1] for part in parts]
        if native.shape != (len(self.hidden_bias), sum(widths)):
            return False
        for part, numbers in zip(parts, native.split(widths, dim=1), strict=True):
            part.copy_(numbers)
        return True

    def coordinates(self, distance: Tensor) -> Tensor:
        """The logarithm of the place of the query minus that of the key, float32 of the shape of `distance`."""
        back = -distance.float()
        if self.window is None:
            return back.sign() * back.abs().log1p()
        back = back / (self.window - 1) * _EDGE
        return back.sign() * torch.log2(back.abs() + 1.0) / math.log2(_EDGE)

    def network(self, distances: Tensor) -> Tensor:
        """The bias of distances `(count, axes)`, `(count, heads)` float32; with an axis of layers in front, if any."""
        hidden = self.coordinates(distances) @ self.hidden_weight.float().mT + self.hidden_bias.float().unsqueeze(-2)
        return self.limit * (hidden.relu() @ self.output_weight.float().mT).sigmoid()


class LogCpbBias(LogCpbNetwork, DistanceBias):
    """The bias of the distance in the order of tokens."""

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32."""
        of_heads = self.network(distance.reshape(-1, 1)).mT
        return of_heads.reshape(*of_heads.shape[:-1], *distance.shape)

    of_layers = staticmethod(of_stacked)


class GridLogCpbBias(LogCpbNetwork, GridBias):
    """The bias of a displacement on a grid."""

    scheme = "log_cpb"

    @property
    def without_place(self) -> float:  # type: ignore[override]
        """The bias where the network gives 0."""
        return self.limit / 2

    def of_distances(self, distances: Tensor, keys: Positions) -> Tensor:
        """Returns `(batch or 1, heads, query_len, key_len)` in float32."""
        farthest = _farthest(keys)
        if farthest is None or math.prod(2 * steps + 1 for steps in farthest) > distances[0].numel():
            return torch.unflatten(self.network(distances.flatten(1).T), 0, distances.shape[1:]).movedim(-1, 1)
        # Many pairs have the same displacement.
        each = [torch.arange(-steps, steps + 1, device=distances.device) for steps in farthest]
        row = torch.zeros_like(distances[0])
        for distance, steps in zip(distances, farthest, strict=True):
            # Only tokens without a place are farther.
            row = row * (2 * steps + 1) + distance.clamp(-steps, steps) + steps
        return entries_of_pairs(self.network(torch.cartesian_prod(*each)), row)


def _farthest(keys: Positions) -> list[int] | None:
    """The longest distance along each axis; `None` if distances are not integers, or are not known while tracing."""
    coordinates = keys.coordinates
    if coordinates is None or coordinates.is_floating_point():
        return None
    if keys.grid is not None:
        return [size - 1 for size in keys.grid]

    def read() -> list[int]:
        return (coordinates.amax((1, 2)) - coordinates.amin((1, 2))).tolist()

    return None if traced() else keys.remembered("spans", read, coordinates)


@register_scheme
class LogCpbConfig(SharedConfig):
    """A small network of log-spaced displacements (Log-CPB of Swin v2, arXiv:2111.09883, equation 4 and section 3.3).

    For two patches, with `x` the row and the column of the query minus those of the key, and a network `f` per layer::

        bias(i, j) = limit * sigmoid(f(u)_h)      f(u) = W2 @ relu(W1 @ u + b1)
        u          = sign(x) * log(1 + |x|)                                        the paper
        u          = sign(x) * log(1 + 8 |x| / (window - 1)) / log(8)              the code, with a `window`

    `W1` has shape `(width, axes)`, `b1` `(width,)` and `W2` `(heads, width)`. Large displacements are close to each
    other in logarithms, so a larger grid, or a longer text, needs little extrapolation. In the code, `window` is the
    size of the window that the model was pretrained with, and it stays the same for other windows. The width, the
    `limit`, the initial weights, and training without weight decay are those of the code.

    With `axes=1`, an extension of the paper to texts, `x` is the distance in the order of tokens.

    Swin v2 also replaces the dot products of its attention by cosines with a learned temperature, so its logits are
    smaller than those of other models. The scheme adds the bias only. The same number added to all keys does not
    change attention, so new weights, whose bias is close to `limit / 2` everywhere, hardly differ from 'none'.

    The bias of a token without a place (a class or register token) and any other is `limit / 2`. Swin v2 has no such
    tokens.

    Args:
        window: divides displacements, as above; `None` for the logarithms of the paper.
        width: number of hidden units of the network, at most 4096.
        limit: the largest bias.
        axes: 2 for (row, column), 3 for (frame, row, column) of the model, 1 for the order of the tokens.
        shared: whether all layers share one network; with `False` every layer has its own, as in Swin v2.
    """

    name: ClassVar[str] = "log_cpb"

    window: int | None = option(None, minimum=2)
    width: int = option(512, minimum=1, maximum=LARGEST_WIDTH)
    limit: float = option(16.0, minimum=SMALLEST_FACTOR, maximum=LARGEST_FACTOR)
    axes: int = option(1, minimum=1, maximum=3)
    shared: bool = option(False)

    @property
    def part_class(self) -> type[LogCpbNetwork]:  # type: ignore[override]
        """The network of distances in the order of tokens, or on a grid."""
        return LogCpbBias if self.axes == 1 else GridLogCpbBias
