"""`patch_model` and `unpatch_model`, and the scheme of every layer that a call asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import nn

from hf_posenc.errors import UnsupportedError, warn_user
from hf_posenc.other_names import TABLE_EXTENSION
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.architectures import architecture_of
from hf_posenc.patching.anatomy.rotary_functions import AXES, number_of_axes
from hf_posenc.patching.anatomy.verification import refuse_failing, verify_adopted_tables
from hf_posenc.patching.inspection import native_scheme_of, resolve_native
from hf_posenc.patching.layouts.grid import TWO_DIMENSIONAL
from hf_posenc.patching.place.config_entry import at_native_lengths
from hf_posenc.patching.place.cross_layers import refuse_without_encoder
from hf_posenc.patching.place.encoding import (
    PositionEncoding,
    StackEncoding,
    scheme_in_part,
)
from hf_posenc.patching.place.install import UnfilledTable
from hf_posenc.patching.place.lengths import is_length_dependent
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.schemes import LayeredConfig, MRopeConfig, ScheduleConfig
from hf_posenc.schemes.arrangement.cross_attention import CrossAttentionConfig, across
from hf_posenc.schemes.arrangement.native import NativeConfig
from hf_posenc.schemes.arrangement.of_parts import PartsConfig, of_parts
from hf_posenc.schemes.config import SchemeConfig, check_savable, names_native, walk
from hf_posenc.schemes.parts import LogitScale
from hf_posenc.schemes.registry import SchemeLike, as_scheme

ModelType = TypeVar("ModelType", bound=nn.Module)


def patch_model(
    model: ModelType,
    scheme: SchemeLike,
    *,
    part: str | None = None,
    layers: Iterable[int] | None = None,
    elsewhere: SchemeLike | None = None,
    cross_attention: SchemeLike | bool = False,
    **options: Any,
) -> ModelType:
    """Replaces the position encoding of a transformers model, in place and on this instance only.

    The native mechanisms (rotary functions, position tables, relative biases) are disabled, and the scheme takes their
    place. Their weights stay in the model, frozen, so that `unpatch_model` restores the stock model exactly. If the
    model is already patched, the new scheme replaces the old one. If both are the same scheme, it keeps its parameters;
    unpatch the model first to reinitialise them.

    The model gets a copy of its config, in which the scheme is named. Other models that were built from the same config
    object are not affected. If an error is raised, the model is left unchanged.

    A model of several modalities has parts: "text", "vision", "audio" and others (`inspect_model` lists them). One call
    patches one part, by default the text part. Other parts keep their positions, or the scheme of an earlier call.

    Args:
        model: any `PreTrainedModel` with softmax self-attention, or a PEFT model around one.
        scheme: a name from `list_schemes()`, with or without options ("rope:theta=5e5"), a config such as
            `RopeConfig(theta=5e5)`, the dictionary of a config, or a list of these that are combined. "native", there
            or inside a config, stands for the model's native scheme. A `PartsConfig` names the parts itself.
        part: the part that gets the scheme. By default the text part, or the part of the model's main input.
        layers: indices of the layers of the part that get the scheme; all by default.
        elsewhere: the scheme of the other layers; by default they keep their native scheme.
        cross_attention: the scheme of the attention from a decoder to an encoder, in all layers; `True` for the same
            one. By default it is not changed, and usually has no positions. See `CrossAttentionConfig`.
        **options: fields of the scheme's config, for a scheme given by name.

    Returns:
        The model. `model.position_encoding` holds the current config and the report of what was replaced.

    Raises:
        UnknownNameError: for an unknown scheme, option or part, with the nearest names.
        ValueError: for an option out of range.
        UnsupportedError: if the scheme cannot be computed correctly in this architecture.
    """
    transaction = Transaction(model)
    config = requested_scheme(transaction, scheme, options, part, layers, elsewhere, cross_attention)
    if unfilled := place_scheme(transaction, config, part, layers, elsewhere):
        warn_of_random_rows(unfilled, config)
    return model


def requested_scheme(
    transaction: Transaction,
    scheme: SchemeLike,
    options: dict[str, Any],
    part: str | None,
    layers: Iterable[int] | None,
    elsewhere: SchemeLike | None,
    cross_attention: SchemeLike | bool,
) -> SchemeConfig:
    """The config that the arguments of `patch_model` name. Raises if they exclude each other."""
    config = as_scheme(scheme, **options)
    config = config if cross_attention is False else across(config, cross_attention)
    check_savable(config)
    if config.within_and_across()[1] is not None:
        refuse_without_encoder(transaction.anatomy, part)
    if elsewhere is not None and layers is None:
        raise ValueError("`elsewhere` is the scheme of the layers that are not in `layers`. Pass `layers` as well.")
    return config


def place_scheme(
    transaction: Transaction,
    config: SchemeConfig,
    part: str | None = None,
    layers: Iterable[int] | None = None,
    elsewhere: SchemeLike | None = None,
    chosen: bool = True,
) -> set[UnfilledTable]:
    """`patch_model` in a transaction, whose anatomy of the model has been used before.

    A scheme that is not `chosen` now but was saved with the model gets no warnings about the choice.

    Returns the tables of the scheme that keep random rows although the model has a native table.
    """
    # Planning may run the model, which would interfere with the thread of continuous batching.
    transaction.refuse_running()
    previous, anatomy, model = transaction.encoding, transaction.anatomy, transaction.model
    if not isinstance(config, PartsConfig):
        requested = {anatomy.part(part): config}
    elif part is not None or layers is not None:
        raise ValueError(
            "A PartsConfig names the parts of a model itself, so `part` and `layers` cannot be combined with it. Pass "
            "the scheme of one part, or give a part of the PartsConfig a schedule."
        )
    else:
        requested = {anatomy.part(name): scheme for name, scheme in config.by_part().items()}
    schemes = _in_force(previous)
    for name, scheme in requested.items():
        schemes[name] = _resolve(transaction, name, scheme, layers, elsewhere, chosen)
    # A model with one part keeps a PartsConfig, because it may come from the checkpoint of a model with several.
    several = isinstance(config, PartsConfig) or len(anatomy.parts) > 1
    whole = of_parts(schemes) if several else next(iter(schemes.values()))
    changed = [name for name in requested if schemes[name] != scheme_in_part(previous, name)]
    # Defaults that depend on the length use the native one, even if the config has been given another since.
    with at_native_lengths(model.config):
        encoding = transaction.plan(whole, kept=_kept(previous, changed))
    if (limits := architecture_of(model).limits) is not None:
        for stack in encoding.stacks.values():
            if not stack.runtime.layout.has_axes:  # Patches of images are not cached.
                limits.refuse(stack.needs(), encoding.label)
    _warn_if_uncacheable(encoding, transaction)
    kept_stacks = [] if previous is None else [*previous.stacks.values()]
    placed = [stack for stack in encoding.stacks.values() if stack not in kept_stacks]
    if chosen:
        _warn_if_only_scaled(encoding, placed)
    if chosen and not names_native(config):
        _warn_of_raster_order(encoding, placed)
    if previous is not None:
        # A length chosen with `extend_context` is kept, up to the longest sequence that the new scheme supports.
        encoding.record.follow(previous.record, encoding.stacks)
    transaction.install(encoding)
    for name, stack in encoding.stacks.items():
        if stack.part in changed and not stack.adopted:
            encoding.record.stacks[name].new = [(weight, weight._version) for weight in stack.parameters()]
    return {table for stack in placed for table in stack.unfilled}


def _in_force(encoding: PositionEncoding | None) -> dict[str, SchemeConfig]:
    """The schemes in force by name of the part; empty for a model without parts."""
    config = None if encoding is None else encoding.config
    return config.by_part() if isinstance(config, PartsConfig) else {}


def _kept(encoding: PositionEncoding | None, changed: Collection[str]) -> dict[str, StackEncoding]:
    """The encodings of the stacks of other parts, which are kept because their parameters may have been trained."""
    stacks = {} if encoding is None else encoding.stacks
    return {name: stack for name, stack in stacks.items() if stack.part not in changed}


def _resolve(
    transaction: Transaction,
    part: str,
    config: SchemeConfig,
    layers: Iterable[int] | None,
    elsewhere: SchemeLike | None,
    chosen: bool,
) -> SchemeConfig:
    """The scheme of every layer of one part."""
    config, cross = config.within_and_across()
    stacks = transaction.verified_stacks(part)
    if transaction.encoding is None and transaction.anatomy.is_runnable:
        verify_adopted_tables(transaction, stacks)
    other = NativeConfig() if elsewhere is None else as_scheme(elsewhere)
    # The native scheme may be a schedule. Only the chosen layers are taken from it.
    merged = names_native(config) and not isinstance(config, LayeredConfig)
    if names_native(config):
        config = resolve_native(transaction, part, config, stacks)
    other = other if layers is None else resolve_native(transaction, part, other, stacks)
    config = with_native_options(transaction, part, config, stacks)
    config = schedule(config, stacks, layers, other, merged=merged)
    if chosen:
        warn_if_invisible(config, stacks)
        warn_if_rotation_changes(config, stacks)
        warn_of_invented_grid(config, stacks)
    others = [stack for stack in stacks if not stack.layout.takes_tokens]
    # If layers were exchanged since the last patch, the scheme in force could not be restored after the run.
    if others and transaction.anatomy.is_runnable and not transaction.change():
        with transaction.suspended():
            refuse_failing(transaction, config, others)
    return config if cross is None else CrossAttentionConfig(config, cross)


def unpatch_model(model: ModelType, *, part: str | None = None) -> ModelType:
    """Restores the stock model, bit for bit. A model that is not patched is returned unchanged.

    Args:
        model: the model.
        part: restores only this part of a composite model; all parts by default.

    Raises:
        UnknownNameError: for a part that the model does not have.
        UnsupportedError: while continuous batching runs on the model.
    """
    transaction = Transaction(model)
    if part is None:
        transaction.undo()
        return model
    transaction.anatomy.part(part)
    previous = transaction.encoding
    remaining = {name: config for name, config in _in_force(previous).items() if name != part}
    if previous is None or not remaining:
        transaction.undo()
    elif part in _in_force(previous):
        encoding = transaction.plan(of_parts(remaining), kept=_kept(previous, [part]))
        encoding.record.follow(previous.record, encoding.stacks)
        transaction.install(encoding)
    return model


def _warn_of_raster_order(encoding: PositionEncoding, placed: list[StackEncoding]) -> None:
    """Warns if a scheme for the order of tokens is placed where tokens are the patches of images.

    Args:
        encoding: that of the model.
        placed: the stacks that get a scheme. For the others, the call that placed theirs has warned.
    """
    names = {name for stack in placed for name in stack.runtime.layout.in_raster_order(stack.acting_parts())}
    if names:
        warn_user(
            f"Scheme {encoding.config.label!r} reads the order of tokens (in {' and '.join(sorted(names))}), but this "
            "model's tokens are patches of images, which are numbered row by row: the last patch of a row is a "
            f"neighbour of the first patch of the next one. {TWO_DIMENSIONAL}"
        )


def warn_of_random_rows(tables: Iterable[UnfilledTable], config: SchemeConfig) -> None:
    """Warns about tables that could have taken over the native table of the model but still have random rows."""
    for table in tables:
        remedy = f"For a trained model, compute them from its own rows: {TABLE_EXTENSION}."
        if not table.taken:
            remedy = "To keep the table of a trained model, give the scheme the sizes of that table, or use 'native'."
        warn_user(
            f"{table.random} of the {table.rows} rows of the table of {config.label!r} are drawn at random: the "
            f"model's own table has {table.native_rows} rows{'' if table.taken else ', which do not fit'}. {remedy}"
        )


def _warn_if_uncacheable(encoding: PositionEncoding, transaction: Transaction) -> None:
    if is_length_dependent(encoding) and getattr(transaction.model, "generation_config", None) is not None:
        warn_user(
            f"Scheme {encoding.config.label!r} depends on the length of the sequence, or on tokens that a "
            "cache does not store, so no cache can be extended. generate() recomputes the whole sequence for every "
            "token (generation_config.use_cache=False)."
        )


def _warn_if_only_scaled(encoding: PositionEncoding, placed: list[StackEncoding]) -> None:
    """Warns if a scheme replaces the positions of a part by a scale of its attention logits."""
    for name in dict.fromkeys(stack.part for stack in placed):
        acting = [part for stack in placed if stack.part == name for part in stack.acting_parts()]
        if acting and all(isinstance(part, LogitScale) for part in acting):
            scheme = cast(SchemeConfig, encoding.config.for_part(name))
            warn_user(
                f"Scheme {scheme.label!r} only scales attention logits, and replaces the positions of the {name} part. "
                "To keep them, combine it with 'native': patch_model(model, ['native', ...])."
            )


_SPECTRUM = ("theta", "inverse_frequencies", "rotary_dim", "layout")
_ASSIGNMENT = ("sections", "interleaved", "axes")


def with_native_options(transaction: Transaction, part: str, config: SchemeConfig, stacks: list[Stack]) -> SchemeConfig:
    """`config` with the native options of a model that has the same scheme.

    Without options, "mrope" in a model with M-RoPE is what the model was trained with. The base and the assignment of
    pairs to axes are taken over together or not at all. Other schemes are returned unchanged. The arguments are those
    of `resolve_native`.
    """
    if not isinstance(config, MRopeConfig) or AXES not in {
        number_of_axes(rotary.module, None) for stack in stacks for rotary in stack.rotaries
    }:
        return config
    try:
        native = native_scheme_of(transaction, part)
    except UnsupportedError:
        return config  # No scheme here describes a scaled M-RoPE. The warning about its base is still shown.
    if not isinstance(native, MRopeConfig):
        return config
    groups = [_SPECTRUM] if config.by_head else [_SPECTRUM, _ASSIGNMENT]
    taken = [name for group in groups if not any(config.gave(name) for name in group) for name in group]
    return dataclasses.replace(config, **{name: getattr(native, name) for name in taken})


def schedule(
    config: SchemeConfig,
    stacks: list[Stack],
    layers: Iterable[int] | None,
    elsewhere: SchemeConfig | None,
    *,
    merged: bool = False,
) -> SchemeConfig:
    """`config` in some layers and `elsewhere` in the others.

    Args:
        config: the scheme of `layers`.
        stacks: the model's stacks.
        layers: indices of layers, counted as in `model.layers`; `None` for all.
        elsewhere: the scheme of the other layers; may itself be a schedule.
        merged: whether `config` may be a schedule too. Only `layers` are taken from it.

    Raises:
        TypeError: for layers that are not given by their indices.
        ValueError: for a layer that the model does not have, or that has no attention.
    """
    types = dict(_places(stacks))
    available = sorted(types)
    deepest = available[-1]
    if isinstance(config, ScheduleConfig) and len(config.layers) > deepest + 1:
        raise ValueError(
            f"The schedule has schemes for {len(config.layers)} layers, but the last layer with attention in this "
            f"model is layer {deepest}. Give one scheme for each layer, {deepest + 1} in all."
        )
    if layers is None:
        _check_all_occur(config, stacks)
        return config
    chosen = _indices(layers)
    unknown = [layer for layer in chosen if layer not in available]
    if unknown or not chosen:
        raise ValueError(
            f"layers={chosen} contains {unknown or 'no layer'}; layers with self-attention are {available}."
        )
    if isinstance(config, LayeredConfig) and not merged:
        raise ValueError(
            "A schedule already defines the scheme of every layer, so `layers` cannot be combined with it."
        )
    assert elsewhere is not None
    wanted = enumerate(config if layer in chosen else elsewhere for layer in range(deepest + 1))
    return ScheduleConfig(layers=tuple(scheme.for_layer(at, types.get(at)) for at, scheme in wanted))


def _places(stacks: list[Stack]) -> list[tuple[int, str | None]]:
    """The index and the type of every layer with attention."""
    return [(attention.layer, attention.layer_type) for stack in stacks for attention in stack.attentions]


def _indices(layers: Any) -> list[int]:
    """The indices in `layers`, sorted. Numbers of NumPy and torch count as indices; a mask does not."""
    given = layers.tolist() if hasattr(layers, "tolist") else layers
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"`layers` must be a collection of layer indices, for example layers=[0, 1]; got {layers!r}.")
    values = [value.item() if hasattr(value, "item") else value for value in given]
    for wrong in [value for value in values if isinstance(value, bool) or not isinstance(value, int)]:
        mask = " For a mask, pass layers=[layer for layer, chosen in enumerate(mask) if chosen]."
        raise TypeError(
            f"`layers` contains {wrong!r} ({type(wrong).__name__}), which is not a layer index."
            f"{mask if isinstance(wrong, bool) else ''}"
        )
    return sorted(set(values))


def _check_all_occur(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Refuses an arrangement with a scheme that no layer would use."""
    if not isinstance(config, LayeredConfig) or isinstance(config, ScheduleConfig):
        return
    used = {config.for_layer(*place) for place in _places(stacks)}
    for option, scheme in config.children().items():
        if scheme not in used:
            layers = sorted(dict(_places(stacks)))
            raise ValueError(
                f"{type(config).__name__}.{option} ({scheme.name!r}) would not be used in any layer: the layers with "
                f"attention are {layers}. Change the layers that get it, or use a ScheduleConfig."
            )


