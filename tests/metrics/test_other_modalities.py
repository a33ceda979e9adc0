"""Metrics of text on models of images and sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.metrics import order_sensitivity, token_losses
from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.metrics.quantization import quantized_positions
from tests.export.test_modalities import speech_model
from tests.patching.composites.models import COMPOSITES
from tests.patching.vision.models import vit

IDS = torch.randint(10, 90, (2, 24), generator=torch.Generator().manual_seed(1))


def test_the_text_part_of_a_composite_is_measured() -> None:
    model = patch_model(patch_model(COMPOSITES["llava"].model(), "none", part="vision"), "rope", theta=500.0)
    assert token_losses(model, IDS, IDS, True)[:, 1:].isfinite().all()
    assert order_sensitivity(model, IDS).mean_relative_change > 0
    in_force = model.position_encoding
    records = quantized_positions(model, IDS, IDS, positions=[0])
    exact = next(record for record in records if record.at["held in"] == "float32" and record.quantity == "loss")
    assert exact.value == pytest.approx(float(token_losses(model, IDS, IDS, True).nanmean()), abs=1e-5)
    assert model.position_encoding is in_force


@pytest.mark.parametrize("make", [vit, speech_model], ids=["vit", "whisper"])
@pytest.mark.parametrize(
    "measure",
    [
        lambda model: order_sensitivity(model, IDS),
        lambda model: predicts_next_token(model, IDS),
        lambda model: token_losses(model, IDS, IDS, True),
    ],
    ids=["order", "causality", "losses"],
)
def test_a_model_that_reads_no_text_is_refused(make: Callable[[], Any], measure: Callable[[Any], Tensor]) -> None:
    with pytest.raises(UnsupportedError, match=r"reads '(pixel_values|input_features)'|is an encoder-decoder"):
        measure(patch_model(make(), "alibi"))
