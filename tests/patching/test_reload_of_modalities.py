"""Patched models of images, sound and series, loaded in a fresh process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_posenc import patch_model
from tests.architectures.inputs import call, inputs_for, tensors_of
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.fresh import run_fresh

#: Architectures of every family, and the parts that get a scheme.
FAMILIES = {
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
    "vision-siglip_vision_model": ("vision",),
    "video-vivit": ("vision",),
    "audio-wav2vec2": ("audio",),
    "audio-hubert": ("audio",),
    "time series-patchtst": ("time series",),
    "time series-timesfm": ("time series",),
}

_LOADING = """
import sys
import torch, transformers, hf_posenc
from pathlib import Path
torch.set_grad_enabled(False)
failed = []
for folder in sorted(Path(sys.argv[1]).iterdir()):
    kind, inputs, expected = torch.load(folder / "expected.pt", weights_only=False)
    model = getattr(transformers, kind).from_pretrained(folder / "model").eval()
    torch.manual_seed(0)
    output = model(**inputs)
    found = [one for one in output.values() if isinstance(one, torch.Tensor)]
    same = len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))
    if not same:
        failed.append(folder.name)
assert not failed, failed
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_every_family_is_loaded_in_a_fresh_process_with_equal_outputs(tmp_path: Path) -> None:
    for name, parts in FAMILIES.items():
        pair = pair_named(name)
        model = tiny_model(pair)
        inputs = inputs_for(model, pair)
        for part in parts:
            patch_model(model, "rope_nd" if part == "vision" and "vivit" not in name else "t5", part=part)
        torch.manual_seed(0)
        output = call(model, inputs)
        expected = [one for one in output.values() if isinstance(one, torch.Tensor)]
        assert tensors_of(output)
        folder = tmp_path / name
        folder.mkdir()
        model.save_pretrained(folder / "model")
        torch.save((type(model).__name__, inputs, expected), folder / "expected.pt")
    done = run_fresh(_LOADING, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
