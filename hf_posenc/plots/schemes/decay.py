"""How the similarity of equal tokens falls with their distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posenc.plots.schemes.drawing import distinct_heads, head_names, legend_below, panels
from hf_posenc.plots.schemes.kind import FigureKind
from hf_posenc.plots.schemes.probes import added_vectors, equal_query_key_logits, turning_frequencies
from hf_posenc.plots.schemes.subject import INPUT_SEED, Subject
from hf_posenc.plots.style import COLORS, DASHES
from hf_posenc.schemes.arrangement.schedule import LayeredConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LENGTH = 257
_SAMPLES = 24


def roformer_envelope(frequencies: Tensor, distances: Tensor) -> Tensor:
    """RoFormer's bound on a rotated product, up to a factor (arXiv:2104.09864, section 3.4.3).

    Args:
        frequencies: `(pairs,)`, radians per position.
        distances: `(distances,)`, tokens.

    Returns:
        `(distances,)`: the mean over `j = 1 .. pairs` of `|S_j|`, where `S_j` is the sum of `exp(i distance f)` over
        the first `j` frequencies.
    """
    angles = distances.double().unsqueeze(-1) * frequencies.double()
    partial = torch.polar(torch.ones_like(angles), angles).cumsum(-1)
    return partial.abs().mean(-1)


def _applies(subject: Subject) -> bool:
    return not isinstance(subject.config, LayeredConfig)


def _spectrum(subject: Subject) -> Tensor | None:
    """`(pairs,)`: the frequencies of a rotation whose pairs all heads share, where nothing else decides the logits.

    RoFormer's bound holds for rotations: not where the map also changes the length of queries or keys, nor beside a
    bias.
    """
    frequencies = turning_frequencies(subject, _LENGTH)
    if frequencies is None or frequencies.shape[0] != 1 or subject.parts.logit_bias is not None:
        return None
    return frequencies.flatten() if _keeps_lengths(subject) else None


def _keeps_lengths(subject: Subject) -> bool:
    part = subject.parts.query_key_map
    assert part is not None
    query, key, _ = subject.random_heads(1)
    query, key = (vectors.expand(-1, -1, _LENGTH, -1) for vectors in (query, key))
    with torch.no_grad():
        phases = part.phases(subject.positions(_LENGTH))
        mapped = (part.map_query(query, phases), part.map_key(key, phases))
    norms = [vectors.norm(dim=-1) for vectors in mapped]
    return all(torch.allclose(norm, norm[..., :1].expand_as(norm), rtol=1e-4) for norm in norms)


def _acts_on_logits(subject: Subject) -> bool:
    parts = subject.parts
    return any(part is not None for part in (parts.query_key_map, parts.logit_bias, parts.logit_scale))


def _draw(subject: Subject) -> Figure:
    if subject.parts.additive is not None and not _acts_on_logits(subject):
        figure, (axes,) = panels(subject.title, 1, 1, 6.0, 3.3)
        _draw_vectors(axes, subject)
        legend_below(figure, axes)
        return figure
    spectrum = _spectrum(subject)
    columns = 1 if spectrum is None else 2
    figure, (axes, *others) = panels(subject.title, 1, columns, 6.0 if columns == 1 else 4.4, 3.3)
    _draw_logits(axes, subject)
    if spectrum is not None:
        distances = torch.arange(_LENGTH)
        others[0].plot(roformer_envelope(spectrum, distances).numpy(), color=COLORS[1])
        others[0].set_ylim(bottom=0)
        others[0].margins(x=0.01)
        others[0].set_title("RoFormer's envelope", fontsize=10)
        others[0].set_xlabel("distance (tokens)")
        others[0].set_ylabel("mean |partial sum|")
    legend_below(figure, axes)
    return figure


def _draw_vectors(axes: Axes, subject: Subject) -> None:
    vectors = added_vectors(subject, _LENGTH)
    queries = (64, 128, _LENGTH - 1)
    for index, query in enumerate(queries):
        products = vectors[: query + 1] @ vectors[query] / vectors.shape[1]
        axes.plot(
            range(query + 1),
            products.flip(0).numpy(),
            color=COLORS[index],
            linestyle=DASHES[index],
            label=f"from position {query}",
        )
    axes.margins(x=0.01)
    axes.set_xlabel("distance back (tokens)")
    axes.set_ylabel("mean product of components")


def _draw_logits(axes: Axes, subject: Subject) -> None:
    logits = equal_query_key_logits(subject, subject.positions(_LENGTH), _SAMPLES)[:, :, -1].flip(-1)
    mean = logits.mean(0)
    heads = distinct_heads(mean)
    for index, (head, name) in enumerate(zip(heads, head_names(heads, mean.shape[0]), strict=True)):
        axes.plot(mean[head].numpy(), color=COLORS[index], linestyle=DASHES[index], label=name)
    if len(heads) == 1:
        low, high = (logits[:, 0].quantile(share, dim=0).numpy() for share in (0.1, 0.9))
        axes.fill_between(range(_LENGTH), low, high, color=COLORS[0], alpha=0.18, linewidth=0, label="80 % of tokens")
    axes.margins(x=0.01)
    axes.set_title("equal query and key", fontsize=10)
    axes.set_xlabel("distance back (tokens)")
    axes.set_ylabel("logit")


def _caption(subject: Subject) -> str:
    if subject.parts.additive is not None and not _acts_on_logits(subject):
        return "Product of the added vectors of two positions, per component, over their distance."
    words = (
        f"Mean logit of a query and an equal key over their distance, for {_SAMPLES} random vectors (standard normal, "
        f"seed {INPUT_SEED}) in every head, query at position {_LENGTH - 1}"
    )
    if subject.parts.additive is not None:
        words += "; without what is added to embeddings"
    if _spectrum(subject) is not None:
        words += "; beside it RoFormer's upper envelope for these frequencies (arXiv:2104.09864, section 3.4.3)"
    return words + "."


KIND = FigureKind("decay", "logit of equal query and key over distance", _applies, _draw, _caption)
