"""Models that are not built here, with the reason; the page prints it."""

from __future__ import annotations

_SESSION = (
    "its forward reads a session of frames that were segmented before; its encoder and memory run in the image model"
)
_CONTAINER = "it has no forward: it only generates, through models that have one"

_ASSISTANT = (
    "its layers attend to the key-value cache of the model that it assists, so it has no self-attention to run alone"
)

_CONVOLUTION = "its default config builds no model; its code has convolutions and no attention"

UNBUILT: dict[str, str] = {
    "bark": _CONTAINER,
    "edgetam_video": _SESSION,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "glm_image_vqmodel": _CONTAINER,
    "llama4": "in transformers 5.24 each forward of the stock model fails (its text model returns no image_outputs)",
    "pp_ocrv5_server_det": _CONVOLUTION,
    "pp_ocrv6_medium_det": _CONVOLUTION,
    "qwen2_5_omni": f"{_CONTAINER} (qwen2_5_omni_thinker)",
    "qwen3_omni_moe": f"{_CONTAINER} (qwen3_omni_moe_thinker)",
    "sam2_video": _SESSION,
    "sam3_tracker_video": _SESSION,
    "sam3_video": _SESSION,
}
