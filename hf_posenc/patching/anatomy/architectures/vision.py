"""Declarations for the vision models in transformers that need one."""

from __future__ import annotations

from hf_posenc.patching.anatomy.architectures import example_inputs
from hf_posenc.patching.anatomy.architectures.declaration import Architecture, register_architecture

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


def declare_vision_architectures() -> None:
    """Registers the declarations of all architectures in this file; called once on import."""
    register_architecture(*_DETECTORS, architecture=Architecture(unsupported=_DETECTS))
    register_architecture("lightglue", "superglue", "efficientloftr", architecture=Architecture(unsupported=_KEYPOINTS))
    register_architecture("gemma4_vision", architecture=Architecture(unsupported=_OWN_COORDINATES))
    register_architecture("llama4_vision_model", architecture=Architecture(suffix_tokens=1))
    register_architecture(
        "yolos", architecture=Architecture(suffix_tokens=lambda config: int(config.num_detection_tokens))
    )
    register_architecture("videomae", architecture=Architecture(left_alone=_MASKED_DECODER))
    register_architecture("vjepa2", architecture=Architecture(left_alone=_PREDICTOR))
    register_architecture("hiera", "sam2_hiera_det_model", architecture=Architecture(additive_only=_POOLS))
    register_architecture(
        *("minicpmv4_6_vision", "minicpmv4_7_vision", "minicpm_ocr_vision"),
        architecture=Architecture(left_alone=_WINDOW_MERGER, example_inputs=example_inputs.patches_in_a_row),
    )
    for given, names in (
        (example_inputs.image_and_prompt, ("seggpt",)),
        (example_inputs.frames_of_a_video, ("xclip_vision_model",)),
        (example_inputs.short_video, ("videomt",)),
        (example_inputs.cut_patches, ("kimi_k25_vision",)),
        (example_inputs.cut_patches_of_a_batch, ("paddleocr_vl_vision",)),
        (example_inputs.flat_patches, ("muse_glimmer_vision", "muse_spark_vision")),
    ):
        register_architecture(*names, architecture=Architecture(example_inputs=given))
