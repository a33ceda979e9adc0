"""Checkpoints of patched models that another class of the same architecture loads: another head, or one stack less."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    VideoMAEConfig,
    VideoMAEForPreTraining,
    VideoMAEForVideoClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTMAEModel,
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

from hf_posenc import NoneConfig, UnsupportedError, patch_model
from hf_posenc.checkpoint.configuration import CheckpointError
from tests.checkpoint.checkpoint_cases import outputs
from tests.models import tiny

_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
#: A small decoder behind the encoder.
_DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}


def _masked_images() -> PreTrainedConfig:
    return ViTMAEConfig(**_SIZES, **_DECODER, image_size=16, patch_size=4)


def _masked_videos() -> PreTrainedConfig:
    return VideoMAEConfig(**_SIZES, **_DECODER, image_size=16, patch_size=8, num_frames=4)


def _speech() -> PreTrainedConfig:
    return WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=100,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=30,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


class Case(NamedTuple):
    """One checkpoint and the class that loads it.

    Args:
        config: builds the config of both.
        saved: the class that is patched and saved.
        loaded: the class that loads the checkpoint.
        part: the part that is patched.
        scheme: a name.
        options: of the scheme.
    """

    config: Any
    saved: type[PreTrainedModel]
    loaded: type[PreTrainedModel]
    part: str
    scheme: str
    options: Mapping[str, Any] = MappingProxyType({})


CASES = [
    Case(_masked_images, ViTMAEForPreTraining, ViTMAEModel, "vision", "swin", {"grid": (4, 4)}),
    Case(_masked_images, ViTMAEForPreTraining, ViTMAEModel, "vision", "rope_nd", {"assignment": "mixed"}),
    Case(_masked_images, ViTMAEForPreTraining, ViTMAEModel, "vision", "alibi", {"axes": 2}),
    Case(_masked_videos, VideoMAEForPreTraining, VideoMAEForVideoClassification, "vision", "t5", {"axes": 3}),
    Case(_speech, WhisperForConditionalGeneration, WhisperForAudioClassification, "audio", "t5"),
    Case(_speech, WhisperForConditionalGeneration, WhisperForAudioClassification, "audio", "rope"),
    Case(_speech, WhisperForConditionalGeneration, WhisperForCausalLM, "text", "t5"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.saved.__name__}-{case.part}-{case.scheme}")
def test_another_class_loads_the_trained_scheme(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = patch_model(case.saved(case.config()), case.scheme, part=case.part, **case.options)
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    loaded = case.loaded.from_pretrained(tmp_path)
    ours = dict(model.position_encoding.named_parameters())
    theirs = dict(loaded.position_encoding.named_parameters())
    # The decoder of a masked autoencoder is not part of its base model.
    absent = {name for name in ours if name.startswith("stacks.head.")}
    assert theirs.keys() == ours.keys() - absent
    assert all(torch.equal(parameter, ours[name]) for name, parameter in theirs.items())


def test_surplus_weights_of_a_stack_that_the_class_has_are_refused(tmp_path: Path) -> None:
    model = patch_model(ViTMAEForPreTraining(_masked_images()), "swin", grid=(4, 4))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["position_encoding"]["scheme"] = NoneConfig().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the config that from_pretrained has read names"):
        ViTMAEModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("scheme", ["alibi", "none"])
@pytest.mark.parametrize("architecture", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_a_part_of_a_patched_model_is_not_saved_alone(architecture: str, scheme: str, tmp_path: Path) -> None:
    model = patch_model(tiny(architecture), scheme)
    for part in (model.get_encoder(), model.get_decoder()):
        with pytest.raises(UnsupportedError, match=r"does not hold itself.*take the part from it"):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.base_model.save_pretrained(tmp_path)
    loaded = type(model.base_model).from_pretrained(tmp_path)
    assert torch.equal(outputs(loaded.eval()), outputs(model.base_model.eval()))
