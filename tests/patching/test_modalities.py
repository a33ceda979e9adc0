"""Models that read pictures, sound and time series: properties of every part, and messages for each family.

The checks are those of `tests/architectures`: the native scheme gives the stock outputs, also at another size; every
other scheme acts; without positions, shuffled patches shuffle the outputs; backends agree; removal leaves no trace.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import patch_model
from tests.architectures.checks import check_pair
from tests.architectures.findings import Record
from tests.architectures.inputs import call, inputs_for
from tests.architectures.population import Pair, pair_named
from tests.architectures.test_architectures import assert_holds
from tests.architectures.tiny import tiny_model
from tests.thinning import mostly_slow

pytestmark = [
    pytest.mark.on_cpu("some of these models make a weight on the CPU, whatever the default device"),
    pytest.mark.filterwarnings("ignore:.*numbered row by row"),
]

BIAS = {"use_relative_position_bias": True}
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
PATCHES_AND_CLASS = {"use_cls_token": True, "positional_encoding_type": "sincos"}
CONVOLUTION = "convolution"
#: Architecture, options of its config, and its native scheme or a part of the reason why it has none.
FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    ("vision-beit", BIAS, "swin"),
    ("vision-beit", {"use_shared_relative_position_bias": True}, "swin"),
    ("vision-data2vec-vision", BIAS, "swin"),
    ("vision-dinov2", {}, "learned"),
    ("vision-dinov2_with_registers", {}, "learned"),
    ("vision-dinov3_vit", {"num_register_tokens": 2}, "rope_nd"),
    ("vision-siglip_vision_model", {}, "learned"),
    ("vision-siglip2_vision_model", {}, "learned"),
    ("vision-vit_mae", {}, "learned"),
    ("vision-swin", {}, "swin"),
    ("vision-swinv2", {}, "log_cpb"),
    ("video-videomae", {}, "sinusoidal"),
    ("video-vivit", {}, "learned"),
    ("video-timesformer", {}, "several position tables"),
    ("video-vjepa2", {}, "rotation"),
    ("vision-pixtral", {}, "rope_nd"),
    ("image-text-gemma3", {}, "learned"),
    ("image-text-qwen2_vl", {}, "rope_nd"),
    ("image-text-qwen2_5_vl", {}, "rope_nd"),
    ("image-text-qwen3_vl", {}, "learned + rope_nd"),
    ("vision-sam_vision_model", {}, "decomposed bias tables"),
    ("vision-yolos", {}, "several position tables"),
    ("vision-dpt", {}, "learned"),
    ("vision-segformer", {}, "none"),
    ("vision-pvt_v2", {}, "none"),
    ("vision-hiera", {}, "learned"),
    ("vision-ijepa", {}, "learned"),
    ("audio-wav2vec2", {}, CONVOLUTION),
    ("audio-wav2vec2", STABLE, CONVOLUTION),
    ("audio-wavlm", {}, "gate"),
    ("audio-wav2vec2-conformer", {}, "transformer_xl"),
    ("audio-wav2vec2-conformer", {"position_embeddings_type": "rotary"}, "before"),
    ("audio-wav2vec2-bert", {}, "shaw"),
    ("audio-parakeet_encoder", {}, "transformer_xl"),
    ("audio-text-clap", {}, "swin"),
    ("audio-sew-d", {}, "besides disentangled"),
    ("audio-qwen2_audio_encoder", {}, "learned"),
    ("time series-timesfm", {"use_positional_embedding": True}, "sinusoidal"),
    ("time series-patchtst", {}, "learned"),
    ("time series-patchtst", PATCHES_AND_CLASS, "learned"),
]
#: The messages of a family about schemes that it does not support.
REFUSALS = {
    "vision-hiera": "same grid",
    "vision-segformer": "same grid",
    "vision-pvt_v2": "same grid",
    "video-timesformer": "not the patches of an image",
}


def refused(record: Record) -> dict[str, str]:
    """The schemes that a part refuses, with the messages."""
    return {
        scheme: checks[check].note
        for scheme, checks in record.findings.items()
        for check in ("patch", "forward")
        if scheme != "native" and check in checks and checks[check].verdict == "refused"
    }


#: The first family with each mechanism of each kind of input; the default run takes these.
FIRST = {(row[0].partition("-")[0], row[2]): row for row in reversed(FAMILIES)}.values()


@pytest.mark.parametrize(
    ("name", "options", "native"), mostly_slow(FAMILIES, lambda row: row in FIRST or row[0] in REFUSALS), ids=str
)
def test_every_check_holds_in_every_family(name: str, options: dict[str, Any], native: str) -> None:
    pair: Pair = replace(pair_named(name), options=(*pair_named(name).options, *options.items()))
    records = check_pair(pair)
    record = next(record for record in records if record.part != "text")
    assert native in record.native if record.native.startswith("(") else record.native == native
    for found in records:
        assert_holds(found)
    said = refused(record)
    assert bool(said) == (name in REFUSALS)
    assert all(REFUSALS[name] in text for text in said.values()), said


#: Architectures that are loaded again, and the parts that get a scheme.
RELOADED = {
    "image-text-llava": ("text", "vision"),
    "image-text-gemma3": ("text", "vision"),
    "image-text-qwen2_vl": ("text", "vision"),
    "image-text-qwen3_vl": ("text",),
    "image-text-mistral3": ("text", "vision"),
    "image-text-clip": ("text", "vision"),
    "audio-text-whisper": ("audio", "text"),
    "audio-text-voxtral": ("text",),
    "vision-dinov2": ("vision",),
    "vision-dinov3_vit": ("vision",),
    "vision-beit": ("vision",),
    "vision-swin": ("vision",),
    "video-vivit": ("vision",),
    "audio-wav2vec2": ("audio",),
    "time series-patchtst": ("time series",),
    "time series-timesfm": ("time series",),
}
QUICK = ("audio-text-whisper", "vision-dinov2", "time series-patchtst")


@pytest.mark.parametrize("name", mostly_slow(RELOADED, lambda name: name in QUICK))
@torch.no_grad()
def test_schemes_of_parts_are_loaded_with_equal_outputs(name: str, tmp_path: Path) -> None:
    pair = pair_named(name)
    model = tiny_model(pair)
    inputs = inputs_for(model, pair)
    for part in RELOADED[name]:
        patch_model(model, "rope_nd" if part == "vision" and name != "video-vivit" else "t5", part=part)
    model.save_pretrained(tmp_path)
    outputs = []
    for each in (model, type(model).from_pretrained(tmp_path).eval()):
        torch.manual_seed(0)
        outputs.append([value for value in call(each, inputs).values() if isinstance(value, torch.Tensor)])
    assert outputs[0]
    assert all(map(torch.equal, *outputs))


def test_the_report_names_the_convolution_and_what_still_sees_neighbours() -> None:
    model = patch_model(tiny_model(pair_named("audio-wav2vec2")), "sinusoidal")
    (stack,) = model.position_encoding.report.stacks
    assert stack.replaced == [
        "encoder.pos_conv_embed: convolution over neighbours in place of positions (Wav2Vec2PositionalConvEmbedding)"
    ]
    assert stack.placed == ["additive: encoder.pos_conv_embed"]
    assert any("convolutions mix neighbouring frames" in line for line in stack.kept)


@torch.no_grad()
def test_padded_frames_do_not_change_the_positions_of_others() -> None:
    pair = pair_named("audio-wav2vec2-bert")
    model = tiny_model(pair)
    patch_model(model, ["rope", "t5"])
    frames = inputs_for(model, pair)["input_features"][:1]
    length = frames.shape[1]
    padded = torch.nn.functional.pad(frames, (0, 0, 0, 10))
    mask = (torch.arange(length + 10) < length).long().unsqueeze(0)
    found = model(input_features=padded, attention_mask=mask)[0][:, :length]
    torch.testing.assert_close(found, model(input_features=frames)[0], atol=1e-5, rtol=1e-5)
