"""Tiny vision models, one per family, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

#: Sizes that most configs name alike.
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGE = {"image_size": 16, "patch_size": 4}


@dataclass(frozen=True)
class Family:
    """One family.

    Args:
        model: name of the model class.
        config: name of the config class.
        options: options of the config.
        inputs: makes the inputs.
    """

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], dict[str, Any]] = lambda: {"pixel_values": noise(2, 3, 16, 16)}

    def build(self, **options: Any) -> PreTrainedModel:
        """The model with random weights, in evaluation mode."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(self.options | options))
        module = getattr(transformers, self.model, None) or _find(self.config, self.model)
        model: PreTrainedModel = module(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Tables and class tokens may be zero, and weights too small for positions to matter.
                generator = torch.Generator().manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return model


def _find(config: str, name: str) -> Any:
    """A model class that transformers does not export."""
    import importlib

    path = getattr(transformers, config).__module__.replace("configuration_", "modeling_")
    return getattr(importlib.import_module(path), name)


def noise(*shape: int) -> Tensor:
    """Fixed random pixels."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def packed(grids: list[list[int]], width: int) -> dict[str, Any]:
    """Two images in one row, for the towers of Qwen-VL."""
    sizes = torch.tensor(grids)
    return {"hidden_states": noise(int(sizes.prod(-1).sum()), width), "grid_thw": sizes}


def output(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """The last hidden states, or the first output."""
    with torch.no_grad():
        found = model(**inputs)
    hidden = found.get("last_hidden_state") if hasattr(found, "get") else None
    first: Any = found[0] if hidden is None else hidden
    return first


_QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

FAMILIES = {
    "vit": Family("ViTModel", "ViTConfig", SMALL | IMAGE),
    "deit": Family("DeiTModel", "DeiTConfig", SMALL | IMAGE),
    "beit": Family("BeitModel", "BeitConfig", SMALL | IMAGE | {"use_relative_position_bias": True}),
    "beit_shared": Family("BeitModel", "BeitConfig", SMALL | IMAGE | {"use_shared_relative_position_bias": True}),
    "data2vec-vision": Family(
        "Data2VecVisionModel", "Data2VecVisionConfig", SMALL | IMAGE | {"use_relative_position_bias": True}
    ),
    "dinov2": Family("Dinov2Model", "Dinov2Config", SMALL | IMAGE),
    "dinov2_with_registers": Family("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", SMALL | IMAGE),
    "dinov3_vit": Family("DINOv3ViTModel", "DINOv3ViTConfig", SMALL | IMAGE | {"num_register_tokens": 2}),
    "siglip": Family("SiglipVisionModel", "SiglipVisionConfig", SMALL | IMAGE),
    "siglip2": Family(
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        SMALL | {"patch_size": 4, "num_patches": 16},
        lambda: {
            "pixel_values": noise(2, 12, 48),
            "pixel_attention_mask": torch.tensor([[1] * 12, [1] * 6 + [0] * 6]),
            "spatial_shapes": torch.tensor([[3, 4], [2, 3]]),
        },
    ),
    "clip": Family("CLIPVisionModel", "CLIPVisionConfig", SMALL | IMAGE),
    "vit_mae": Family(
        "ViTMAEModel",
        "ViTMAEConfig",
        SMALL | IMAGE | {"mask_ratio": 0.5},
        lambda: {"pixel_values": noise(2, 3, 16, 16), "noise": noise(2, 16)},
    ),
    "swin": Family(
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        lambda: {"pixel_values": noise(2, 3, 32, 32)},
    ),
    "swinv2": Family(
        "Swinv2Model",
        "Swinv2Config",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        lambda: {"pixel_values": noise(2, 3, 32, 32)},
    ),
    "videomae": Family(
        "VideoMAEModel",
        "VideoMAEConfig",
        SMALL | IMAGE | {"num_frames": 4, "tubelet_size": 2},
        lambda: {"pixel_values": noise(2, 4, 3, 16, 16)},
    ),
    "vivit": Family(
        "VivitModel",
        "VivitConfig",
        SMALL | {"image_size": 16, "num_frames": 4, "tubelet_size": [2, 4, 4]},
        lambda: {"pixel_values": noise(2, 4, 3, 16, 16)},
    ),
    "timesformer": Family(
        "TimesformerModel",
        "TimesformerConfig",
        SMALL | IMAGE | {"num_frames": 4},
        lambda: {"pixel_values": noise(2, 4, 3, 16, 16)},
    ),
    "vjepa2": Family(
        "VJEPA2Model",
        "VJEPA2Config",
        {
            "patch_size": 4, "crop_size": 16, "frames_per_clip": 4, "tubelet_size": 2, "hidden_size": 36,
            "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_ratio": 1.5, "pred_hidden_size": 36,
            "pred_num_attention_heads": 2, "pred_num_hidden_layers": 2, "pred_num_mask_tokens": 2,
        },
        lambda: {"pixel_values_videos": noise(2, 4, 3, 16, 16)},
    ),
    "pixtral": Family(
        "PixtralVisionModel",
        "PixtralVisionConfig",
        SMALL | IMAGE,
        lambda: {"pixel_values": noise(2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16], [8, 12]])},
    ),
    "qwen2_vl": Family(
        "Qwen2VisionTransformerPretrainedModel",
        "Qwen2VLVisionConfig",
        _QWEN | {"embed_dim": 32, "hidden_size": 48},
        lambda: packed([[1, 4, 6], [1, 2, 4]], 3 * 2 * 16),
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
        _QWEN
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48, "window_size": 16}
        | {"fullatt_block_indexes": [1]},
        lambda: packed([[1, 4, 6], [1, 6, 4]], 3 * 2 * 16),
    ),
    "qwen3_vl": Family(
        "Qwen3VLVisionModel",
        "Qwen3VLVisionConfig",
        _QWEN
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48, "num_position_embeddings": 16}
        | {"deepstack_visual_indexes": [0]},
        lambda: packed([[1, 4, 6], [1, 2, 4]], 3 * 2 * 16),
    ),
    "llama4_vision": Family(
        "Llama4VisionModel",
        "Llama4VisionConfig",
        SMALL
        | IMAGE
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "intermediate_size": 128},
    ),
    "sam": Family(
        "SamVisionModel",
        "SamVisionConfig",
        SMALL | {"image_size": 16, "patch_size": 2, "output_channels": 8, "window_size": 3, "mlp_dim": 48}
        | {"global_attn_indexes": [1]},
    ),
    "yolos": Family(
        "YolosModel", "YolosConfig", SMALL | {"image_size": [16, 16], "patch_size": 4, "num_detection_tokens": 3}
    ),
    "dpt": Family("DPTModel", "DPTConfig", SMALL | IMAGE | {"backbone_out_indices": [0, 1]}),
    "segformer": Family(
        "SegformerModel",
        "SegformerConfig",
        {"depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [16, 32], "num_attention_heads": [1, 2]}
        | {"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]},
        lambda: {"pixel_values": noise(2, 3, 32, 32)},
    ),
    "hiera": Family(
        "HieraModel",
        "HieraConfig",
        {"embed_dim": 16, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4]},
        lambda: {"pixel_values": noise(2, 3, 64, 64)},
    ),
    "ijepa": Family("IJepaModel", "IJepaConfig", SMALL | IMAGE),
}  # fmt: skip
