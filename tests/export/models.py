"""Tiny models whose outputs depend visibly on every weight."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel

from hf_posenc import SchemeConfig
from tests.checkpoint.checkpoint_cases import made
from tests.models import tiny


def visible(name: str, scheme: str | SchemeConfig | None = None, **options: Any) -> PreTrainedModel:
    """A tiny model of a class, the same in every call."""
    return made(scheme, build=partial(tiny, name, **options))
