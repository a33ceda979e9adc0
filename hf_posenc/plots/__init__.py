"""Figures of schemes, of the dog tests and of losses. Drawing needs matplotlib."""

from typing import Any

from hf_posenc.errors import missing_attribute
from hf_posenc.plots import dog, schemes, style
from hf_posenc.plots.dog import plot_dog
from hf_posenc.plots.schemes import plot_scheme

__all__ = ["dog", "plot_dog", "plot_scheme", "schemes", "style"]


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name, __all__)
