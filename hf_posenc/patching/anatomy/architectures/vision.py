"""Declarations for the vision models in transformers that need one."""

from __future__ import annotations

from typing import Any

import torch

from hf_posenc.patching.anatomy.architectures.declaration import Architecture
from hf_posenc.patching.anatomy.architectures.example_inputs import SIDE, cut_patches, image_sides, numbers
from hf_posenc.schemes.refusals import POOLED_PATCHES

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

_NUMBERED_PATCHES = (
    "its patches come with their rows and columns as the first two of their values, and it looks up a vector for each. "
    "Patch the text part."
)
_TILES = (
    "its patches are those of several tiles, whose places in the picture only `aspect_ratio_ids` tells. Patch the text "
    "part."
)
_LATENTS = (
    "its latents have no positions, and one softmax is taken over them and the features of a picture together. Patch "
    "another part."
)


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
    ("sam3_detr_encoder", "sam3_detr_decoder", "sam3_lite_text_detr_encoder", "sam3_lite_text_detr_decoder"): (
        Architecture(unsupported=_DETECTS)
    ),
    ("gemma4_vision",): Architecture(unsupported=_OWN_COORDINATES),
    ("pix2struct_vision_model", "kosmos_2_5_vision_model"): Architecture(unsupported=_NUMBERED_PATCHES),
    ("mllama_vision_model",): Architecture(unsupported=_TILES),
    ("idefics2_perceiver",): Architecture(unsupported=_LATENTS),
    ("molmo2_adapter",): Architecture(
        unsupported="it pools the patches of a window into one token, which is the only query."
    ),
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
    # The patches of a crop, cut out and flattened.
    ("molmo2_vision",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(
                1, module.config.num_position_embeddings, module.config.num_channels * module.config.patch_size**2
            )
        }
    ),
    # Two by two patches in one, counted in such groups.
    ("inkling2_vision",): Architecture(
        example_inputs=lambda module, tokens: {
            "pixel_values": numbers(
                SIDE**2, *[module.config.patch_size * module.config.spatial_merge_size] * 2, module.config.num_channels
            ),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
        }
    ),
    ("bridgetower_vision_model",): Architecture(
        example_inputs=lambda module, tokens: {"image": numbers(1, 3, *image_sides(module.config))}
    ),
    # The features of another encoder on a grid.
    ("unlimited_ocr_vision_encoder",): Architecture(
        example_inputs=lambda module, tokens: {
            "patch_embeds": numbers(
                1, module.config.hidden_size, *[module.config.image_size // module.config.patch_size] * 2
            )
        }
    ),
    # Features of patches, without the queries behind them.
    ("deepseek_ocr2_encoder",): Architecture(
        example_inputs=lambda module, tokens: {
            "inputs_embeds": numbers(1, tokens, module.config.hidden_size),
            "num_patches": tokens,
        }
    ),
}
