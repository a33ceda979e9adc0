"""The native scheme of a stock model, as a config of this library.

Some layers of a rotary architecture do not rotate, and some architectures have several rotary modules. The code that
selects them differs between architectures, so the selection is observed in a short forward pass.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionEncodingError, UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.architectures.declaration import undescribed
from hf_posenc.patching.anatomy.discovery import build_context
from hf_posenc.patching.anatomy.formulas import (
    check_fixed_tables,
    describes,
    frequencies_by_axis,
    phases_of,
    rotation_by,
    spectra_of,
)
from hf_posenc.patching.anatomy.rotary_functions import inverse_frequencies_of, looks_phases_up, pairing, rotary_call
from hf_posenc.patching.anatomy.short_runs import run_briefly
from hf_posenc.patching.anatomy.sites import AttentionLayer
from hf_posenc.patching.anatomy.verification import verify_native
from hf_posenc.patching.forwards import rebind, unrotated_heads
from hf_posenc.schemes import (
    ComposedConfig,
    LearnedConfig,
    MRopeConfig,
    NoneConfig,
    RopeConfig,
    ScheduleConfig,
    from_rope_parameters,
)
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.rotary.mrope import AXES
from hf_posenc.schemes.rotary.scaling import rope_inverse_frequencies

if TYPE_CHECKING:
    from hf_posenc.patching.place.transaction import Transaction

#: Relative error of a frequency that is computed from the cosine and the sine of its angle in float32.
_TOLERANCE = 1e-5
_OBSERVED_TOKENS = 3


@dataclass
class Rotation:
    """One call of a layer's rotary function.

    Args:
        function: the rotary function.
        phases: the cosines (or complex phases) passed to it, `(batch, query_len, width)`.
    """

    function: Any
    phases: Tensor


def _observe_rotations(trial: Transaction, stacks: list[Stack]) -> dict[str, Rotation]:
    """Runs the stock model on three tokens; returns the rotation of every layer that rotated, by attention path.

    Raises:
        UnsupportedError: if the model is on the meta device.
    """
    if not trial.anatomy.is_runnable:
        raise UnsupportedError(
            "The native scheme of a rotary model is determined by running it, but this model is on the meta device. "
            "Load its weights first."
        )
    seen: dict[str, Rotation] = {}
    forwards: list[tuple[nn.Module, Any]] = []
    for stack in stacks:
        for attention in stack.attentions:
            if attention.rotary_functions:
                path, forward = f"{stack.name}:{attention.path}", inspect.unwrap(type(attention.module).forward)
                functions = {name: forward.__globals__[name] for name in attention.rotary_functions}
                recorded = {name: _recording(function, path, seen) for name, function in functions.items()}
                forwards.append((attention.module, types.MethodType(rebind(forward, recorded), attention.module)))
    with trial.with_forwards(forwards):
        run_briefly(trial.anatomy, stacks, _OBSERVED_TOKENS)
    return seen


def _recording(function: Any, path: str, seen: dict[str, Rotation]) -> Any:
    rotary = rotary_call(function)

    def record(*args: Any, **kwargs: Any) -> Any:
        phases = rotary.phases(args, kwargs)
        if isinstance(phases, Tensor):
            seen.setdefault(path, Rotation(function, phases.detach()))
        return function(*args, **kwargs)

    return record


def find_native_scheme(trial: Transaction, stacks: list[Stack]) -> SchemeConfig:
    """The scheme of verified stacks of a stock model, with its parameters. See `native_scheme`.

    Raises:
        UnsupportedError: if no scheme describes it.
    """
    rotating = any(attention.rotary_functions for stack in stacks for attention in stack.attentions)
    rotations = _observe_rotations(trial, stacks) if rotating else {}
    schemes = [stack.layout.native_scheme(stack, rotations, trial) for stack in stacks]
    if len(set(schemes)) > 1 and all(isinstance(scheme, LearnedConfig) for scheme in schemes):
        # The tables have different lengths, as in LED.
        schemes = [dataclasses.replace(scheme, num_positions=None) for scheme in schemes]
    if any(scheme != schemes[0] for scheme in schemes):
        raise UnsupportedError(
            f"The stacks of {type(trial.anatomy.model).__name__} have different position encodings "
            f"({'; '.join(f'{s.name}: {c}' for s, c in zip(stacks, schemes, strict=True))}), which a single config "
            "cannot describe."
        )
    declared = any(stack.architecture.native or stack.layout.has_axes or stack.mechanism for stack in stacks)
    looked_up = any(looks_phases_up(rotary.module) for stack in stacks for rotary in stack.rotaries)
    if trial.anatomy.is_runnable and (declared or looked_up or any(stack.has_other_code for stack in stacks)):
        # Phases and tables were compared by value, but a declaration depends only on the name of the architecture,
        # and somebody's own code may use a table in another way.
        verify_native(trial, schemes[0], stacks)
    for stack in stacks:
        if stack.architecture.fixed_tables is not None:
            check_fixed_tables(stack.architecture.fixed_tables(stack), stack)
    return schemes[0]


def declared_scheme(stack: Stack) -> SchemeConfig | None:
    """The scheme that a declaration names for the whole stack; `None` if discovery has to find it.

    Raises:
        UnsupportedError: if no scheme describes a declared mechanism.
    """
    architecture = stack.architecture
    if architecture.native is not None:
        return architecture.native(stack)
    if architecture.mechanism or architecture.rotary_method:
        raise undescribed(
            f"The native mechanism of {type(stack.module).__name__} ({architecture.mechanism or 'undeclared'}) is not "
            "among the schemes of this library."
        )
    return None


def layer_schemes(stack: Stack, vectors: list[SchemeConfig], rotations: Mapping[str, Rotation]) -> SchemeConfig:
    """The scheme of a stack that adds vectors and rotates in some of its layers."""
    layers = {attention.layer: _rotation_scheme(stack, attention, rotations) for attention in stack.attentions}
    distinct = set(layers.values())
    if len(distinct) == 1:
        return composed([*vectors, next(iter(distinct))])
    none: SchemeConfig = NoneConfig()
    schemes = (composed([*vectors, layers.get(layer, none)]) for layer in range(max(layers) + 1))
    return ScheduleConfig(layers=tuple(schemes))


def several_tables(stack: Stack, names: list[str]) -> UnsupportedError:
    """The error for a stack with more than one table."""
    return undescribed(
        f"{type(stack.module).__name__} adds several position tables ({', '.join(names)}), which a single scheme "
        "cannot describe.",
        "them",
    )


def composed(parts: list[SchemeConfig]) -> SchemeConfig:
    """Combines the schemes that have an effect into one."""
    acting = [part for part in parts if not isinstance(part, NoneConfig)]
    if not acting:
        return NoneConfig()
    return acting[0] if len(acting) == 1 else ComposedConfig(parts=tuple(acting))


def _rotation_scheme(stack: Stack, attention: AttentionLayer, rotations: Mapping[str, Rotation]) -> SchemeConfig:
    if (relative := attention.relative) is not None:
        by_module = relative.instead is unrotated_heads
        scheme = rotation_by(relative.projection, attention.head_dim) if by_module else relative.scheme
        if scheme is None:
            raise undescribed(f"No scheme of this library describes the {relative.description} in {attention.path}.")
        return scheme
    rotation = rotations.get(f"{stack.name}:{attention.path}")
    if rotation is None:
        return NoneConfig()
    rotary, layer_type = _source(stack, rotation, attention.layer_type)
    return _rotary_config(stack, attention, rotary, layer_type, rotation)


def _source(stack: Stack, rotation: Rotation, own_type: str | None) -> tuple[nn.Module, str | None]:
    """The rotary module and layer type whose phases a layer received.

    Several modules may have the same phases at these few positions, so the layer's own type is tried first.
    """
    length = rotation.phases.shape[1]
    position_ids = torch.arange(length, device=rotation.phases.device).unsqueeze(0)
    hidden = rotation.phases.real.new_zeros(1, length, 1) if rotation.phases.is_complex() else rotation.phases
    for rotary in stack.rotaries:
        types = set(getattr(stack.config, "layer_types", None) or ())
        known = sorted(types, key=lambda layer_type: (layer_type != own_type, layer_type))
        for layer_type in (None, *known):
            phases = phases_of(rotary.module, hidden, position_ids, layer_type)
            if phases is not None and phases.shape[-1] == rotation.phases.shape[-1]:
                shown = rotation.phases[:1] if rotation.phases.dim() == 3 else rotation.phases[0, :1]
                if torch.allclose(phases.to(shown), shown, atol=1e-3 if hidden.dtype != torch.float32 else 1e-6):
                    return rotary.module, layer_type
    raise UnsupportedError(
        f"The rotary phases used by a layer of {type(stack.module).__name__} do not come from any of its rotary "
        f"modules ({', '.join(rotary.path for rotary in stack.rotaries) or 'it has none'})."
    )


def _rotary_config(
    stack: Stack, attention: AttentionLayer, rotary: nn.Module, layer_type: str | None, rotation: Rotation
) -> SchemeConfig:
    width, layout = 2 * inverse_frequencies_of(rotary, layer_type).shape[-1], pairing(rotation.function)
    context = build_context(stack, attention)
    # The config of the module takes precedence, because that of the stack may have been replaced.
    source = next(config for config in (getattr(rotary, "config", None), stack.config) if config is not None)
    parameters = getattr(source, "rope_parameters", None)
    if isinstance(parameters, dict) and layer_type in parameters:
        parameters = parameters[layer_type]
    by_axis = frequencies_by_axis(rotary, layer_type, layout)
    if by_axis is not None:
        return _multimodal_scheme(by_axis, parameters, layout, stack)
    spectra = spectra_of(rotary, layer_type, parameters)
    config = _from_parameters(source, parameters, width, layout)
    if config is not None and describes(config, spectra, context):
        return config
    stored, scaling = spectra[0].frequencies, spectra[0].scaling
    if all(torch.equal(spectrum.frequencies, stored) and spectrum.scaling == scaling for spectrum in spectra):
        frequencies = tuple(stored.tolist())
        return RopeConfig(rotary_dim=width, layout=layout, inverse_frequencies=frequencies, attention_scaling=scaling)
    # Fixed frequencies would lose the changes beyond the original length. A cast to half precision rounds them.
    if config is not None and spectra[0].rounded and describes(config, spectra, context, tolerance=1e-2):
        return config
    raise UnsupportedError(
        f"The frequencies in {type(rotary).__name__} do not match the rope_parameters of its config, and they depend "
        "on the length of the sequence. No scheme describes such a module. Changing the config after the module was "
        "built, or after its first run, does not change its buffers: build the model from the config that you want."
    )


def _multimodal_scheme(by_axis: Tensor, parameters: Any, layout: str, stack: Stack) -> SchemeConfig:
    """The scheme with the frequencies `by_axis`, `(3, pairs)` float32 in radians per position on each axis."""
    axes = by_axis.abs().argmax(0)
    spectrum = by_axis.gather(0, axes.unsqueeze(0)).squeeze(0)
    known = parameters if isinstance(parameters, dict) else {}
    scaled = known.get("rope_type", "default") not in ("default", "mrope")
    if scaled or not torch.equal((by_axis != 0).sum(0), torch.ones_like(axes)):
        raise undescribed(
            f"{type(stack.module).__name__} rotates pairs with positions on three axes in a way that no scheme of this "
            f"library describes (rope_type {known.get('rope_type')!r})."
        )
    pairs, theta = len(axes), known.get("rope_theta")
    stated: dict[str, Any] = {"rotary_dim": 2 * pairs, "layout": layout}
    if theta and torch.allclose(spectrum, rope_inverse_frequencies(theta, 2 * pairs), rtol=_TOLERANCE, atol=0.0):
        stated["theta"] = float(theta)
    else:
        stated["inverse_frequencies"] = tuple(spectrum.tolist())
    sections = tuple(int((axes == axis).sum()) for axis in range(len(AXES)))
    for interleaved in (False, True):
        config = MRopeConfig(sections=sections, interleaved=interleaved, **stated)
        try:
            if torch.equal(config.axis_of_pair(pairs), axes):
                return config
        except ValueError:
            continue  # These sections cannot be interleaved.
    return MRopeConfig(axes=tuple(axes.tolist()), **stated)


def _from_parameters(config: Any, parameters: Any, width: int, layout: str) -> SchemeConfig | None:
    if not isinstance(parameters, dict) or not parameters.get("rope_type"):
        return None
    try:
        scheme = from_rope_parameters(parameters, getattr(config, "max_position_embeddings", None))
        stated: dict[str, Any] = {"partial_rotary_factor": None} if isinstance(scheme, RopeConfig) else {}
        return dataclasses.replace(scheme, rotary_dim=width, layout=layout, **stated)
    except (PositionEncodingError, ValueError, KeyError, TypeError):
        # This library has no config for these parameters, so the scheme is described by its frequencies.
        return None
