"""Conversion of a patched model to a stock config and weights with stock names.

The conversion is not verified here: the target loads the result with stock transformers and compares the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import ModelParts, rows_of
from hf_posenc.export.stock.form import StockForm, config_of, stock_config, stock_state, write_current_length
from hf_posenc.export.stock.rope_parameters import stated_head_dim, write_rope_parameters
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.discovery import build_context
from hf_posenc.patching.anatomy.sites import table_weight
from hf_posenc.patching.inspection import native_scheme
from hf_posenc.patching.place.config_entry import at_native_lengths
from hf_posenc.schemes import (
    LayeredConfig,
    LearnedConfig,
    NoneConfig,
    PRopeConfig,
    RopeConfig,
    SchemeConfig,
    T5Config,
    to_rope_parameters,
)
from hf_posenc.schemes.additive.learned import LearnedEncoding
from hf_posenc.schemes.bias.t5 import T5Bias
from hf_posenc.schemes.parts import AdditiveEncoding

#: Name of a table of relative biases in T5 and models like it.
_BIAS_TABLE = "relative_attention_bias.weight"


def own_class(parts: ModelParts) -> StockForm:
    """Returns the model's own class with a stock config and stock names of the weights.

    Raises:
        UnsupportedError: if stock configs and weights cannot express the scheme.
    """
    model, carrier = parts.model, f"the config of {parts.name}"
    if parts.placed is None:
        return StockForm(type(model), model.config, model.state_dict(), carrier=carrier)
    scheme, native = parts.text_scheme, _native(parts)
    config, state = stock_config(model), stock_state(model)
    if not (isinstance(scheme, LayeredConfig) and scheme == native):
        with at_native_lengths(model.config):
            _write_scheme(config, state, parts, native)
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    has_table = any(stack.tables for stack, _ in parts.stacks)
    # The length in the config is that of a table, or determines where a dynamic scaling starts.
    if not has_table and all(flat.get("rope_type") != "dynamic" for flat in by_layer_type or [parameters]):
        write_current_length(config, parts)
    return StockForm(type(model), config, state, carrier=carrier)


def own_table(parts: ModelParts) -> StockForm:
    """Returns the model's own class with the vectors of the scheme in its table; without a scheme, zeros.

    The table has as many rows as the model has positions, so longer sequences are not possible.

    Raises:
        UnsupportedError: if the class has no table.
    """
    model = parts.model
    config, state = stock_config(model), stock_state(model)
    for stack, encoding in parts.stacks:

        def replaced(native: Tensor, origin: int, additive: AdditiveEncoding | None = encoding.additive) -> Tensor:
            count = model.position_encoding.lengths.current or native.shape[0] - origin
            rows = native.new_zeros(count, native.shape[1]) if additive is None else rows_of(additive, count)
            # The first rows belong to padding tokens.
            return torch.cat((native[:origin], rows.to(native)))

        with at_native_lengths(model.config):
            _replace_table(config_of(stack, model, config), state, stack, replaced)
    carrier = f"{parts.name} with the vectors as rows of its table of positions"
    return StockForm(type(model), config, state, carrier=carrier)


def _write_scheme(config: Any, state: dict[str, Tensor], parts: ModelParts, native: SchemeConfig) -> None:
    scheme = parts.text_scheme
    config = config_of(parts.stacks[0][0], parts.model, config)
    native_types = {type(part) for part in native.acting_together()}
    native_types -= {part for part in native_types if issubclass(part, LayeredConfig)}
    if scheme != native and any(stack.reads_axes for stack, _ in parts.stacks):
        raise UnsupportedError(
            f"A {parts.name} rotates by the coordinates of images, and the config states no other rotation of them. "
            "The comparison on token ids would not see the difference."
        )
    for part in scheme.acting_together():
        if isinstance(part, PRopeConfig) and PRopeConfig not in native_types:
            raise UnsupportedError(
                "Programs that do not know the rope_type 'proportional' would rotate all pairs, so it is only written "
                "for models that have it natively."
            )
        if isinstance(part, RopeConfig | PRopeConfig):
            _write_rope_parameters(config, part, parts)
        elif isinstance(part, LearnedConfig):
            for stack, encoding in parts.stacks:
                _write_table(config, state, part, stack, encoding)
        elif isinstance(part, T5Config):
            for stack, encoding in parts.stacks:
                _write_relative_biases(state, stack, encoding, native)
        elif isinstance(part, NoneConfig) and native_types == {T5Config}:
            for name in [name for name in state if name.endswith(_BIAS_TABLE)]:
                state[name] = torch.zeros_like(state[name])
        elif part not in native.acting_together():
            # A comparison of outputs is not enough: some schemes only act beyond a certain distance.
            raise UnsupportedError(f"A {parts.name} has no such mechanism, or has it with other options.")


def _native(parts: ModelParts) -> SchemeConfig:
    """Returns the architecture's native scheme; no positions if no scheme describes it."""
    try:
        return native_scheme(parts.model)
    except UnsupportedError:
        return NoneConfig()


