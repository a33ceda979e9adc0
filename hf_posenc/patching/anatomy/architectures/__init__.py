"""Declarations of properties of an architecture that structural discovery cannot find.

Most architectures in transformers need none. A declaration contains only the special properties of an architecture:
how to silence a mechanism that is neither a rotary function nor a table, how to count heads, which inputs it needs for
a short run, or why it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_posenc.patching.anatomy.architectures.declaration import (
    _ARCHITECTURES,
    STOCK,
    Architecture,
    Silencer,
    architecture_of,
    has_stock_code,
    refused_if,
    register_architecture,
)
from hf_posenc.patching.anatomy.architectures.example_inputs import EXAMPLES
from hf_posenc.patching.anatomy.architectures.mechanisms import MECHANISMS
from hf_posenc.patching.anatomy.architectures.sparse import SPARSE

_SAMPLING_DETECTORS = (
    "d_fine", "deformable_detr", "deimv2", "grounding-dino", "lw_detr", "mask2former", "mm-grounding-dino",
    "omdet-turbo", "oneformer", "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "rf_detr", "rt_detr",
    "rt_detr_v2",
)  # fmt: skip
_ADDING_DETECTORS = (
    "conditional_detr", "dab-detr", "detr", "maskformer", "sam3_detr_decoder", "sam3_detr_encoder",
    "sam3_lite_text_detr_decoder", "sam3_lite_text_detr_encoder", "table-transformer",
)  # fmt: skip
_BACKBONE = "Patch the backbone before it is put into the detector, if that is a vision transformer."
#: Why no scheme can be placed in an architecture, by model types.
_REFUSED: dict[tuple[str, ...], str | Callable[[Any], str | None]] = {
    ("mra",): "its attention is sparse or approximate, in a kernel for GPUs that transformers downloads. Without it, "
    "attention returns zeros, so the effect of a scheme cannot be checked.",
    ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "fnet"): "it has no softmax attention.",
    ("deepseek_v4",): "its keys are selected by an indexer or compressed before attention, which uses separate rotary "
    "positions.",
    ("funnel",): "it pools the sequence between layers, so a position means something else in every block.",
    ("bros",): "its encoder is a separate model, which receives embeddings that contain learned positions, and adds "
    "the distances of boxes to its logits.",
    ("canine",): "it pools characters between its layers, so a position means something else before and after.",
    ("prophetnet",): "one attention module of its decoder computes the streams of several next tokens, whose positions "
    "are shifted against each other. Use another encoder-decoder, such as BART.",
    ("t5gemma2_decoder",): "one softmax covers the keys of its own tokens and those of the encoder, and keys of "
    "another sequence have no distance to its tokens.",
    ("dory",): refused_if(
        lambda config: config.recurrent_kv_cache_mode != "per_loop",
        "with `recurrent_kv_cache_mode='last_loop'` its earlier loops join their keys with those that the last loop "
        "has cached, so a scheme cannot change what is cached. It can be patched with 'per_loop'.",
    ),
    ("muse_glimmer_assistant",): "its keys include states of the model that it assists, and its arguments do not give "
    "their positions among its own tokens.",
    _SAMPLING_DETECTORS: "it samples feature maps of several sizes at points that it predicts (deformable attention), "
    f"where no query is compared with a key, and its layers add position vectors to queries and keys. {_BACKBONE}",
    _ADDING_DETECTORS: "each of its layers adds position vectors to the inputs of the projections of queries and keys, "
    "but not of values, and the queries of a decoder are objects, which have no positions. "
    f"{_BACKBONE}",
    ("lightglue", "superglue"): "its tokens are keypoints, whose real coordinates it rotates by or encodes with a "
    "network. They are not patches with rows and columns.",
    ("efficientloftr",): "the same attention compares the patches of a picture with each other, and then with those of "
    "another picture, to which they have no distance.",
    ("gemma4_vision",): "its patches come with (x, y) coordinates in a separate argument, and each axis is rotated by "
    "a separate call. Patch another part.",
    ("pix2struct_vision_model", "kosmos_2_5_vision_model"): "the first two values of a patch are its row and its "
    "column, and the model looks up a vector for each. Patch the text part.",
    ("mllama_vision_model",): "its patches belong to several tiles, and only `aspect_ratio_ids` shows where a tile is "
    "in the picture. Patch the text part.",
    ("idefics2_perceiver",): "its latents have no positions, and one softmax covers them and the features of a "
    "picture. Patch another part.",
    ("molmo2_adapter",): "it pools the patches of a window into one token, which is the only query.",
    ("patchtsmixer",): "it mixes patches with layers of a fixed length, and has no softmax attention over time.",
    ("autoformer",): "it correlates a series with itself in place of softmax attention.",
    ("decision_transformer",): "it gives all tokens position 0, and adds embeddings of time steps that the caller "
    "passes.",
    ("speecht5",): "its prenets, which add positions, are modules outside of its encoder and decoder, and "
    "generate_speech calls them separately.",
    ("patchtst",): refused_if(
        lambda config: config.channel_attention,
        "with `channel_attention=True` the same attention module compares time steps and then channels, which have no "
        "order. It can be patched with channel_attention=False.",
    ),
    ("qwen3_asr_encoder",): "its sinusoids start again in every window, and all windows are packed in one row, so its "
    "layers do not receive the position of a frame. Patch the text part.",
    ("mobilevitv2", "swiftformer"): "its attention weights each patch by a score computed from this patch alone. No "
    "query is compared with a key, so there is no logit that a scheme could change.",
    ("slanet",): "its encoder is a convolution, and its decoder a recurrent cell that attends to the picture.",
    ("wavtokenizer",): "its only attention layer, of one head, stands between convolutions, which show it the order of "
    "its input.",
}

for _names, _architecture in (MECHANISMS | SPARSE).items():
    register_architecture(*_names, architecture=_architecture)
for _names, _reason in _REFUSED.items():
    register_architecture(*_names, architecture=Architecture(unsupported=_reason))
for _names, _example in EXAMPLES.items():
    register_architecture(*_names, architecture=Architecture(example_inputs=_example))
STOCK.update(_ARCHITECTURES)

__all__ = ["Architecture", "Silencer", "architecture_of", "has_stock_code", "register_architecture"]
