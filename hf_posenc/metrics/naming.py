"""Schemes by the names that measurements are asked for and reported under."""

from __future__ import annotations

from hf_posenc.metrics.errors import MeasurementError
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import get_scheme


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
