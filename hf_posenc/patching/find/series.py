"""The position mechanisms of a stack whose input is a series of features: sound, or a time series."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.patching.find.forward_code import forward_parameters, names_used
from hf_posenc.patching.find.model_parts import FEATURES
from hf_posenc.patching.find.tables import OwnedTable

_CONVOLUTION = re.compile(r"(^|\.)pos(ition(al)?)?_conv(_embed(ding)?s?)?$")
_FUNCTION = re.compile(r"(^|\.)pos(ition(al)?)?_emb(ed(ding)?s?)?$")
_PARAMETER = re.compile(r"^pos(ition(al)?)?_(enc(oding)?s?|emb(ed(ding)?s?)?)$")
#: The config attribute with the number of tokens that the table of an encoder has.
SOURCE_LENGTH = "max_source_positions"

Kind = Literal["convolution", "sinusoids"]


@dataclass
class VectorModule:
    """A module whose output is added to the embeddings.

    Args:
        path: path of the module below the stack.
        module: the module.
        kind: "convolution" if it computes the vectors from neighbouring embeddings, "sinusoids" if it computes them
            from the length.
        stride: number of embeddings per vector of a convolution.
    """

    path: str
    module: Any
    kind: Kind
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
        """Number of tokens that the convolutions make of some frames."""
        for one in self.convolutions:
            padding, dilation = int(one.padding[0]), one.dilation[0]
            frames = (frames + 2 * padding - dilation * (one.kernel_size[0] - 1) - 1) // one.stride[0] + 1
        return frames


@dataclass
class FoundSeries:
    """What discovery knows about a stack that reads features.

    Args:
        vectors: modules whose output is added to the embeddings.
        parameters: parameters that are added to the embeddings.
        fixed_input: the properties of an encoder that accepts one number of frames only, or `None`.
        mixes_neighbours: whether other convolutions see neighbouring frames.
    """

    vectors: list[VectorModule] = field(default_factory=list)
    parameters: list[OwnedTable] = field(default_factory=list)
    fixed_input: FixedInput | None = None
    mixes_neighbours: bool = False

    @property
    def has_sites(self) -> bool:
        """Whether there is a place for vectors, besides ordinary tables."""
        return bool(self.vectors or self.parameters)


def find_series(stack: PreTrainedModel, modules: Iterable[tuple[str, nn.Module]], tables: list[str]) -> FoundSeries:
    """Finds the position mechanisms of a stack that reads features.

    Args:
        stack: the stack.
        modules: path and module of everything that belongs to it.
        tables: paths of its position tables.
    """
    found = FoundSeries(fixed_input=_fixed_input(stack, tables))
    for path, module in modules:
        kind = _kind_of(path, module)
        above, _, name = path.rpartition(".")
        # Some architectures build a module that they never call.
        if kind is not None and name in names_used(type(stack.get_submodule(above)).forward):
            strides = [int(one.stride[0]) for one in module.modules() if isinstance(one, nn.Conv1d)]
            found.vectors.append(VectorModule(path, module, kind, stride=strides[0] if strides else 1))
        for name, parameter in module._parameters.items():
            if parameter is not None and _PARAMETER.match(name) and parameter.dim() in (2, 3):
                class_tokens = int(getattr(module, "cls_token", None) is not None)
                found.parameters.append(OwnedTable(path, module, name, class_tokens))
    of_positions = {id(one) for found_module in found.vectors for one in found_module.module.modules()}
    found.mixes_neighbours = any(
        isinstance(one, nn.Conv1d | nn.Conv2d) and max(one.kernel_size) > 1 and id(one) not in of_positions
        for one in stack.modules()
    )
    return found


def _kind_of(path: str, module: nn.Module) -> Kind | None:
    if _CONVOLUTION.search(path) and any(isinstance(one, nn.Conv1d) for one in module.modules()):
        return "convolution"
    if _FUNCTION.search(path) and "seq_length" in forward_parameters(type(module)):
        return "sinusoids"
    return None


def _fixed_input(stack: PreTrainedModel, tables: list[str]) -> FixedInput | None:
    """Recognises an encoder with a table and convolutions of its own whose forward adds the whole table."""
    own = [name for name in tables if "." not in name]
    convolutions = tuple(child for child in stack.children() if isinstance(child, nn.Conv1d))
    known = hasattr(stack.config, SOURCE_LENGTH) and not forward_parameters(type(stack)).keys().isdisjoint(FEATURES)
    return FixedInput(own[0], convolutions) if known and convolutions and len(own) == 1 else None


def given_features(arguments: dict[str, Any]) -> Tensor | None:
    """The features among the arguments of a call, or `None`."""
    found = (arguments.get(name) for name in FEATURES)
    return next((value for value in found if isinstance(value, torch.Tensor)), None)
