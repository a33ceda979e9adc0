"""The schemes that are placed in each part of a model, with options that suit the tiny models."""

from __future__ import annotations

from typing import Any

from hf_posenc.patching.layouts import Grid

#: Name of a column -> scheme and options. Small values, other than what any tiny model has natively.
_ONE_AXIS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("native", {}),
    "none": ("none", {}),
    "alibi": ("alibi", {}),
    "t5": ("t5", {}),
    "rope": ("rope", {"theta": 100.0}),
    "sinusoidal": ("sinusoidal", {}),
}
_SHAW: dict[str, tuple[str, dict[str, Any]]] = {"shaw": ("shaw", {"max_distance": 4})}
#: The gates do not close at once.
TEXT_SCHEMES = _ONE_AXIS | {"forget_gate": ("forget_gate", {"initial_bias": 2.0})} | _SHAW | {"pope": ("pope", {})}
SERIES_SCHEMES = _ONE_AXIS | _SHAW
GRID_SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("native", {}),
    "none": ("none", {}),
    "rope_nd": ("rope_nd", {"grid": (4,)}),
    "sinusoidal (grid)": ("sinusoidal", {"axes": 2}),
    "alibi (grid)": ("alibi", {"axes": 2}),
    "t5 (grid)": ("t5", {"axes": 2}),
    "learned": ("learned", {"num_positions": 512}),
    "rope (raster)": ("rope", {"theta": 100.0}),
}


_OF_PICTURES = ("vision", "image", "video", "high_res_vision", "patch_model", "image_model", "fov_model", "sam")
_OF_TEXT = ("text", "connector", "qformer", "decoder", "multimodal", "model")


def on_axes(options: dict[str, Any], axes: int) -> dict[str, Any]:
    """Options of a scheme on a grid, for a grid of so many axes."""
    if "axes" in options:
        return options | {"axes": axes}
    return options | {"grid": (4,) * (axes - 1)} if "grid" in options else options


def schemes_of(columns: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Columns of the table for a kind of part: "text", "vision" or "series"."""
    return {"text": TEXT_SCHEMES, "vision": GRID_SCHEMES, "series": SERIES_SCHEMES}[columns]


def columns_of(part: str, stacks: list[Any]) -> str:
    """Which of the three tables a part belongs to."""
    last = part.rsplit(".", 1)[-1]
    if any(isinstance(stack.layout, Grid) for stack in stacks) or (last in _OF_PICTURES and not stacks):
        return "vision"
    return "text" if last in (*_OF_TEXT, *_OF_PICTURES) else "series"


def is_tower(part: str) -> bool:
    """Whether a part reads pictures or sound only, so that no other part changes what it computes."""
    return part.rsplit(".", 1)[-1] in (*_OF_PICTURES, "audio")
