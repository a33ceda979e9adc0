"""Checkpoints of patched models that another class of the same architecture loads: another head, or one stack less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    PreTrainedModel,
    VideoMAEForVideoClassification,
    ViTMAEModel,
    WhisperForAudioClassification,
    WhisperForCausalLM,
)

from hf_posenc import CheckpointError, UnsupportedError, patch_model
from tests.checkpoint.checkpoint_cases import assert_same, edit_json, randomize
from tests.export.test_modalities import speech_model
from tests.models import tiny

#: Behind the small encoder, a smaller decoder.
_SIZES = {
    "image_size": 16, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}  # fmt: skip
masked_images = partial(tiny, "ViTMAEForPreTraining", **_SIZES, patch_size=4)
masked_videos = partial(tiny, "VideoMAEForPreTraining", **_SIZES, patch_size=8, num_frames=4)


class Case(NamedTuple):
    """A model whose part is patched and saved, and the class that loads it."""

    build: Callable[[], Any]
    loaded: type[PreTrainedModel]
    part: str
    scheme: str
    options: dict[str, Any]


CASES = [
    Case(masked_images, ViTMAEModel, "vision", "swin", {"grid": (4, 4)}),
    Case(masked_images, ViTMAEModel, "vision", "rope_nd", {"assignment": "mixed"}),
    Case(masked_images, ViTMAEModel, "vision", "alibi", {"axes": 2}),
    Case(masked_videos, VideoMAEForVideoClassification, "vision", "t5", {"axes": 3}),
    Case(speech_model, WhisperForAudioClassification, "audio", "t5", {}),
    Case(speech_model, WhisperForAudioClassification, "audio", "rope", {}),
    Case(speech_model, WhisperForCausalLM, "text", "t5", {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.loaded.__name__}-{case.part}-{case.scheme}")
def test_another_class_loads_the_trained_scheme(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = patch_model(case.build(), case.scheme, part=case.part, **case.options)
    randomize(model.position_encoding)
    model.save_pretrained(tmp_path)
    loaded = case.loaded.from_pretrained(tmp_path)
    ours = dict(model.position_encoding.named_parameters())
    theirs = dict(loaded.position_encoding.named_parameters())
    # The decoder of a masked autoencoder is not part of its base model.
    absent = {name for name in ours if name.startswith("stacks.head.")}
    assert theirs.keys() == ours.keys() - absent
    assert all(torch.equal(parameter, ours[name]) for name, parameter in theirs.items())
    # Surplus weights of a stack that the class has are refused.
    edit_json(tmp_path / "config.json", "position_encoding", scheme={"scheme": "none"})
    with pytest.raises(CheckpointError, match="the config that from_pretrained has read names"):
        case.loaded.from_pretrained(tmp_path)


@pytest.mark.parametrize("scheme", ["alibi", "none"])
@pytest.mark.parametrize("architecture", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_a_part_of_a_patched_model_is_not_saved_alone(architecture: str, scheme: str, tmp_path: Path) -> None:
    model = patch_model(tiny(architecture), scheme)
    for part in (model.get_encoder(), model.get_decoder()):
        with pytest.raises(UnsupportedError, match=r"does not hold itself.*take the part from it"):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.base_model.save_pretrained(tmp_path)
    assert_same(type(model.base_model).from_pretrained(tmp_path), model.base_model)
