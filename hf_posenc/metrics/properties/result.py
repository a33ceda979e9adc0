"""The properties of many schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.metrics.properties.measurement import Measurement
from hf_posenc.metrics.properties.specimen import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, TRAINING_LENGTH
from hf_posenc.report.records import Quantity, Record, Result, Subject, View, distinct_labels

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

#: Where schemes are measured.
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


def properties_result(rows: Sequence[PropertiesRow]) -> Result:
    """Rows as a result: a quantity for each property, with its verdict and the number that decided."""
    labels = distinct_labels(row.label for row in rows)
    rows = [dataclasses.replace(row, label=label) for label, row in zip(labels, rows, strict=True)]
    quantities = (
        Quantity("acts_on", "acts on", style="text"),
        *(
            Quantity(name, heading, f"{heading}: {meaning}.", "verdict")
            for name, (heading, meaning) in HEADINGS.items()
        ),
    )
    return Result(
        task="properties",
        title="Properties of the schemes, measured on the parts of each scheme without any model",
        quantities=quantities,
        subjects=tuple(Subject(row.label, row.scheme, row.config, error=row.error) for row in rows),
        records=tuple(record for row in rows if row.error is None for record in _records(row)),
        views=(View(tuple(quantity.name for quantity in quantities)),),
        remarks=(
            "yes or no, and the number that decided; - where a property does not apply. Failing a property is "
            "information, not an error.",
            PLACE,
        ),
    )


def _records(row: PropertiesRow) -> Iterator[Record]:
    yield Record(row.label, "acts_on", shown=" + ".join(row.acts_on) or "-")
    # One reason stands for all: a scheme that ends somewhere says the same of every position past it.
    refused = next((m.refused[0] for m in row.properties.values() if m.refused), "")
    note = f"{row.label}: not all positions could be evaluated. {refused.partition(': ')[2]}"
    for name, measurement in row.properties.items():
        entry = measurement.to_dict()
        value = entry.pop("value")
        yield Record(
            row.label,
            name,
            value=None if isinstance(value, str) else value,
            passed=entry.pop("passed"),
            note=note if measurement.refused else "",
            shown=entry.pop("shown") or (value if isinstance(value, str) else ""),
            details={key: item for key, item in entry.items() if item not in (None, [], {})},
        )
