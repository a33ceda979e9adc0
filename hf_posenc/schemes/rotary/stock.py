"""Conversion between rotary schemes and the `rope_parameters` dictionary in transformers configs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.config import BuildContext, SchemeConfig, required_options
from hf_posenc.schemes.rotary.p_rope import PRopeConfig
from hf_posenc.schemes.rotary.rope import RopeConfig
from hf_posenc.schemes.rotary.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
)

#: Scalings whose type transformers has too.
_STOCK_SCALINGS = (LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling, Llama3Scaling)


def _stock_options(scaling: type[RopeScaling]) -> dict[str, str]:
    """The keys of the options of a scaling in transformers, by their names here."""
    renamed = {"original_max_positions": "original_max_position_embeddings"}
    return {field.name: renamed.get(field.name, field.name) for field in dataclasses.fields(scaling)}


#: Keys that some rope types use and others ignore, as in transformers.
_COMMON_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}.union(
    *(_stock_options(scaling).values() for scaling in _STOCK_SCALINGS)
)


def to_rope_parameters(config: SchemeConfig, context: BuildContext) -> dict[str, Any]:
    """Converts a rotary scheme to the equivalent `rope_parameters` of a stock rotary module.

    The caller must check that the architecture supports them (a stock Llama, for example, ignores
    `partial_rotary_factor` for the default type) and that its pairing matches the config's `layout`.

    Args:
        config: a `RopeConfig` or `PRopeConfig`.
        context: the layer it is built for; the partial rotary factor depends on the width of a head.

    Raises:
        UnsupportedError: if `rope_parameters` cannot express the scheme.
    """
    if type(config) is PRopeConfig:
        if config._rotary_dim(context) != context.head_dim:
            raise UnsupportedError(
                f"Stock 'proportional' frequencies always spread over the whole head of {context.head_dim} dimensions, "
                f"but this p_rope has rotary_dim={config.rotary_dim or context.rotary_dim}."
            )
        return {
            "rope_type": "proportional",
            "rope_theta": config.theta,
            "partial_rotary_factor": config.fraction,
        }
    if type(config) is not RopeConfig:
        raise UnsupportedError(f"Stock rope_parameters can express 'rope' and 'p_rope', not {config.name!r}.")
    if config.inverse_frequencies is not None:
        raise UnsupportedError(
            "Stock rope_parameters describe formulas, so a rope with explicit inverse_frequencies cannot be converted "
            "to them."
        )
    rotary_dim = config._rotary_dim(context)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.theta}
    if config.scaling is not None:
        parameters |= _scaling_parameters(config.scaling, config.theta, rotary_dim, context)
    factor = config.attention_scaling
    if factor is not None and factor != config.applied_scaling.attention_scaling(context.max_positions):
        if parameters["rope_type"] not in ("yarn", "longrope"):
            raise UnsupportedError(
                f"attention_scaling={factor} cannot be written for the stock type {parameters['rope_type']!r}; only "
                "'yarn' and 'longrope' multiply cosine and sine."
            )
        parameters["attention_factor"] = factor
    # This is set even for the whole head, because without the key some architectures (GPT-NeoX) rotate only a fraction.
    share = rotary_dim / context.head_dim
    # The product with `head_dim` is truncated to `rotary_dim` in floating point.
    exact = int(context.head_dim * share) == rotary_dim
    parameters["partial_rotary_factor"] = share if exact else math.nextafter(share, 1.0)
    return parameters


def from_rope_parameters(
    parameters: Mapping[str, Any], max_positions: int | None = None, default_theta: float = 10000.0
) -> RopeConfig | PRopeConfig:
    """Converts a stock `rope_parameters` dictionary to a scheme. The layout is left to the architecture.

    Args:
        parameters: one flat dictionary; models with several layer types have one per type.
        max_positions: the model's `max_position_embeddings`, which some types use as a fallback.
        default_theta: the base if the dictionary has none.

    Raises:
        UnsupportedError: for a type or key that no scheme of this library supports.
        ValueError: for a value out of range.
    """
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    unknown = sorted(set(parameters) - _COMMON_KEYS)
    if unknown:
        raise UnsupportedError(
            f"rope_parameters of type {rope_type!r} contain {', '.join(map(repr, unknown))}, which no rotary scheme of "
            "this library supports."
        )
    theta = parameters.get("rope_theta") or default_theta
    partial = parameters.get("partial_rotary_factor")
    if rope_type == "proportional":
        if parameters.get("factor") not in (None, 1, 1.0):
            raise UnsupportedError("p_rope has no counterpart for a 'proportional' rope with a factor other than 1.")
        return PRopeConfig(theta=theta, fraction=1.0 if partial is None else partial)
    return RopeConfig(
        theta=theta,
        partial_rotary_factor=None if partial in (None, 1, 1.0) else partial,
        scaling=_scaling(rope_type, parameters, max_positions),
    )


def _scaling(rope_type: str, parameters: Mapping[str, Any], max_positions: int | None) -> RopeScaling | None:
    if rope_type == "default":
        return None
    kind = next((candidate for candidate in _STOCK_SCALINGS if candidate.type == rope_type), None)
    if kind is None:
        raise UnsupportedError(
            f"rope_parameters have the type {rope_type!r}; supported types are default, linear, dynamic, yarn, "
            "longrope, llama3 and proportional."
        )
    original = parameters.get("original_max_position_embeddings") or max_positions
    if kind is DynamicScaling:
        if max_positions is None:
            raise UnsupportedError("A stock 'dynamic' rope needs max_position_embeddings, which is not known.")
        original = max_positions
    stock = {name: parameters.get(key) for name, key in _stock_options(kind).items()}
    if "original_max_positions" in stock:
        stock["original_max_positions"] = None if original is None else int(original)
    if kind is YarnScaling and original is not None:
        # In transformers, a beta of zero means the default.
        stock |= {"beta_fast": stock["beta_fast"] or None, "beta_slow": stock["beta_slow"] or None}
        if stock["factor"] is None:
            stock["factor"] = (max_positions or original) / original
    if kind is LongRopeScaling and stock["factor"] is None and max_positions is not None and original is not None:
        stock["factor"] = max(max_positions / original, 1.0)
    # Some of Llama 3 have defaults here.
    for name in list(stock) if kind is Llama3Scaling else required_options(kind):
        if stock[name] is None:
            instead = ", and the model has no max_position_embeddings to take instead" if "original" in name else ""
            raise UnsupportedError(
                f"rope_parameters of type {rope_type!r} lack {_stock_options(kind)[name]!r}{instead}."
            )
    return kind(**{name: value for name, value in stock.items() if value is not None})


def _scaling_parameters(scaling: RopeScaling, theta: float, rotary_dim: int, context: BuildContext) -> dict[str, Any]:
    if type(scaling) is NtkScaling:
        return {"rope_theta": scaling.stretched_theta(theta, rotary_dim)}
    if type(scaling) not in _STOCK_SCALINGS:
        raise UnsupportedError(f"Stock rope_parameters have no type for the scaling {scaling.type!r}.")
    options = {key: getattr(scaling, name) for name, key in _stock_options(type(scaling)).items()}
    if isinstance(scaling, DynamicScaling) and context.max_positions != options.pop("original_max_position_embeddings"):
        raise UnsupportedError(
            "A stock 'dynamic' rope takes its original length from max_position_embeddings, which is "
            f"{context.max_positions}, but this scaling has {scaling.original_max_positions}."
        )
    if isinstance(scaling, LongRopeScaling):
        options["attention_factor"] = scaling.attention_scaling(context.max_positions)
    stated = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return {"rope_type": scaling.type} | {key: value for key, value in stated.items() if value is not None}
