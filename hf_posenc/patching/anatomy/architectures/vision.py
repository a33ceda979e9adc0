"""Declarations for the vision models in transformers that need one."""

from __future__ import annotations

from typing import Any

import torch

from hf_posenc.patching.anatomy.architectures.declaration import Architecture
from hf_posenc.patching.anatomy.architectures.example_inputs import SIDE, cut_patches, image_sides, numbers
from hf_posenc.schemes.environments import POOLED_PATCHES

_DETECTS = (
    "its layers add position vectors to queries and keys themselves, and attend to feature maps of several sizes. "
    "Patch the backbone before it is put into the detector, if that is a vision transformer."
)
_DETECTORS = (
    "conditional_detr", "d_fine", "dab-detr", "deformable_detr", "deimv2", "detr", "edgetam", "grounding-dino",
    "lw_detr", "mask2former", "maskformer", "mm-grounding-dino", "omdet-turbo", "oneformer", "pp_doclayout_v2",
    "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr", "rt_detr", "rt_detr_v2", "table-transformer",
)  # fmt: skip
_OWN_COORDINATES = (
    "its patches come with (x, y) coordinates in an argument of their own, and each axis is rotated by a separate "
    "call. Patch another part."
)
_KEYPOINTS = "its tokens are keypoints at real coordinates, which it rotates by, not patches with rows and columns."


_MASKED_DECODER = (
    r"^decoder\.",
    "it receives the visible patches first and the masked ones after them, in an order that its arguments do not show",
)
_PREDICTOR = (
    r"^predictor\.",
    "it receives patches of the context and of the targets, in an order that its arguments do not show",
)
_WINDOW_MERGER = (r"^vit_merger\.", "it compares the four patches of a window, which have an order of their own")


def _image_and_prompt(module: Any, tokens: int) -> dict[str, Any]:
    """An image, another one, and the segmentation of the latter."""
    height, width = image_sides(module.config)
    # The image size of the config is that of both images, one above the other.
    image = numbers(1, module.config.num_channels, height // 2, width)
    return {"pixel_values": image, "prompt_pixel_values": image.flip(3), "prompt_masks": image.flip(2)}


def _patch_images(module: Any, tokens: int) -> dict[str, Any]:
    """The pixels of every patch, as an image of its own."""
    size = module.config.patch_size
    return cut_patches(SIDE**2, 3, *((size, size) if isinstance(size, int) else size))


#: The declarations by the model types that they are for.
VISION: dict[tuple[str, ...], Architecture] = {
    _DETECTORS: Architecture(unsupported=_DETECTS),
    ("lightglue", "superglue", "efficientloftr"): Architecture(unsupported=_KEYPOINTS),
    ("gemma4_vision",): Architecture(unsupported=_OWN_COORDINATES),
    ("llama4_vision_model",): Architecture(suffix_tokens=1),
    ("yolos",): Architecture(suffix_tokens=lambda config: int(config.num_detection_tokens)),
    ("videomae",): Architecture(left_alone=_MASKED_DECODER),
    ("vjepa2",): Architecture(left_alone=_PREDICTOR),
    ("hiera", "sam2_hiera_det_model"): Architecture(limits=POOLED_PATCHES),
    ("minicpmv4_6_vision", "minicpmv4_7_vision", "minicpm_ocr_vision"): Architecture(
        left_alone=_WINDOW_MERGER,
        # All patches side by side in one strip.
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(
                1, module.config.num_channels, module.config.patch_size, module.config.patch_size * SIDE**2
            ),
            "target_sizes": torch.tensor([[SIDE, SIDE]]),
        },
    ),
    ("seggpt",): Architecture(example_inputs=_image_and_prompt),
    # Frames in place of a batch of images.
    ("xclip_vision_model",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(module.config.num_frames, module.config.num_channels, *image_sides(module.config))
        }
    ),
    ("videomt",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values_videos": numbers(1, 2, module.config.num_channels, *image_sides(module.config))
        }
    ),
    ("kimi_k25_vision",): Architecture(example_inputs=_patch_images),
    # Patches of a batch.
    ("paddleocr_vl_vision",): Architecture(
        example_inputs=lambda module, tokens: cut_patches(
            1, SIDE**2, module.config.num_channels, module.config.patch_size, module.config.patch_size
        )
    ),
    # The pixels of every patch and of its frames in one row.
    ("muse_glimmer_vision", "muse_spark_vision"): Architecture(
        example_inputs=lambda module, tokens: cut_patches(
            SIDE**2, module.config.patch_temporal * 3 * module.config.patch_size**2
        )
    ),
}
