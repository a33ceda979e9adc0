"""Vectors that are added to the embeddings, as rows of the architecture's own table of positions."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import placed_additives, placed_layers, refuse_beyond_rotation, rows_of
from hf_posenc.export.stock.form import StockForm, config_of, stock_config, stock_state
from hf_posenc.patching.find.tables import table_origin, table_weight


def own_table(model: PreTrainedModel) -> StockForm:
    """Returns the model's own class with the vectors of the scheme in its table; without a scheme, zeros.

    The table has as many rows as the model has positions, so longer sequences are not possible.

    Raises:
        UnsupportedError: if the class has no table, or the scheme does more than add vectors.
    """
    name, config, state = type(model).__name__, stock_config(model), stock_state(model)
    layers = placed_layers(model)
    refuse_beyond_rotation(layers, f"A {name} with a table of positions")
    if any(layer.query_key_map is not None for layer in layers):
        raise UnsupportedError(f"A {name} with a table of positions does not rotate queries and keys.")
    for stack, additive in placed_additives(model):
        if len(stack.tables) != 1:
            raise UnsupportedError(f"A {type(stack.module).__name__} has {len(stack.tables)} tables of positions.")
        table = stack.tables[0]
        native = table_weight(table.module)
        key = ".".join(filter(None, (stack.path, table.path, "weight")))
        if native is None or key not in state:
            raise UnsupportedError(f"The table {key} of {type(stack.module).__name__} is not a stored weight.")
        origin = table_origin(table.module)
        count = model.position_encoding.lengths.current or native.shape[0] - origin
        rows = native.new_zeros(count, native.shape[1]) if additive is None else rows_of(additive, count)
        # The first rows belong to padding tokens.
        state[key] = torch.cat((native.detach()[:origin], rows.to(native)))
        if count != native.shape[0] - origin:
            own = config_of(stack, model, config)
            limit = getattr(own, "max_position_embeddings", None)
            if not isinstance(limit, int):
                raise UnsupportedError(f"{type(own).__name__} has no max_position_embeddings for a longer table.")
            own.max_position_embeddings = limit + state[key].shape[0] - native.shape[0]
    return StockForm(type(model), config, state, f"{name} with the vectors as rows of its table of positions")