def warn_if_rotation_changes(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Warns if the default base or the missing scaling of a rotation, which were not given, differ from a layer's."""
    bases: dict[tuple[str, float], set[float]] = {}
    scalings: dict[str, set[str]] = {}
    kept: set[float] = set()
    for stack in stacks:
        of_stack = getattr(stack.config, "rope_parameters", None) or {}
        for layer_type, scheme in {(a.layer_type, config.for_layer(a.layer, a.layer_type)) for a in stack.attentions}:
            # Some models have other parameters for each type of layers.
            built_with = of_stack.get(layer_type) or of_stack
            native_thetas = {float(theta) for theta in _values(built_with, "rope_theta")}
            for part in walk(scheme):
                theta = getattr(part, "theta", None)
                if theta is not None and not part.gave("theta"):
                    same = theta in native_thetas
                    (kept if same else bases.setdefault((part.name, theta), set())).update(native_thetas)
                if theta is not None and getattr(part, "scaling", ...) is None and not part.gave("scaling"):
                    scalings.setdefault(part.name, set()).update(_values(built_with, "rope_type") - _UNSCALED)
    for (name, theta), others in sorted((changed, others) for changed, others in bases.items() if others):
        known = " and ".join(f"{value:g}" for value in sorted(others))
        keep = f"pass theta={max(others):g} to keep its base (swap_scheme does so)"
        if config.name != name:
            native = "use 'native' in its place or " * (name == "rope")
            keep = f"{native}give it theta={max(others):g} to keep its base"
        if len(others | kept) > 1:
            keep = "give each layer a scheme with its base (ScheduleConfig; LocalGlobalConfig for layers with a window)"
        warn_user(
            f"Scheme {name!r} rotates with theta={theta:g}, its default, but this model was built with {known}"
            f"{' in some layers' * bool(kept)}. For a trained model, {keep}, or theta={theta:g} if the change is "
            "intended."
        )
    for name, kinds in sorted((name, kinds) for name, kinds in scalings.items() if kinds):
        known = " and ".join(repr(kind) for kind in sorted(kinds))
        warn_user(
            f"Scheme {name!r} has no scaling of its frequencies, but this model was built with rope_type {known}. For "
            "a trained model, use 'native' to keep its scaling, or pass scaling=None if the change is intended."
        )


#: Values of `rope_type` for frequencies that are not scaled.
_UNSCALED = {"default", "mrope", "proportional"}


def _values(parameters: Any, key: str) -> set[Any]:
    """The values of a key in a config's `rope_parameters`; some models have one for each layer type."""
    if not isinstance(parameters, dict):
        return set()
    values = {parameters[key]} if parameters.get(key) is not None else set()
    return values.union(*(_values(value, key) for value in parameters.values()))


def warn_if_invisible(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Warns if a scheme adds the same number to every component, in a model whose norms remove it."""
    configs = [config.for_layer(*place) for place in _places(stacks)]
    if not any(getattr(part, "invisible_under_layer_norm", False) for part in configs):
        return
    if any(isinstance(module, nn.LayerNorm) for stack in stacks for module in stack.module.modules()):
        warn_user(
            f"Scheme {config.name!r} adds the same number to every component of a vector, but this model's LayerNorm "
            "subtracts the mean over components, so the positions have no effect, as with 'none'. Pass "
            "direction='random', 'one_hot' or 'learned' to give them an effect."
        )


def warn_of_invented_grid(config: SchemeConfig, stacks: list[Stack]) -> None:
    """Warns if a scheme for rows and columns is placed where tokens have none, and no grid was stated."""
    if any(stack.layout.has_axes or stack.reads_axes for stack in stacks):
        return
    # M-RoPE gives a token without coordinates the same position on every axis.
    unstated = [part for part in walk(config) if part.name != "mrope" and _reads_axes(part) and not part.gave("grid")]
    if unstated:
        warn_user(
            f"Scheme {unstated[0].label!r} reads rows and columns, but the tokens of the {stacks[0].part} part have "
            "one axis. rope_nd and swin read them as a grid that is filled row by row: set its `grid`. Schemes with "
            "`axes` raise an error unless a call passes position_ids of several axes."
        )


def _reads_axes(config: SchemeConfig) -> bool:
    axes = getattr(config, "axes", 1)
    return getattr(config, "grid", None) is not None or (isinstance(axes, int) and axes > 1)
