"""What the dog test found, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_posenc.metrics.naming import first_row
from hf_posenc.tables import format_number, format_table

#: A distance in the probe up to this one is rounding. The probe computes in float64, and without positions the
#: distance is exactly 0; what is left is the rounding of a scheme's own float32 numbers.
PROBE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class LayerDistance:
    """How far apart the two occurrences are after one layer.

    Args:
        layer: 0 for the embeddings, then the layers in order.
        relative_l2: `metrics.distance.relative_l2` of the two hidden states.
        cosine: `metrics.distance.cosine_distance` of them.
    """

    layer: int
    relative_l2: float
    cosine: float


@dataclass(frozen=True)
class DogRow:
    """The dog test of one position encoding.

    Args:
        scheme: its name; `"native"` for what the stock model has.
        config: the scheme's options (`SchemeConfig.to_dict`), or `None` where they are not known.
        layers: distances inside the model, from the embeddings to the last layer; empty if `error` is set.
        probe: relative L2 distance in the bidirectional random attention over the same embeddings, with the
            same scheme newly initialised; `None` where it could not be built.
        tolerance: a distance up to this one is rounding in the model's dtype.
        causal: whether a token sees only those before it.
        label: the scheme with the options that are not its defaults, as in the table and the figure.
        notes: what a reader has to know to read the numbers.
        error: why this architecture cannot take the scheme, or `None`.
    """

    scheme: str
    config: dict[str, Any] | None
    layers: tuple[LayerDistance, ...]
    probe: float | None
    tolerance: float
    causal: bool
    label: str
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def identical(self) -> bool | None:
        """Whether the model holds the two for the same at every layer; `None` if it could not be run."""
        if self.error is not None:
            return None
        return all(distance.relative_l2 <= self.tolerance for distance in self.layers)

    @property
    def told_apart(self) -> bool | None:
        """Whether positions tell the two apart: by the model, or, where a causal mask does so too, by the probe."""
        if self.error is not None:
            return None
        if self.causal:
            return None if self.probe is None else self.probe > PROBE_TOLERANCE
        return not self.identical


@dataclass(frozen=True)
class DogResult:
    """The dog test of one model.

    Args:
        model: name of the model's class.
        sentence: the sentence.
        word: the word that it holds twice.
        tokens: the sentence as tokens.
        first: indices of the tokens of the first occurrence.
        second: indices of the tokens of the second one.
        causal: whether a token sees only those before it, as measured on the model.
        probe_without_positions: the distance in the random attention without any scheme: exactly 0.
        rows: one per position encoding.
        notes: what holds for all rows.
    """

    model: str
    sentence: str
    word: str
    tokens: tuple[str, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    causal: bool
    probe_without_positions: float
    rows: tuple[DogRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, scheme: str) -> DogRow:
        """The first row of a scheme.

        Raises:
            KeyError: if the test did not include it.
        """
        return first_row(self.rows, scheme, "test")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every field, and for each row the verdicts."""
        entry = asdict(self)
        for row, row_entry in zip(self.rows, entry["rows"], strict=True):
            row_entry |= {"identical": row.identical, "told_apart": row.told_apart}
        return entry

    def table(self, *, markdown: bool = False) -> str:
        """The relative L2 distances as a table: the probe, then up to eight of the depths, then the notes.

        Args:
            markdown: as a Markdown table.
        """
        depths = sorted({distance.layer for row in self.rows for distance in row.layers})
        shown = _spread(depths, 8)
        headers = ["scheme", "probe", *("embeddings" if layer == 0 else f"layer {layer}" for layer in shown), "apart"]
        footnotes: list[str] = []
        rows: list[list[str]] = []
        for row in self.rows:
            marks = []
            for note in (*([f"cannot be applied: {row.error}"] if row.error else []), *row.notes):
                if note not in footnotes:
                    footnotes.append(note)
                marks.append(f"[{footnotes.index(note) + 1}]")
            distances = {distance.layer: distance.relative_l2 for distance in row.layers}
            verdict = {True: "yes", False: "no", None: "-"}[row.told_apart]
            shown_distances = [format_number(distances.get(layer)) for layer in shown]
            rows.append([row.label, format_number(row.probe), *shown_distances, " ".join([verdict, *marks])])
        paragraphs = [
            f"{self.model}: {self.sentence!r}, distance between the two {self.word!r} (relative L2)",
            format_table(headers, rows, markdown=markdown),
            "probe: random bidirectional attention over the same embeddings; without positions the distance is "
            f"{format_number(self.probe_without_positions)}.",
            *self.notes,
            *(f"[{number}] {note}" for number, note in enumerate(footnotes, start=1)),
        ]
        return "\n\n".join(paragraphs[:3]) + "".join(("\n\n" if markdown else "\n") + note for note in paragraphs[3:])


def _spread(items: list[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spread, the first, second and last among them."""
    if len(items) <= count:
        return items
    last = len(items) - 1
    chosen = {0, 1} | {round(1 + step * (last - 1) / (count - 2)) for step in range(1, count - 1)}
    return [items[index] for index in sorted(chosen)]
