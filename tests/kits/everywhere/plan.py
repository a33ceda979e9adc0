"""What is measured: the models, and the sizes of the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_YARN = {"theta": 100_000.0, "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 8192}}


@dataclass(frozen=True)
class Variant:
    """A pretrained model under one position encoding.

    Args:
        name: in tables and of its folder.
        healing_steps: steps of training after the swap.
    """

    name: str
    scheme: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    healing_steps: int = 0


@dataclass(frozen=True)
class Plan:
    """The models and the sizes.

    Args:
        decoders: variants of SmolLM2-135M, the stock model first. Exports are timed beside its own.
        encoders: variants of MiniLM.
        windows: pieces of text on which next tokens are predicted.
        prompt: tokens of a piece that are read at once.
        places: predictions after the prompt, the first from the prompt and the others with a cache.
        greedy: tokens that are written after each of `prompts`.
        prompts: texts to be continued.
        passages: texts that are embedded.
        long: the lengths of longer prompts by variant.
        long_places: predictions after a longer prompt.
        timed_prompt: tokens that are read in a timing.
        timed_steps: tokens that are written in a timing.
        rounds: of timings.
    """

    decoders: tuple[Variant, ...] = (
        Variant("stock"),
        Variant("yarn", "rope", _YARN),
        Variant("p_rope", "p_rope", {"theta": 100_000.0}),
        Variant("none, healed", "none", healing_steps=24),
        Variant("alibi, healed", "alibi", healing_steps=24),
    )
    encoders: tuple[Variant, ...] = (Variant("stock"), Variant("alibi", "alibi"), Variant("rope", "rope"))
    windows: int = 4
    prompt: int = 224
    places: int = 32
    greedy: int = 32
    prompts: tuple[str, ...] = (
        "The dog chased another dog, and then",
        "The capital of France is",
        "In the middle of the winter, the farmers of the valley",
    )
    passages: tuple[int, ...] = (8, 30, 60, 120, 250, 500, 700)
    # SmolLM2 was trained for 8,192 tokens.
    long: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"stock": (2048,), "yarn": (2048, 8600), "alibi, healed": (2048,)}
    )
    long_places: int = 8
    timed_prompt: int = 128
    timed_steps: int = 24
    rounds: int = 5

    def decoder(self, name: str) -> Variant:
        """The variant of SmolLM2 of this name."""
        return next(variant for variant in self.decoders if variant.name == name)
