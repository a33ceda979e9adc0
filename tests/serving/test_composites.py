"""Models of images and sound in inference engines."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.schemes.refusals import VLLM
from hf_posenc.serving.engine_schemes import refuse_settings, sites_for_engine
from tests.export.test_modalities import speech_model
from tests.patching.composites.models import COMPOSITES
from tests.patching.vision.models import vit

MODELS = {"llava": COMPOSITES["llava"].model, "qwen2_vl": COMPOSITES["qwen2_vl"].model, "whisper": speech_model}


@pytest.mark.parametrize("name", MODELS)
def test_a_composite_is_refused_with_the_reason(name: str) -> None:
    model: Any = patch_model(MODELS[name](), "rope", theta=300.0)
    with pytest.raises(UnsupportedError, match="this model has parts for images or sound"):
        sites_for_engine(model, VLLM)
    if name != "whisper":
        with pytest.raises(UnsupportedError, match="several parts, such as for images or sound, which the plug-in"):
            refuse_settings("vLLM", model.config, processes=1)


def test_a_model_of_images_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="decoders that generate text"):
        sites_for_engine(patch_model(vit(), "none"), VLLM)
