"""Frames of sound, or steps of a time series: the stack makes tokens of its features by convolutions or patches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack, reads_frames
from hf_posenc.patching.anatomy.architectures.declaration import undescribed
from hf_posenc.patching.anatomy.architectures.example_inputs import FRAMES, SAMPLES, numbers
from hf_posenc.patching.anatomy.discovery import SOURCE_LENGTH, WIDTHS, first_int
from hf_posenc.patching.anatomy.formulas import sinusoids_like
from hf_posenc.patching.anatomy.sites import NamedModule, OwnedTable, table_origin
from hf_posenc.patching.anatomy.weights import shape_of
from hf_posenc.patching.call.cache_checks import vectors
from hf_posenc.patching.forwards import PlacedForward, Viewed, WithOverrides, forward_parameters, names_used, view_of
from hf_posenc.patching.layouts.layout import Layout
from hf_posenc.schemes import LearnedConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.parts import AdditiveEncoding

if TYPE_CHECKING:
    from hf_posenc.patching.call.forward_state import ForwardState
    from hf_posenc.patching.call.runtime import StackRuntime

#: Arguments that hold features.
FEATURES = ("input_features", "input_values", "past_values", "patch_input", "audio_mel", "spectrogram", "latents")
_CONVOLUTION = re.compile(r"(^|\.)pos(ition(al)?)?_conv(_embed(ding)?s?)?$")
_FUNCTION = re.compile(r"(^|\.)pos(ition(al)?)?_emb(ed(ding)?s?)?$")
_PARAMETER = re.compile(r"^pos(ition(al)?)?_(enc(oding)?s?|emb(ed(ding)?s?)?)$")
#: Patches of a time series.
_PATCHES = 16
#: Config attributes for the number of features of a frame.
_USUAL_BINS = 80
_BINS = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", "input_feat_size")
#: Those of encoders that call their frames `hidden_states` (Phi-4, Granite).
_FRAME_WIDTHS = ("input_size", "input_dim")
#: Number of positions at which sinusoids are compared with their formula.
_COMPARED = 512
#: With fewer tokens, none are both next to each other and away from the ends.
_FEWEST_TOKENS = 3
_NEIGHBOURS = (
    "convolutions mix neighbouring frames before or between the layers of attention, so the order of the input still "
    "shows without positions"
)


@dataclass
class VectorModule(NamedModule):
    """A module whose output is added to the embeddings.

    Args:
        site: the class that stands in for its forward.
        stride: number of embeddings per vector of a convolution.
    """

    site: type[ConvolutionSite | LengthSite]
    stride: int


@dataclass
class FixedInput:
    """The properties of an encoder that accepts one number of frames only, as many as its table has rows for.

    Args:
        table: attribute of the stack that holds its position table.
        convolutions: the convolutions between the features and the tokens, in order.
    """

    table: str
    convolutions: tuple[nn.Conv1d, ...]

    def tokens(self, frames: int) -> int:
        """Number of tokens that the convolutions make from a number of frames."""
        for layer in self.convolutions:
            padding, reach = int(layer.padding[0]), layer.dilation[0] * (layer.kernel_size[0] - 1)
            frames = (frames + 2 * padding - reach - 1) // layer.stride[0] + 1
        return frames


@dataclass
class Series(Layout):
    """Tokens of a series of features.

    Args:
        vectors: modules whose output is added to the embeddings.
        tables: parameters that are added to the embeddings.
        fixed_input: the properties of an encoder that accepts one number of frames only, or `None`.
        mixes_neighbours: whether other convolutions see neighbouring frames.
    """

    has_own_length = True
    left_alone = (r"(^|\.)adapter\.", "attention of an adapter, which has no positions")
    token_axes = (2, 3)
    features = FEATURES

    vectors: list[VectorModule] = field(default_factory=list)
    tables: list[OwnedTable] = field(default_factory=list)
    fixed_input: FixedInput | None = None
    mixes_neighbours: bool = False

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        """Whether the forward of a model has an argument for features."""
        parameters = forward_parameters(type(module))
        frames = "hidden_states" in parameters and first_int(module.config, _FRAME_WIDTHS) > 0
        return frames or any(name in parameters for name in FEATURES) or reads_frames(module)

    @classmethod
    def find(cls, stack: Stack) -> Layout:
        """Finds the modules and parameters that are added to the embeddings."""
        series = cls(fixed_input=_fixed_input(stack.module, [table.path for table in stack.tables]))
        for path, module in stack.in_definition_order()[1:]:
            site = _site_for(path, module)
            above, _, name = path.rpartition(".")
            # Some architectures build a module that they never call.
            if site is not None and name in names_used(type(stack.module.get_submodule(above)).forward):
                strides = [int(layer.stride[0]) for layer in module.modules() if isinstance(layer, nn.Conv1d)]
                series.vectors.append(VectorModule(path, module, site, stride=strides[0] if strides else 1))
            for name, parameter in module._parameters.items():
                if parameter is not None and _PARAMETER.match(name) and len(shape_of(parameter)) in (2, 3):
                    class_tokens = int(getattr(module, "cls_token", None) is not None)
                    series.tables.append(OwnedTable(path, module, name, class_tokens))
        of_positions = {id(layer) for vectors in series.vectors for layer in vectors.module.modules()}
        others = (layer for layer in stack.module.modules() if id(layer) not in of_positions)
        convolutions = (layer for layer in others if isinstance(layer, nn.Conv1d | nn.Conv2d))
        series.mixes_neighbours = any(max(layer.kernel_size) > 1 for layer in convolutions)
        return series

    @classmethod
    def example(cls, module: PreTrainedModel, length: int) -> dict[str, Any]:
        """A series of a fixed length."""
        parameters = forward_parameters(type(module))
        given: dict[str, Any] = {}
        for name, rule in _RULES.items():
            if name in parameters:
                given[name] = rule(module, given)
        return given

    def vector_sites(self, stack: Stack) -> list[Any]:
        """The tables and parameters, and the modules that are added to the embeddings."""
        return [*super().vector_sites(stack), *self.vectors]

    def runs_alone(self, stack: Stack, model: nn.Module) -> bool:
        """True, because the inputs of the model around it are unknown."""
        return True

    def is_comparable(self, stack: Stack, tokens: Tensor | None) -> bool:
        """Whether there are tokens away from the edges, which convolutions see."""
        if tokens is None and stack.first_layer is not None:
            raise UnsupportedError(
                f"No position mechanism was found in this {type(stack.module).__name__}, and the input of its first "
                "layer is not a tensor, so none can be seen in it. Declare the architecture with "
                f"hf_posenc.register_architecture({stack.config.model_type!r}, architecture=...)."
            )
        return tokens is not None and tokens.shape[1] >= _FEWEST_TOKENS

    def vector_schemes(self, stack: Stack) -> list[SchemeConfig]:
        """The schemes of the tables, the modules and the parameters."""
        learned = [LearnedConfig(num_positions=table.weight.shape[0]) for table in self.tables]
        return [*super().vector_schemes(stack), *(_scheme_of(vectors, stack) for vectors in self.vectors), *learned]

    def install(self, stack: Stack, encoding: Any, journal: Any, report: Any) -> None:
        """Replaces the vectors of the architecture by those of the scheme, which the first module returns."""
        super().install(stack, encoding, journal, report)
        runtime, additive = encoding.runtime, None if stack.tables else encoding.additive
        if self.fixed_input is not None:
            runtime.viewed = InputView(stack.module, self.fixed_input, runtime)
        sources: list[VectorModule | OwnedTable] = [*self.vectors, *self.tables]
        for source in sources:
            site: Any = ParameterSite if isinstance(source, OwnedTable) else source.site
            journal.set_forward(source.module, site(source, runtime, additive))
            if isinstance(source, OwnedTable):
                journal.freeze(source.module, source.name)
            else:
                journal.freeze_all(source.module)
            report.replaced.append(f"{source.full_name}: {site.description} ({type(source.module).__name__})")
            if additive is not None:
                report.placed.append(f"additive: {source.full_name}")
            additive = None
        if self.mixes_neighbours:
            report.kept.append(_NEIGHBOURS)


def _site_for(path: str, module: nn.Module) -> type[ConvolutionSite | LengthSite] | None:
    if _CONVOLUTION.search(path) and any(isinstance(layer, nn.Conv1d) for layer in module.modules()):
        return ConvolutionSite
    if _FUNCTION.search(path) and "seq_length" in forward_parameters(type(module)):
        return LengthSite
    return None


def _fixed_input(stack: PreTrainedModel, tables: list[str]) -> FixedInput | None:
    """Recognises an encoder with its own table and convolutions, whose forward adds the whole table."""
    direct = [name for name in tables if "." not in name]
    convolutions = tuple(child for child in stack.children() if isinstance(child, nn.Conv1d))
    known = hasattr(stack.config, SOURCE_LENGTH) and not forward_parameters(type(stack)).keys().isdisjoint(FEATURES)
    return FixedInput(direct[0], convolutions) if known and convolutions and len(direct) == 1 else None


def _scheme_of(vectors: VectorModule, stack: Stack) -> SchemeConfig:
    owner = f"{vectors.path} ({type(vectors.module).__name__}) of this {type(stack.module).__name__}"
    if vectors.site is ConvolutionSite:
        raise undescribed(
            f"{owner} computes its positions with a convolution over neighbouring embeddings. They depend on the "
            "content of the sequence, so no scheme of this library describes them.",
            "them",
        )
    with torch.no_grad():
        rows = vectors.module(seq_length=_COMPARED)[0].float()
    formula = sinusoids_like(rows)
    if formula is not None:
        return formula
    raise undescribed(f"{owner} computes sinusoids that follow no formula of this library.", "them")


def starts_with_bins(model: nn.Module) -> bool:
    """Whether features are `(batch, bins, frames)`: the stack passes them to its own convolution."""
    return any(isinstance(child, nn.Conv1d) for child in model.children())


def _bins(model: PreTrainedModel) -> int:
    """Number of features of a frame, from the config or the first layer with weights."""
    stated = first_int(model.config, _BINS)
    if stated:
        return stated * first_int(model.config, ("num_stacked_frames",), 1)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            break
        if isinstance(module, nn.Conv1d):
            return module.in_channels
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
    return _USUAL_BINS


def _features(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    bins = _bins(model)
    if not starts_with_bins(model):
        return numbers(1, FRAMES, bins)
    strides = math.prod(child.stride[0] for child in model.children() if isinstance(child, nn.Conv1d))
    rows = getattr(model.config, SOURCE_LENGTH, None)
    return numbers(1, bins, FRAMES if rows is None else int(rows) * strides)


def _values(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    """A wave, or a spectrogram where the config states its length and its bins."""
    config = model.config
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return numbers(1, int(config.max_length), int(config.num_mel_bins))
    channels = getattr(config, "audio_channels", None)
    return numbers(1, SAMPLES) if channels is None else numbers(1, int(channels), SAMPLES)


def _past_values(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    config = model.config
    channels = getattr(config, "num_input_channels", None)
    length = first_int(config, ("context_length",), 64) + max(getattr(config, "lags_sequence", None) or [0])
    if channels is None:
        # A model of many channels accepts its own length only; others accept any number of patches.
        length = max(length, _PATCHES * first_int(config, ("patch_length",), 0))
    return numbers(1, length) if channels is None else numbers(1, length, int(channels))


def _patches(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    config = model.config
    count = (max(config.context_length, config.patch_length) - config.patch_length) // config.patch_stride + 1
    return numbers(1, config.num_input_channels, count, config.patch_length)


def _mask_of_frames(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    features = given["input_features"]
    return torch.ones(1, features.shape[-1 if starts_with_bins(model) else 1], dtype=torch.int64)


_RULES: dict[str, Callable[[PreTrainedModel, dict[str, Any]], Tensor]] = {
    "input_features": _features,
    "input_values": _values,
    "audio_mel": _features,
    "hidden_states": lambda model, given: numbers(1, FRAMES, first_int(model.config, _FRAME_WIDTHS)),
    "latents": lambda model, given: numbers(1, first_int(model.config, WIDTHS), _PATCHES),
    "past_values": _past_values,
    "patch_input": _patches,
    "input_features_mask": _mask_of_frames,
    "audio_mel_mask": lambda model, given: torch.zeros(1, given["audio_mel"].shape[1], dtype=torch.bool),
    "past_values_padding": lambda model, given: torch.zeros_like(given["past_values"], dtype=torch.int64),
    "past_observed_mask": lambda model, given: torch.ones_like(given["past_values"]),
    "mask": lambda model, given: torch.ones(1, FRAMES, dtype=torch.int64),
    "freq": lambda model, given: torch.zeros(1, 1, dtype=torch.int64),
}


class InputView(Viewed):
    """Runs an encoder that accepts one number of frames only with the number of frames of a call.

    Such an encoder adds all rows of its position table to its tokens, and raises an error unless the config says that
    there are as many. In its view, the table and the config state the number of tokens of this call.

    Args:
        module: the encoder.
        fixed: the properties that fix its number of tokens.
        runtime: its runtime, which knows the number of tokens of the call in progress.
    """

    def __init__(self, module: Any, fixed: FixedInput, runtime: StackRuntime) -> None:
        self.module = module
        self.fixed = fixed
        self.runtime = runtime

    @property
    def tokens(self) -> int:
        """Number of tokens of the call in progress."""
        return int(cast("ForwardState", self.runtime.states.top).expected)

    def replaced(self) -> dict[str, Any]:
        """The config and the table."""
        return {
            "config": property(lambda _: WithOverrides(self.module.config, **{SOURCE_LENGTH: self.tokens})),
            self.fixed.table: property(
                lambda _: _WholeTable(getattr(self.module, self.fixed.table), num_embeddings=self.tokens)
            ),
        }


class _WholeTable(WithOverrides):
    """A table with a row for every token of the call. Its rows are looked up in the patched table."""

    @property
    def weight(self) -> Tensor:
        """`(tokens, hidden)`, or one row of zeros for no vectors."""
        origin = table_origin(self._target)
        device = next(self._target.parameters()).device
        rows: Tensor = self(torch.arange(origin, origin + self.num_embeddings, device=device))
        return rows.squeeze(0)


class _Vectors(PlacedForward):
    """Base class: stands in for the `forward` of a module that makes or adds vectors, with those of the scheme."""

    def __init__(self, source: Any, runtime: StackRuntime, additive: AdditiveEncoding | None) -> None:
        super().__init__(source.module, runtime)
        self.source = source
        self.additive = additive

    def vectors(self, length: int, like: Tensor) -> Tensor:
        """`(batch or 1, length, hidden)` in the dtype of `like`; zeros without an additive part."""
        if self.additive is None:
            return like.new_zeros(()).expand(1, length, like.shape[-1])
        state = self.runtime.state_for(length, like.device)
        return vectors(self.additive, state).to(like.dtype)


class ConvolutionSite(_Vectors):
    """Stands in for a convolution over neighbouring embeddings whose output is added to them.

    With a stride it takes and returns `(batch, hidden, length)`, otherwise `(batch, length, hidden)`.
    """

    description = "convolution over neighbours in place of positions"

    def __call__(self, hidden_states: Tensor) -> Any:
        """Returns one vector per token, in the axis order of the convolution."""
        if self.source.stride == 1:
            return self.vectors(hidden_states.shape[1], hidden_states)
        by_token = hidden_states.transpose(1, 2)
        return self.vectors(by_token.shape[1] // self.source.stride, by_token).transpose(1, 2)


class LengthSite(_Vectors):
    """Stands in for a module that computes sinusoids from a length."""

    description = "sinusoids of positions"

    def __call__(self, seq_length: int | None = None, **kwargs: Any) -> Any:
        """Returns `(1, seq_length, hidden)`."""
        if seq_length is None or any(value is not None for value in kwargs.values()):
            raise UnsupportedError(
                f"{type(self.module).__name__} was called with {', '.join(kwargs) or 'nothing'} and not with a length, "
                "so the positions of its vectors are unknown."
            )
        return self.vectors(seq_length, self.stock(1))


class ParameterSite(_Vectors):
    """Stands in for a module that adds a parameter with a row per token: the module finds the vectors in its place."""

    description = "position table"

    def __call__(self, embeddings: Tensor) -> Any:
        """`embeddings` are `(..., length, hidden)`."""
        rows = self.vectors(embeddings.shape[-2] + self.source.prefix_rows, embeddings)
        rows = rows if self.source.value.dim() == 3 else rows.squeeze(0)
        return type(self.module).forward(view_of(self.module, {self.source.name: rows}), embeddings)
