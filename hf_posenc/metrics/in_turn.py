"""One measurement under several schemes, one after the other, on one model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.metrics.naming import resolve_scheme
from hf_posenc.metrics.preserve import isolated_rng
from hf_posenc.patching import native_scheme, patch_model, unpatch_model
from hf_posenc.patching.apply import current_encoding, unwrapped
from hf_posenc.patching.suspend import suspended
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label

NATIVE = "native"

Value = TypeVar("Value")


@dataclass(frozen=True)
class UnderScheme(Generic[Value]):
    """What was measured under one scheme.

    Args:
        scheme: its name; `"native"` for what the stock model has.
        label: the scheme with the options that are not its defaults.
        config: the scheme's options (`SchemeConfig.to_dict`), or `None` where they are not known.
        value: what was measured; `None` if `error` is set.
        notes: what a reader has to know to read the numbers.
        error: why nothing could be measured, or `None`.
    """

    scheme: str
    label: str
    config: dict[str, Any] | None
    value: Value | None
    notes: tuple[str, ...] = ()
    error: str | None = None


def measure_in_turn(
    model: Any, schemes: Sequence[str | SchemeConfig] | None, measure: Callable[[Any], Value], *, seed: int = 0
) -> list[UnderScheme[Value]]:
    """Patches each scheme into the stock model, measures, and takes it out again.

    The model is left as it was found, also after an error: its own scheme is put back with all it has learned. A scheme
    that the model cannot take, or that cannot represent so long a sequence, has the reason in `error`.

    Args:
        model: any transformers model, patched or not.
        schemes: names or configs, newly initialised unless a scheme takes over native weights; `"native"` is the stock
            model itself. `None` measures the model as it is.
        measure: gets the model, in evaluation mode.
        seed: of newly created scheme weights.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is touched.
        MeasurementError: if a scheme given by name needs options.
    """
    if schemes is None:
        encoding = current_encoding(unwrapped(model))
        if encoding is None:
            return [_native(model, measure)]
        return [_measured(model, encoding.config.name, encoding.config, (), measure)]
    wanted = [None if scheme == NATIVE else resolve_scheme(scheme) for scheme in schemes]
    with suspended(model):
        return [
            _native(model, measure) if config is None else _patched(model, config, measure, seed) for config in wanted
        ]


def adopted_notes(model: Any) -> list[str]:
    """Which weights of the stock model the scheme in force has taken over, as a sentence."""
    encoding = current_encoding(unwrapped(model))
    report = None if encoding is None else encoding.report
    adopted = [] if report is None else [entry for stack in report.stacks for entry in stack.adopted]
    if not adopted:
        return []
    shown = ", ".join(adopted[:2]) + (f" and {len(adopted) - 2} more" if len(adopted) > 2 else "")
    return [f"Takes over weights of the stock model ({shown}); the others are newly initialised."]


def footnoted(rows: Sequence[UnderScheme[Any]]) -> Iterator[tuple[str, list[str]]]:
    """The label of each row with the marks of its notes, and the notes that are new with it."""
    footnotes: list[str] = []
    for row in rows:
        before = len(footnotes)
        marks = []
        for note in (*([f"cannot be measured: {row.error}"] if row.error else []), *row.notes):
            if note not in footnotes:
                footnotes.append(note)
            marks.append(f" [{footnotes.index(note) + 1}]")
        new = [f"[{number}] {note}" for number, note in enumerate(footnotes[before:], start=before + 1)]
        yield row.label + "".join(marks), new


def _native(model: Any, measure: Callable[[Any], Value]) -> UnderScheme[Value]:
    try:
        config = native_scheme(model)
    except UnsupportedError as error:
        return _measured(model, NATIVE, None, (f"The native scheme has no name here: {error}",), measure)
    return _measured(model, NATIVE, config, (), measure)


def _patched(model: Any, config: SchemeConfig, measure: Callable[[Any], Value], seed: int) -> UnderScheme[Value]:
    with isolated_rng(seed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            patch_model(model, config)
        except ValueError as error:
            return UnderScheme(config.name, scheme_label(config), config.to_dict(), None, (), str(error))
    try:
        notes = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
        return _measured(model, config.name, config, (*notes, *adopted_notes(model)), measure)
    finally:
        unpatch_model(model)


def _measured(
    model: Any, name: str, config: SchemeConfig | None, notes: tuple[str, ...], measure: Callable[[Any], Value]
) -> UnderScheme[Value]:
    label = NATIVE if name == NATIVE else ""
    if config is not None:
        label = f"{NATIVE} ({scheme_label(config)})" if name == NATIVE else scheme_label(config)
    options = None if config is None else config.to_dict()
    try:
        return UnderScheme(name, label, options, measure(model), notes)
    except (UnsupportedError, SequenceLengthError) as error:
        return UnderScheme(name, label, options, None, notes, str(error))
