"""The properties of many schemes, as data and as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.metrics.naming import first_row
from hf_posenc.metrics.properties.measurement import Measurement
from hf_posenc.metrics.properties.specimen import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, TRAINING_LENGTH
from hf_posenc.tables import format_number, format_table

#: Heading of each property in the table, and what its number is.
HEADINGS: dict[str, tuple[str, str]] = {
    "uniqueness": ("unique", "smallest distance between the encodings of two positions below 2048"),
    "length_consistency": (
        "same at any length",
        "largest change of the first 256 encodings when the sequence grows from 256 to 512, 2048 or 32768 tokens",
    ),
    "relativity": (
        "relative",
        "largest change of a logit when all positions move by 1 to 30000 in a sequence of the same length",
    ),
    "linearity": ("linear", "residual of one linear map from every position to the one k later"),
    "defined_past_training": (
        "defined past training length",
        "largest logit from twice the training length on, over the largest within it; the loss there is a matter of "
        "training, see `hf-posenc compare`",
    ),
    "determinism": ("deterministic", "largest difference between evaluations, builds and batches"),
    "extensibility": ("several axes", "largest change of a logit when all coordinates move along one axis"),
    "norm_preservation": ("keeps norms", "largest relative change of the norm of a query or key"),
    "long_term_decay": ("decays", "rank correlation of distance and logit, for equal queries and keys"),
    "float16": ("float16", "share of the encodings of float32 that rounding leaves apart, or how far logits are off"),
    "bfloat16": ("bfloat16", "share of the encodings of float32 that rounding leaves apart, or how far logits are off"),
}

#: Where schemes are measured, for the page.
PLACE = (
    f"The place is the same for all: {NUM_HEADS} heads of {HEAD_DIM} dimensions over a hidden size of {HIDDEN_SIZE}, a "
    f"training length of {TRAINING_LENGTH}, and random contents and projections that give logits a variance of 1. The "
    "place is bidirectional where the scheme allows it. A scheme that gives a query and an earlier key another logit "
    "in a causal model has a row for each form; the published form of FIRE, SSMax and the other scales is the causal "
    "one. Everything is computed in float32, as the parts are in a model, and "
    "the thresholds are those of float32. Learned weights that start near zero are drawn larger, so that the table "
    "shows the mechanism and not its first step of training. `--json` prints every number with its threshold; the "
    "definitions are the docstrings of `hf_posenc.metrics.properties`."
)


@dataclass(frozen=True)
class PropertiesRow:
    """The properties of one form of one scheme.

    Args:
        scheme: its name.
        label: the name with the options that are not at their default, and the form where there are two.
        config: its options (`SchemeConfig.to_dict`).
        acts_on: the kinds of its parts: "additive", "query-key map", "bias", "scale".
        causal_pairs: whether the place was a causal model, where only keys at or before the query are compared.
        redrawn: learned tensors that start near zero and were drawn larger.
        properties: by name, in the order of the table.
        error: why the scheme could not be built, or `None`; then there are no properties.
    """

    scheme: str
    label: str
    config: dict[str, Any]
    acts_on: tuple[str, ...] = ()
    causal_pairs: bool = False
    redrawn: tuple[str, ...] = ()
    properties: dict[str, Measurement] = field(default_factory=dict)
    error: str | None = None

    @property
    def marks(self) -> dict[str, bool | None]:
        """Each property's verdict."""
        return {name: measurement.passed for name, measurement in self.properties.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "scheme": self.scheme,
            "label": self.label,
            "config": self.config,
            "acts_on": list(self.acts_on),
            "causal_pairs": self.causal_pairs,
            "redrawn": list(self.redrawn),
            "properties": {name: measurement.to_dict() for name, measurement in self.properties.items()},
            "error": self.error,
        }


@dataclass(frozen=True)
class PropertiesTable:
    """The properties of many schemes.

    Args:
        rows: one per scheme, or one for each of its two forms, the causal one first.
    """

    rows: tuple[PropertiesRow, ...]

    def row(self, scheme: str) -> PropertiesRow:
        """The first row of a scheme: the causal form, where there are two.

        Raises:
            KeyError: if the table does not include it.
        """
        return first_row(self.rows, scheme, "table")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what the columns say, then every measurement with its threshold and its reasons."""
        columns = {name: {"heading": heading, "value": value} for name, (heading, value) in HEADINGS.items()}
        return {"columns": columns, "rows": [row.to_dict() for row in self.rows]}

    def table(self, *, markdown: bool = False) -> str:
        """Verdicts with the number that decided them, then what the columns mean, then reasons.

        Args:
            markdown: as a Markdown table.
        """
        footnotes: list[str] = []

        def mark(text: str) -> str:
            if text not in footnotes:
                footnotes.append(text)
            return f"[{footnotes.index(text) + 1}]"

        body = [[row.label, " + ".join(row.acts_on) or "-", *self._cells(row, mark)] for row in self.rows]
        headers = ["scheme", "acts on", *(heading for heading, _ in HEADINGS.values())]
        item = "- " if markdown else "  "
        paragraphs = [
            format_table(headers, body, markdown=markdown),
            "yes or no, and the number that decided; - where a property does not apply. Failing a property is "
            "information, not an error.",
            "\n".join(f"{item}{heading}: {value}" for heading, value in HEADINGS.values()),
        ]
        if footnotes:
            notes = (f"[{number}] {note}" for number, note in enumerate(footnotes, start=1))
            paragraphs.append(("\n\n" if markdown else "\n").join(notes))
        return "\n\n".join(paragraphs)

    def page(self) -> str:
        """The table as a Markdown page: what was measured and how, then `table(markdown=True)`."""
        return "\n\n".join(
            (
                "# Properties of the schemes",
                "Measured on the parts of each scheme with its default options, without any model, by",
                "```\nhf-posenc eval properties --markdown\n```",
                PLACE,
                self.table(markdown=True),
            )
        )

    @staticmethod
    def _cells(row: PropertiesRow, mark: Callable[[str], str]) -> list[str]:
        if row.error is not None:
            return ["- " + mark(row.error), *("-" for _ in list(HEADINGS)[1:])]
        # One reason stands for all: a scheme that ends somewhere says the same of every position past it.
        refused = next((m.refused[0] for m in row.properties.values() if m.refused), "")
        note = f"{row.label}: not all positions could be evaluated. {refused.partition(': ')[2]}"
        cells = []
        for name in HEADINGS:
            measurement = row.properties[name]
            words = [{True: "yes", False: "no", None: "-"}[measurement.passed]]
            if measurement.shown is not None:
                words.append(measurement.shown)
            elif measurement.value is not None:
                words.append(format_number(measurement.value))
            if measurement.refused:
                words.append(mark(note))
            cells.append(" ".join(words))
        return cells
