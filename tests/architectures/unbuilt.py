"""Models that are not built here, with the reason; the page prints it."""

from __future__ import annotations

_SESSION = (
    "its forward reads a session of frames that were segmented before; its encoder and memory run in the image model"
)
_ASSISTANT = (
    "its layers attend to the key-value cache of the model that it assists, so it has no self-attention to run alone"
)

UNBUILT: dict[str, str] = {
    "dinat": "it needs natten2dqkrpb of natten, which natten 0.21 no longer has",
    "edgetam_video": _SESSION,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "llama4": "in transformers 5.24 each forward of the stock model fails (its text model returns no image_outputs)",
    "sam2_video": _SESSION,
    "sam3_tracker_video": _SESSION,
    "sam3_video": _SESSION,
}
