"""Schemes by the names that measurements are asked for and reported under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import get_scheme


class SchemeRow(Protocol):
    """What was measured for one scheme."""

    @property
    def scheme(self) -> str:
        """Its name."""


RowType = TypeVar("RowType", bound=SchemeRow)


def resolve_scheme(scheme: str | SchemeConfig) -> SchemeConfig:
    """The config of a scheme given by name or as it is.

    Raises:
        UnknownNameError: for an unknown scheme.
        MeasurementError: if the scheme cannot be built from its name alone.
    """
    if isinstance(scheme, SchemeConfig):
        return scheme
    config_class = get_scheme(scheme)
    try:
        return config_class()
    except (TypeError, ValueError) as error:
        raise MeasurementError(
            f"The scheme {scheme!r} cannot be built from its name alone ({error}). Pass a config, "
            f"{config_class.__name__}(...), in its place."
        ) from error


def first_row(rows: Sequence[RowType], scheme: str, measured: str) -> RowType:
    """The first row of a scheme.

    Args:
        rows: of a result.
        scheme: its name.
        measured: what the rows are of, for the error.

    Raises:
        KeyError: if there is none.
    """
    for row in rows:
        if row.scheme == scheme:
            return row
    raise KeyError(f"No row for {scheme!r}; the {measured} covers {[row.scheme for row in rows]}.")
