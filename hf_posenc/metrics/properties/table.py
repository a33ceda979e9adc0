"""Measures all properties of many schemes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.metrics.naming import resolve_scheme
from hf_posenc.metrics.properties.decay import long_term_decay
from hf_posenc.metrics.properties.determinism import determinism
from hf_posenc.metrics.properties.extensibility import extensibility
from hf_posenc.metrics.properties.extrapolation import defined_past_training
from hf_posenc.metrics.properties.linearity import linearity
from hf_posenc.metrics.properties.measurement import Measurement, not_evaluated
from hf_posenc.metrics.properties.norms import norm_preservation
from hf_posenc.metrics.properties.precision import DTYPES, low_precision
from hf_posenc.metrics.properties.relativity import relativity
from hf_posenc.metrics.properties.result import PropertiesRow, properties_result
from hf_posenc.metrics.properties.specimen import Specimen, collecting_refusals, specimen_forms
from hf_posenc.metrics.properties.uniqueness import length_consistency, uniqueness
from hf_posenc.report.records import Result
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.parts import SchemeParts
from hf_posenc.schemes.registry import list_schemes

MEASURES: dict[str, Callable[[Specimen], Measurement]] = {
    "uniqueness": uniqueness,
    "length_consistency": length_consistency,
    "relativity": relativity,
    "linearity": linearity,
    "defined_past_training": defined_past_training,
    "determinism": determinism,
    "extensibility": extensibility,
    "norm_preservation": norm_preservation,
    "long_term_decay": long_term_decay,
    **{name: partial(low_precision, dtype=dtype) for name, dtype in DTYPES.items()},
}


def properties_table(schemes: Sequence[str | SchemeConfig] | None = None) -> Result:
    """Measures every property of every scheme, at the standard place (`build_specimen`).

    Args:
        schemes: names or configs; `None` for all registered schemes.

    Returns:
        One subject per scheme, or two for one that is another function in a causal model than in a bidirectional one
        (`specimen_forms`), with a record for each property: the verdict in `passed`, the number that decided in
        `value`, threshold and reasons in `details`. A scheme that cannot be built has the reason in `error`.

    Raises:
        UnknownNameError: for an unknown scheme, before anything is measured.
        MeasurementError: if a scheme given by name needs options.
    """
    if schemes is None:
        return properties_result([row for name in list_schemes() for row in _measure_by_name(name)])
    configs = [resolve_scheme(scheme) for scheme in schemes]
    return properties_result([row for config in configs for row in measure_properties(config)])


def _measure_by_name(name: str) -> list[PropertiesRow]:
    try:
        return measure_properties(resolve_scheme(name))
    except MeasurementError as error:
        return [PropertiesRow(name, name, {"scheme": name}, error=str(error))]


def measure_properties(config: SchemeConfig) -> list[PropertiesRow]:
    """All properties of one scheme, a row for each of its forms."""
    label = scheme_label(config)
    try:
        forms = specimen_forms(config)
    except MeasurementError as error:
        return [PropertiesRow(config.name, label, config.to_dict(), error=str(error))]
    return [
        PropertiesRow(
            scheme=config.name,
            label=label if len(forms) == 1 else f"{label} ({'causal' if specimen.causal else 'bidirectional'})",
            config=config.to_dict(),
            acts_on=_kinds(specimen.parts),
            causal_pairs=specimen.causal,
            redrawn=specimen.redrawn,
            properties={name: _measure(measure, specimen) for name, measure in MEASURES.items()},
        )
        for specimen in forms
    ]


def _measure(measure: Callable[[Specimen], Measurement], specimen: Specimen) -> Measurement:
    """One property; of a scheme too short for it, such as a table of a few rows, its refusal."""
    refused: list[str] = []
    with collecting_refusals(refused, "everything asked for"):
        return measure(specimen)
    return not_evaluated(refused)


def _kinds(parts: SchemeParts) -> tuple[str, ...]:
    kinds = {
        "additive": parts.additive,
        "query-key map": parts.query_key_map,
        "bias": parts.logit_bias,
        "scale": parts.logit_scale,
    }
    return tuple(kind for kind, part in kinds.items() if part is not None)
