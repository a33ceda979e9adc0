"""Tiny composite models and prompts with images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import SIZES
from tests.versions import ONE_AXIS, since

IMAGE = 3
WORDS = 99
_TEXT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {"patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 2}
_QWEN |= {"depth": 2, "hidden_size": 32, "num_heads": 4}


@dataclass(frozen=True)
class Composite:
    """One architecture of images and text.

    Args:
        image_tokens: number of placeholders of one image.
    """

    build: Callable[[], PreTrainedModel]
    image_tokens: int
    pixels: Callable[[int], dict[str, Tensor]]

    def model(self) -> PreTrainedModel:
        """A model in evaluation mode whose attention is not uniform."""
        torch.manual_seed(0)
        model = self.build().eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3)
        return model

    def prompt(self, before: int = 2, images: int = 1, seed: int = 0) -> dict[str, Tensor]:
        """The arguments of one row: words, then images that words separate, then words."""
        generator = torch.Generator().manual_seed(seed)

        def words(count: int) -> Tensor:
            return torch.randint(10, WORDS, (count,), generator=generator)

        parts = [words(before)]
        for _ in range(images):
            parts += [torch.full((self.image_tokens,), IMAGE), words(1)]
        ids = torch.cat((*parts, words(3))).unsqueeze(0)
        return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()} | self.pixels(images)


def llava() -> PreTrainedModel:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _gemma3() -> PreTrainedModel:
    layers = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        vision_config=SIZES | {"image_size": 8, "patch_size": 2},
        text_config=_TEXT | {"head_dim": 8} | layers,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _qwen(name: str, text: dict[str, Any], rope: dict[str, Any], vision: dict[str, Any]) -> PreTrainedModel:
    since(*ONE_AXIS)
    parameters = {"rope_type": "default", "rope_theta": 100.0} | rope
    config = getattr(transformers, f"{name}Config")(
        text_config=_TEXT | text | {"rope_parameters": parameters},
        vision_config=_QWEN | vision,
        image_token_id=IMAGE,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    model: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model


def _qwen2() -> PreTrainedModel:
    return _qwen("Qwen2VL", {}, {"mrope_section": [1, 1, 2]}, {"embed_dim": 32, "mlp_ratio": 1})


def _qwen3() -> PreTrainedModel:
    rope = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16}
    return _qwen("Qwen3VL", {"head_dim": 16}, rope, vision | {"deepstack_visual_indexes": [0]})


def _pixels(images: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(images, 3, 8, 8, generator=torch.Generator().manual_seed(7))}


def _patches(images: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "pixel_values": torch.randn(images * 6, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 3]] * images),
    }


COMPOSITES = {
    "llava": Composite(llava, 4, _pixels),
    "gemma3": Composite(_gemma3, 4, _pixels),
    "qwen2_vl": Composite(_qwen2, 6, _patches),
    "qwen3_vl": Composite(_qwen3, 6, _patches),
}
MULTIMODAL_ROPE = ("qwen2_vl", "qwen3_vl")
