"""`patch_model` and `unpatch_model`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn

from hf_posenc.errors import warn_user
from hf_posenc.other_names import TABLE_EXTENSION
from hf_posenc.patching.anatomy.architectures import architecture_of
from hf_posenc.patching.anatomy.verification import refuse_failing, verify_adopted_tables
from hf_posenc.patching.inspection import native_scheme_of
from hf_posenc.patching.layouts.grid import TWO_DIMENSIONAL
from hf_posenc.patching.place.config_entry import at_native_lengths
from hf_posenc.patching.place.encoding import PositionEncoding, is_length_dependent, scheme_in_part
from hf_posenc.patching.place.stack_encoding import StackEncoding, UnfilledTable
from hf_posenc.patching.place.transaction import Transaction
from hf_posenc.patching.request import (
    resolve_native,
    schedule,
    warn_if_invisible,
    warn_if_theta_changes,
    warn_of_invented_grid,
    with_native_options,
)
from hf_posenc.schemes import LayeredConfig
from hf_posenc.schemes.arrangement.native import NativeConfig, names_native
from hf_posenc.schemes.arrangement.of_parts import PartsConfig, of_parts
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.registry import SchemeLike, as_scheme

ModelType = TypeVar("ModelType", bound=nn.Module)


def patch_model(
    model: ModelType,
    scheme: SchemeLike,
    *,
    part: str | None = None,
    layers: Iterable[int] | None = None,
    elsewhere: SchemeLike | None = None,
    **options: Any,
) -> ModelType:
    """Replaces the position encoding of a transformers model. In place, on this instance only.

    The native mechanisms (rotary functions, position tables, relative biases) are disabled, and the scheme takes their
    place. Their weights stay in the model, frozen, so that `unpatch_model` restores the stock model exactly. If the
    model is already patched, the new scheme replaces the old one. The scheme that is already in force keeps its
    parameters; unpatch the model first to start anew.

    The model gets a copy of its config, in which the scheme is named. Other models that were built from the same config
    object are not affected.

    A model of several modalities has parts: "text", "vision", "audio" and others (`inspect_model` lists them). One call
    patches one part, by default the text part. Other parts keep their positions, or the scheme of an earlier call.

    If an error is raised, the model is left unchanged.

    Args:
        model: any `PreTrainedModel` with softmax self-attention, or a PEFT model around one.
        scheme: a name from `list_schemes()`, a config such as `RopeConfig(theta=5e5)`, the dictionary of a config, or a
            list of these that are combined. "native", there or inside a config, stands for the model's native scheme. A
            `PartsConfig` names the parts itself.
        part: the part that gets the scheme. By default the text part, or the part of the model's main input.
        layers: indices of the layers of the part that get the scheme; all by default.
        elsewhere: the scheme of the other layers; by default they keep their native scheme.
        **options: fields of the scheme's config, for a scheme given by name.

    Returns:
        The model. `model.position_encoding` holds the config in force and the report of what was replaced.

    Raises:
        UnknownNameError: for an unknown scheme, option or part, with the nearest names.
        ValueError: for an option out of range.
        UnsupportedError: if the scheme cannot be computed correctly in this architecture.
    """
    transaction = Transaction(model)
    config = as_scheme(scheme, **options)
    if elsewhere is not None and layers is None:
        raise ValueError("`elsewhere` is the scheme of the layers that are not in `layers`. Pass `layers` as well.")
    if unfilled := place_scheme(transaction, config, part, layers, elsewhere):
        warn_of_random_rows(unfilled, config)
    return model


def place_scheme(
    transaction: Transaction,
    config: SchemeConfig,
    part: str | None = None,
    layers: Iterable[int] | None = None,
    elsewhere: SchemeLike | None = None,
) -> set[UnfilledTable]:
    """`patch_model` in a transaction, whose anatomy of the model has been used before.

    Returns the tables of the scheme that keep random rows beside a native table.
    """
    # Planning may run the model, which would interfere with the thread of continuous batching.
    transaction.refuse_running()
    previous = transaction.encoding
    requested = _requested(transaction, config, part, layers)
    # A model with one part keeps a PartsConfig, because it may come from the checkpoint of a model with several.
    several = isinstance(config, PartsConfig) or len(transaction.anatomy.parts) > 1
    encoding = _plan(transaction, requested, several, layers, elsewhere)
    _warn_if_uncacheable(encoding, transaction)
    if not names_native(config):
        _warn_of_raster_order(encoding, previous)
    if previous is not None:
        # A length chosen with `extend_context` is kept, up to the longest sequence that the new scheme supports.
        encoding.record.follow(previous.record)
    transaction.install(encoding)
    before = () if previous is None else tuple(previous.stacks.values())
    return {table for stack in encoding.stacks.values() if stack not in before for table in stack.unfilled}


def _requested(
    transaction: Transaction, config: SchemeConfig, part: str | None, layers: Iterable[int] | None
) -> dict[str, SchemeConfig]:
    """The schemes that a call asks for, by name of the part."""
    anatomy = transaction.anatomy
    if not isinstance(config, PartsConfig):
        return {anatomy.part(part): config}
    if part is not None or layers is not None:
        raise ValueError(
            "A PartsConfig names the parts of a model itself, so `part` and `layers` cannot be combined with it. Pass "
            "the scheme of one part, or give a part of the PartsConfig a schedule."
        )
    return {anatomy.part(name): scheme for name, scheme in config.by_part().items()}


def _plan(
    transaction: Transaction,
    requested: Mapping[str, SchemeConfig],
    several: bool,
    layers: Iterable[int] | None,
    elsewhere: SchemeLike | None,
) -> PositionEncoding:
    """Builds the encoding of a model in which some parts get another scheme."""
    target, previous = transaction.model, transaction.encoding
    schemes = _in_force(previous)
    for part, config in requested.items():
        schemes[part] = _resolve(transaction, part, config, layers, elsewhere)
    whole = of_parts(schemes) if several else next(iter(schemes.values()))
    changed = [part for part in requested if schemes[part] != scheme_in_part(previous, part)]
    # Defaults that depend on the length use the native one, even if the config has been given another since.
    with at_native_lengths(target.config):
        encoding = transaction.plan(whole, kept=_kept(previous, changed))
    if (limits := architecture_of(target.config).limits) is not None:
        for stack in encoding.stacks.values():
            if not stack.runtime.layout.has_axes:  # Patches of images are not cached.
                limits.refuse(stack.needs(), encoding.label)
    return encoding


def _in_force(encoding: PositionEncoding | None) -> dict[str, SchemeConfig]:
    """The schemes in force by name of the part; empty for a model without parts."""
    config = None if encoding is None else encoding.config
    return config.by_part() if isinstance(config, PartsConfig) else {}


def _kept(encoding: PositionEncoding | None, changed: Collection[str]) -> dict[str, StackEncoding]:
    """What is in place in the stacks of other parts. Its parameters may have been trained."""
    stacks = {} if encoding is None else encoding.stacks
    return {name: stack for name, stack in stacks.items() if stack.part not in changed}


def _resolve(
    transaction: Transaction,
    part: str,
    config: SchemeConfig,
    layers: Iterable[int] | None,
    elsewhere: SchemeLike | None,
) -> SchemeConfig:
    """The scheme of every layer of one part."""
    stacks = transaction.verified_stacks(part)
    if transaction.encoding is None and transaction.anatomy.is_runnable:
        verify_adopted_tables(transaction.anatomy, stacks, transaction)
    other = NativeConfig() if elsewhere is None else as_scheme(elsewhere)
    native = partial(native_scheme_of, transaction, part)
    # The native scheme may differ between layers; then it is asked for in the chosen ones.
    merged = names_native(config) and not isinstance(config, LayeredConfig)
    config = resolve_native(config, stacks, native)
    other = other if layers is None else resolve_native(other, stacks, native)
    config = with_native_options(config, stacks, native)
    config = schedule(config, stacks, layers, other, merged=merged)
    warn_if_invisible(config, stacks)
    warn_if_theta_changes(config, stacks)
    warn_of_invented_grid(config, stacks)
    others = [stack for stack in stacks if not stack.layout.takes_tokens]
    # Where layers were exchanged since the last patch, the scheme in force could not be restored after the run.
    if others and transaction.anatomy.is_runnable and not transaction.change():
        with transaction.suspended():
            refuse_failing(transaction.anatomy, config, others, transaction)
    return config


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
        encoding.record.follow(previous.record)
        transaction.install(encoding)
    return model


def _warn_of_raster_order(encoding: PositionEncoding, previous: PositionEncoding | None) -> None:
    """Warns if a scheme for the order of tokens is placed where tokens are the patches of images.

    Stacks that keep their scheme do not count, because the call that placed it has warned.
    """
    before = set() if previous is None else set(previous.stacks.values())
    placed = [stack for stack in encoding.stacks.values() if stack not in before]
    names = {name for stack in placed for name in stack.runtime.layout.in_raster_order(stack.acting_parts())}
    if names:
        warn_user(
            f"The order of tokens is read by {' and '.join(sorted(names))} of the scheme "
            f"{scheme_label(encoding.config)!r}, and this model's tokens are patches of images, which are numbered row "
            "by row: the last patch of a row is a neighbour of the first patch of the next one. "
            f"{TWO_DIMENSIONAL}"
        )


def warn_of_random_rows(tables: Iterable[UnfilledTable], config: SchemeConfig) -> None:
    """Warns of tables of a new scheme that could have taken over the native one, and have rows that it did not fill."""
    for table in tables:
        remedy = f"For a trained model, make them from its own rows: {TABLE_EXTENSION}."
        if not table.taken:
            remedy = "To keep the table of a trained model, give the scheme the sizes of the model's own, or 'native'."
        warn_user(
            f"{table.random} of the {table.rows} rows of the table of {scheme_label(config)!r} are drawn at "
            f"random: the model's own table has {table.native_rows} rows"
            f"{'' if table.taken else ', which do not fit'}. {remedy}"
        )


def _warn_if_uncacheable(encoding: PositionEncoding, transaction: Transaction) -> None:
    if is_length_dependent(encoding) and getattr(transaction.model, "generation_config", None) is not None:
        warn_user(
            f"Scheme {scheme_label(encoding.config)!r} depends on the length of the sequence, or on tokens that a "
            "cache does not store, so no cache can be extended. generate() recomputes the whole sequence for every "
            "token (generation_config.use_cache=False)."
        )
