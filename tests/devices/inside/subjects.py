"""The models that are spread over devices, each with an input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import spreading
from tests.kits.decoding import left_padding
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import LENGTH, placed, tokens
from tests.matrix.test_behaviour import SCHEMES
from tests.models import tiny
from tests.patching.audio.whisper import normal, stir
from tests.patching.composites.models import COMPOSITES
from tests.patching.vision.models import vit

__all__ = ["SCHEMES", "SUBJECTS", "Subject", "on_one_device"]

on_one_device = pytest.mark.skipif(spreading.placement != "one", reason="looks at one device")


@dataclass(frozen=True)
class Subject:
    """A model.

    Args:
        build: makes it on the CPU.
        inputs: makes its arguments on the CPU.
        part: the part that is patched; `None` for the usual one.
    """

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    part: str | None = None

    def model(self, scheme: str) -> Any:
        """The patched model on the CPU; the same weights in each call."""
        with torch.device("cpu"):
            torch.manual_seed(0)
            return placed(self.build().eval(), SCHEMES[scheme], part=self.part)

    def outputs(self, model: Any, device: str) -> Tensor:
        """The logits of the model on the CPU."""
        with torch.device("cpu"):
            inputs = self.inputs()
        moved = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in inputs.items()}
        result: Tensor = model(**moved).logits.cpu()
        return result


def _ids() -> dict[str, Any]:
    return {"input_ids": tokens(), "attention_mask": left_padding(LENGTH, 3)}


def _whisper() -> Any:
    model = tiny("WhisperForConditionalGeneration")
    stir(model)
    return model


SUBJECTS: dict[str, Subject] = {
    "llama": Subject(ARCHITECTURES["llama_gqa"].build, _ids),
    "gpt2": Subject(ARCHITECTURES["gpt2"].build, _ids),
    "bert": Subject(ARCHITECTURES["bert"].build, lambda: _ids() | {"attention_mask": left_padding(LENGTH, 3).flip(1)}),
    "t5": Subject(lambda: tiny("T5ForConditionalGeneration"), lambda: _ids() | {"decoder_input_ids": tokens(seed=2)}),
    "llava": Subject(COMPOSITES["llava"].model, COMPOSITES["llava"].prompt),
    "qwen2_vl": Subject(COMPOSITES["qwen2_vl"].model, COMPOSITES["qwen2_vl"].prompt),
    "qwen2_vl_vision": Subject(COMPOSITES["qwen2_vl"].model, COMPOSITES["qwen2_vl"].prompt, part="vision"),
    "vit": Subject(vit, lambda: {"pixel_values": normal(2, 3, 16, 16)}),
    "whisper": Subject(
        _whisper, lambda: {"input_features": normal(1, 8, 24), "decoder_input_ids": torch.tensor([[1, 7, 9, 11, 5]])}
    ),
    "whisper_audio": Subject(
        _whisper,
        lambda: {"input_features": normal(1, 8, 20), "decoder_input_ids": torch.tensor([[1, 7, 9, 11, 5]])},
        part="audio",
    ),
}