def _write_rope_parameters(config: Any, scheme: SchemeConfig, parts: ModelParts) -> None:
    by_layer_type: dict[str | None, dict[str, Any]] = {}
    for layer in parts.layers:
        if layer.attention.rotary_functions:
            context = build_context(layer.stack, layer.attention)
            parameters = to_rope_parameters(scheme, context)
            parameters["partial_rotary_factor"] *= context.head_dim / stated_head_dim(layer.stack.config, context)
            by_layer_type[layer.attention.layer_type] = parameters
    write_rope_parameters(config, by_layer_type)


def _write_table(
    config: Any, state: dict[str, Tensor], scheme: LearnedConfig, stack: Stack, encoding: torch.nn.Module
) -> None:
    part = next((part for part in encoding.modules() if isinstance(part, LearnedEncoding)), None)
    if part is None:
        raise UnsupportedError(f"The scheme has no table of vectors for a {type(stack.module).__name__}.")
    if scheme.extension != "error":
        raise UnsupportedError(
            f"LearnedConfig.extension={scheme.extension!r} has no stock counterpart: a stock table ends with its last "
            "row. To export it, patch with extension='error' (the weights stay the same)."
        )
    rows, offset = part.weight.detach(), part.offset

    def replaced(native: Tensor, origin: int) -> Tensor:
        before = rows[:origin] if offset == origin else native[:origin].to(rows)
        return torch.cat((before, rows[offset:]))

    _replace_table(config, state, stack, replaced)


def _replace_table(
    config: Any, state: dict[str, Tensor], stack: Stack, replaced: Callable[[Tensor, int], Tensor]
) -> None:
    """Exchanges the only table of a stack, given its rows and the row of position 0, and writes its length."""
    name = type(stack.module).__name__
    if len(stack.tables) != 1:
        raise UnsupportedError(f"A {name} has {len(stack.tables)} position tables; exactly one can be replaced.")
    table = stack.tables[0]
    native, key = table_weight(table.module), ".".join(filter(None, (stack.path, table.path, "weight")))
    if native is None or key not in state:
        raise UnsupportedError(f"The table {key} of {name} is not a stored weight.")
    state[key] = replaced(native.detach(), table.origin)
    if state[key].shape != native.shape:
        stated = ("max_position_embeddings", f"max_{stack.name}_position_embeddings")
        length_name = next((name for name in stated if isinstance(getattr(config, name, None), int)), None)
        if length_name is None:
            raise UnsupportedError(f"{type(config).__name__} has no max_position_embeddings for a longer table.")
        # Several stacks may state their length in one field, so it is counted from that of the model.
        setattr(config, length_name, getattr(stack.config, length_name) + state[key].shape[0] - native.shape[0])


def _write_relative_biases(
    state: dict[str, Tensor], stack: Stack, encoding: torch.nn.Module, native: SchemeConfig
) -> None:
    """Copies trained buckets to the architecture's own tables, layer by layer."""
    biases = [part for part in encoding.modules() if isinstance(part, T5Bias)]
    # Not left to the comparison of outputs: the buckets of close distances can be equal all the same.
    ends = {part.max_distance for part in native.acting_together() if isinstance(part, T5Config)}
    other = next((bias.max_distance for bias in biases if bias.max_distance not in ends), None)
    if ends and other is not None:
        raise UnsupportedError(
            f"The buckets of the scheme end at a distance of {other}, and those of a {type(stack.module).__name__} at "
            f"{min(ends)}."
        )
    prefix = f"{stack.path}." if stack.path else ""
    names = [name for name in state if name.startswith(prefix) and name.endswith(_BIAS_TABLE)]
    if len(names) != len(biases):
        raise UnsupportedError(
            f"A {type(stack.module).__name__} has {len(names)} tables of relative biases, but the scheme has "
            f"{len(biases)}, so the scheme 't5' cannot be written as a stock checkpoint of it."
        )
    for name, bias in zip(names, biases, strict=True):
        if state[name].shape != bias.weight.shape:
            raise UnsupportedError(
                f"{name} is {tuple(state[name].shape)} in the stock model, but the scheme's table is "
                f"{tuple(bias.weight.shape)}; stock buckets are fixed by the config of the model."
            )
        state[name] = bias.weight.detach().clone()
