"""The scheme of one part of a model, and the stacks that it is placed in."""

from __future__ import annotations

from typing import cast

from transformers import PreTrainedModel

from hf_posenc.patching.find.discovery import model_parts
from hf_posenc.patching.find.model_parts import check_part, default_part
from hf_posenc.patching.place.encoding import PositionEncoding
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.schemes.arrangement.of_parts import PartsConfig
from hf_posenc.schemes.config import SchemeConfig


def named_part(model: PreTrainedModel, part: str | None) -> str:
    """The name of a part of a model; `None` stands for the one that `patch_model` patches by default.

    Raises:
        UnknownNameError: if the model has no such part.
    """
    parts = model_parts(model)
    return default_part(model, parts) if part is None else check_part(part, parts, model)


def scheme_in_part(encoding: PositionEncoding | None, part: str) -> SchemeConfig | None:
    """The scheme in force in a part; `None` if the part has its native positions."""
    if encoding is None:
        return None
    config = encoding.config
    return config.by_part().get(part) if isinstance(config, PartsConfig) else config


def stacks_in_part(encoding: PositionEncoding, part: str) -> dict[str, StackEncoding]:
    """The parts of a scheme in the stacks of a part, by name of the stack. The scheme is in force."""
    assert encoding.report is not None
    names = [stack.name for stack in encoding.report.stacks if stack.part == part]
    return {name: cast("StackEncoding", encoding.stacks[name]) for name in names}
