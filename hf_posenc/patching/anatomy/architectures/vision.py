"""Declarations for the vision models in transformers that need one."""

from __future__ import annotations

from hf_posenc.patching.anatomy.architectures import example_inputs
from hf_posenc.patching.anatomy.architectures.declaration import Architecture

_POOLS = (
    "its attention pools queries and reorders patches into mask units, so queries and keys have no common places on a "
    "grid."
)


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

#: The declarations by the model types that they are for.
VISION: dict[tuple[str, ...], Architecture] = {
    _DETECTORS: Architecture(unsupported=_DETECTS),
    ("lightglue", "superglue", "efficientloftr"): Architecture(unsupported=_KEYPOINTS),
    ("gemma4_vision",): Architecture(unsupported=_OWN_COORDINATES),
    ("llama4_vision_model",): Architecture(suffix_tokens=1),
    ("yolos",): Architecture(suffix_tokens=lambda config: int(config.num_detection_tokens)),
    ("videomae",): Architecture(left_alone=_MASKED_DECODER),
    ("vjepa2",): Architecture(left_alone=_PREDICTOR),
    ("hiera", "sam2_hiera_det_model"): Architecture(additive_only=_POOLS),
    ("minicpmv4_6_vision", "minicpmv4_7_vision", "minicpm_ocr_vision"): Architecture(
        left_alone=_WINDOW_MERGER, example_inputs=example_inputs.patches_in_a_row
    ),
    ("seggpt",): Architecture(example_inputs=example_inputs.image_and_prompt),
    ("xclip_vision_model",): Architecture(example_inputs=example_inputs.frames_of_a_video),
    ("videomt",): Architecture(example_inputs=example_inputs.short_video),
    ("kimi_k25_vision",): Architecture(example_inputs=example_inputs.cut_patches),
    ("paddleocr_vl_vision",): Architecture(example_inputs=example_inputs.cut_patches_of_a_batch),
    ("muse_glimmer_vision", "muse_spark_vision"): Architecture(example_inputs=example_inputs.flat_patches),
}
