"""Measures all properties of many schemes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from hf_posenc.metrics.properties.decay import long_term_decay
from hf_posenc.metrics.properties.encodings import length_consistency, low_precision, uniqueness
from hf_posenc.metrics.properties.linearity import linearity
from hf_posenc.metrics.properties.logits import (
    defined_past_training,
    determinism,
    extensibility,
    norm_preservation,
    relativity,
)
from hf_posenc.metrics.properties.specimen import (
    HEAD_DIM,
    HIDDEN_SIZE,
    NUM_HEADS,
    TRAINING_LENGTH,
    Measurement,
    Specimen,
    specimen_forms,
)
from hf_posenc.metrics.quantization import FLOATS
from hf_posenc.report.records import Quantity, Record, Result, Subject, View, joined
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import as_scheme, list_schemes

_ROUNDED = "share of the different encodings that rounding to {} keeps different; 'logits': too large an error of them"
#: The function of each property, its heading in the table, and the meaning of its number.
PROPERTIES: dict[str, tuple[Callable[[Specimen], Measurement], str, str]] = {
    "uniqueness": (uniqueness, "unique", "smallest distance between the encodings of two positions below 2048"),
    "length_consistency": (
        length_consistency, "same at any length",
        "largest change of the first 256 encodings when the sequence grows from 256 to 512, 2048 or 32768 tokens",
    ),
    "relativity": (
        relativity, "relative",
        "largest change of a logit when all positions move by 1 to 30000 in a sequence of the same length",
    ),
    "linearity": (linearity, "linear", "residual of one linear map from every position to the one k later"),
    "defined_past_training": (
        defined_past_training, "defined past training length",
        "largest logit from twice the training length on, over the largest within the training length (not the loss, "
        "which `hf-posenc compare` measures)",
    ),
    "determinism": (determinism, "deterministic", "largest difference between evaluations, builds and batches"),
    "extensibility": (
        extensibility, "several axes", "largest change of a logit when all coordinates move along one axis",
    ),
    "norm_preservation": (norm_preservation, "keeps norms", "largest relative change of the norm of a query or key"),
    "long_term_decay": (
        long_term_decay, "decays", "rank correlation of distance and logit, for equal queries and keys",
    ),
    **{
        name: (partial(low_precision, dtype=dtype), f"distinct in {name}", _ROUNDED.format(name))
        for name, dtype in FLOATS.items()
    },
}  # fmt: skip
_QUANTITIES = (
    Quantity("acts_on", "acts on", style="text"),
    *(Quantity(name, heading, f"{heading}: {text}.", "verdict") for name, (_, heading, text) in PROPERTIES.items()),
)
#: Remarks below the table.
_REMARKS = (
    "A cell has yes or no, and the number that decided it, or - if the property does not apply. No is not an error.",
    f"Setting: {NUM_HEADS} heads of {HEAD_DIM} dimensions, a hidden size of {HIDDEN_SIZE}, a training length of "
    f"{TRAINING_LENGTH}, float32, and random inputs that give logits a variance of 1.",
    "The model is bidirectional where the scheme allows it. A scheme that differs in a causal model has a row for each "
    "form.",
    "Learned weights that start near zero are drawn larger, as they would be after training.",
    "`--json` prints every number with its threshold. `hf_posenc.metrics.properties` defines the properties.",
)


def properties_table(schemes: Sequence[str | SchemeConfig] | None = None) -> Result:
    """Measures every property of every scheme, in the standard setting (`build_specimen`).

    Args:
        schemes: names or configs, or one of them; `None` for all registered schemes.

    Returns:
        One subject per scheme, or two if the scheme differs between causal and bidirectional models (`specimen_forms`),
        with a record for each property: the verdict in `passed`, the number that decided in `value`, threshold and
        reasons in `details`. A scheme that cannot be built has the reason in `error`.

    Raises:
        UnknownNameError: for an unknown scheme, before anything is measured.
        ValueError: if a scheme given by name needs options.
    """
    named = [schemes] if isinstance(schemes, str | SchemeConfig) else schemes
    configs = list_schemes() if named is None else [as_scheme(scheme) for scheme in named]
    subjects, records = joined(part for config in configs for part in _measured(config))
    return Result(
        task="properties",
        title="Properties of the schemes, measured on the parts of each scheme without any model",
        quantities=_QUANTITIES,
        subjects=subjects,
        records=records,
        views=(View(tuple(quantity.name for quantity in _QUANTITIES)),),
        remarks=_REMARKS,
    )


def _measured(scheme: str | SchemeConfig) -> Iterator[tuple[Subject, Sequence[Record]]]:
    """Yields each form of a scheme with its records."""
    subject = Subject(str(scheme), str(scheme), {"scheme": scheme})
    try:
        config = as_scheme(scheme)
        subject = Subject(config.label, config.name, config.to_dict())
        forms = specimen_forms(config)
    except ValueError as error:
        yield dataclasses.replace(subject, error=str(error)), ()
        return
    for specimen in forms:
        form = "" if len(forms) == 1 else f" ({'causal' if specimen.causal else 'bidirectional'})"
        form_of = dataclasses.replace(subject, label=subject.label + form)
        yield form_of, list(_records(form_of.label, specimen))


def _records(label: str, specimen: Specimen) -> Iterator[Record]:
    parts = specimen.parts
    kinds = (
        (parts.additive, "additive"),
        (parts.query_key_map, "query-key map"),
        (parts.logit_bias, "bias"),
        (parts.logit_scale, "scale"),
    )
    yield Record("", "acts_on", shown=" + ".join(kind for part, kind in kinds if part is not None) or "-")
    measurements = {name: measure(specimen) for name, (measure, _, _) in PROPERTIES.items()}
    # One reason is enough: a scheme gives the same one for every position beyond its last.
    refused = next((row.refused[0] for row in measurements.values() if row.refused), "")
    note = f"Not all positions could be evaluated. {refused.partition(': ')[2]}"
    for name, row in measurements.items():
        details = {"threshold": row.threshold, "details": row.details, "refused": row.refused, "reason": row.reason}
        finite = row.value is not None and math.isfinite(row.value)
        yield Record(
            "",
            name,
            value=row.value if finite else None,
            passed=row.passed,
            note=note if row.refused else "",
            shown=row.shown or ("" if finite or row.value is None else str(row.value)),
            details={key: item for key, item in _json_ready(details).items() if item not in (None, [], {})},
        )


def _json_ready(value: Any) -> Any:
    """Replaces infinite and undefined numbers by their names, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
