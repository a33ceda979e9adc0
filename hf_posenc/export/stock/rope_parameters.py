"""A rotation by any frequencies, as the factors of `rope_type="longrope"` (arXiv:2402.13753)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import QUERY_FACTOR, STOPPED, Layer, ModelParts, Rotation, rotation_of
from hf_posenc.export.stock.form import StockForm, config_of, current_config, stock_state
from hf_posenc.patching.anatomy.discovery import build_context, native_pairing
from hf_posenc.schemes import BuildContext


def own_rotation(parts: ModelParts) -> StockForm:
    """Returns the model's own class with the frequencies of the scheme in its config.

    Raises:
        UnsupportedError: if the scheme is not one rotation for all layers (of a type), or the class has none.
    """
    name, layers = parts.name, parts.layers
    if any(layer.stack.reads_axes for layer in layers):
        raise UnsupportedError(
            f"A {name} rotates by the coordinates of images, which one set of factors cannot express."
        )
    if any(stack.tables for stack, _ in parts.stacks):
        raise UnsupportedError(f"A {name} cannot replace its position table with a rotation.")
    config, state = current_config(parts), stock_state(parts.model)
    by_layer_type: dict[str | None, dict[str, Any]] = {}
    for layer in layers:
        rotation = rotation_of(layer)
        layer_type, context = layer.attention.layer_type, build_context(layer.stack, layer.attention)
        if not layer.attention.rotary_functions or context.rotary_dim is None or context.max_positions is None:
            raise UnsupportedError(f"{layer.name} of a {name} has no rotation whose frequencies could be set.")
        parameters = rotation_parameters(
            rotation,
            context.rotary_dim,
            stated_head_dim(layer.stack.config, context),
            parts.theta(layer.attention),
            context.max_positions,
        )
        if by_layer_type.setdefault(layer_type, parameters) != parameters:
            raise UnsupportedError(f"The layers rotate differently, but a {name} has one rotation for all of them.")
        fold(state, layer, rotation, native_pairing(layer.stack, layer.attention) or "half")
    write_rope_parameters(config_of(layers[0].stack, parts.model, config), by_layer_type)
    carrier = f"{name} with the frequencies as factors of rope_type 'longrope'"
    return StockForm(type(parts.model), config, state, carrier=carrier)


def rotation_parameters(
    rotation: Rotation, rotary_dim: int, head_dim: int, theta: float, length: int
) -> dict[str, Any]:
    """Returns the `rope_parameters` of a rotation by any frequencies.

    Args:
        rotation: the rotation. Without frequencies, every pair is stopped.
        rotary_dim: how many dimensions the architecture rotates.
        head_dim: width of a head, as `stated_head_dim` returns it.
        theta: the base that the factors refer to.
        length: the model's `max_position_embeddings`.

    Raises:
        UnsupportedError: if the architecture rotates another number of dimensions than the scheme.
    """
    if rotation.rotary_dim not in (0, rotary_dim):
        raise UnsupportedError(
            f"The stock model rotates {rotary_dim} dimensions of a head, but the scheme rotates {rotation.rotary_dim}."
        )
    wanted = rotation.frequencies if rotation.rotary_dim else torch.zeros(rotary_dim // 2)
    factors = [_factor(float(frequency), theta, index, rotary_dim) for index, frequency in enumerate(wanted)]
    parameters = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotary_dim / head_dim}
    if rotation.scaling == 1.0 and all(factor == 1.0 for factor in factors):
        return parameters
    # vLLM does not read `attention_factor`. Without its own names, it computes the factor from the model's length and
    # the original one, which is 1 because they are equal.
    of_vllm = {} if rotation.scaling == 1.0 else dict.fromkeys(("short_mscale", "long_mscale"), rotation.scaling)
    return parameters | {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": rotation.scaling,
        "original_max_position_embeddings": length,
        **of_vllm,
    }


def stated_head_dim(config: Any, context: BuildContext) -> int:
    """The width that stock code multiplies by `partial_rotary_factor`.

    In multi-head latent attention (DeepSeek), the config's `head_dim` is the rotated part of a head alone.
    """
    try:
        latent, stated = (getattr(config, name, None) for name in ("qk_rope_head_dim", "head_dim"))
    except RuntimeError:
        # A config whose layers differ does not name one value for all.
        return context.head_dim
    return context.head_dim if latent is None or not latent == stated == context.rotary_dim else int(latent)


def _factor(wanted: float, theta: float, index: int, rotary_dim: int) -> float:
    """The float32 factor f for which `1 / (f * theta ** (2 * index / rotary_dim))` is closest to a frequency."""
    if wanted == 0.0:
        return STOPPED
    power = torch.tensor(theta) ** (torch.tensor([2.0 * index]) / rotary_dim)
    guess = 1.0 / (torch.tensor([wanted]) * power)
    infinity = torch.tensor(float("inf"))
    near = torch.cat((torch.ones(1), guess, guess.nextafter(infinity), guess.nextafter(-infinity)))
    candidates = 1.0 / (near * power)
    return float(near[(candidates - wanted).abs().argmin()])


def write_rope_parameters(config: Any, by_layer_type: dict[str | None, dict[str, Any]]) -> None:
    """Sets the rotation in a config: one for all layers, or one per layer type.

    Raises:
        UnsupportedError: if the config has no rotation, or one for layers that need several.
    """
    current = getattr(config, "rope_parameters", None)
    if not isinstance(current, dict) or not by_layer_type:
        raise UnsupportedError(f"{type(config).__name__} has no rope_parameters.")
    if current.get(QUERY_FACTOR):
        raise UnsupportedError(
            f"The attention layers read {QUERY_FACTOR} from the rope_parameters of {type(config).__name__}, which "
            "other frequencies would replace."
        )
    if set(by_layer_type) & set(current):
        config.rope_parameters = {
            key: by_layer_type.get(key, value) if isinstance(value, dict) else value for key, value in current.items()
        }
        return
    distinct = list({repr(parameters): parameters for parameters in by_layer_type.values()}.values())
    if len(distinct) > 1:
        raise UnsupportedError(
            f"The layers of this model need different rope_parameters ({distinct}), but {type(config).__name__} has a "
            "single set for all of them."
        )
    config.rope_parameters = copy.deepcopy(distinct[0])


def fold(state: dict[str, Tensor], layer: Layer, rotation: Rotation, layout: str) -> None:
    """Moves the pairs and the basis of a rotation into the projections of queries and keys.

    Args:
        state: weights of the model; those of the layer are replaced.
        layer: the layer.
        rotation: its rotation.
        layout: which dimensions form a pair in the stock model.

    Raises:
        UnsupportedError: if the layer has no separate projections of queries and keys.
    """
    if not rotation.rotary_dim or (rotation.basis is None and rotation.layout == layout):
        return
    module, order = layer.attention.module, rotation.in_layout(layout)
    for names in (("q_proj", "query"), ("k_proj", "key")):
        name = next((name for name in names if isinstance(getattr(module, name, None), torch.nn.Linear)), None)
        if name is None:
            raise UnsupportedError(f"{layer.name} has no separate projections of queries and keys.")
        for key in (f"{layer.name}.{name}.weight", f"{layer.name}.{name}.bias"):
            if key in state:
                state[key] = rotation.folded(state[key], order)
