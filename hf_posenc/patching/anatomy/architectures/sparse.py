"""Declarations for architectures with attention that is sparse, approximate, or computed in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_posenc.patching.anatomy.architectures.declaration import (
    Architecture,
    no_native,
    no_vectors,
    refused_if,
    silenced_children,
    silencer,
)
from hf_posenc.patching.anatomy.architectures.example_inputs import FRAMES, numbers
from hf_posenc.schemes import SinusoidalConfig

#: The schemes that sparse attention takes, for messages.
_ADDED = "'none', or a scheme that adds vectors to the embeddings,"


def _block_sparse(prefix: str) -> Callable[[Any], tuple[str, ...]]:
    """The attention classes of BigBird. Its attention becomes full when it reads a short text, and stays full."""
    classes = (f"{prefix}BlockSparseAttention", f"{prefix}SelfAttention")
    return lambda config: classes if config.attention_type != "original_full" else ()


def _blocks_of_frames(attention: str, positions: str, example_inputs: Any = None) -> Architecture:
    """An encoder of sound whose attention compares the frames of a block, with vectors for their distances.

    Args:
        attention: the class of its attention.
        positions: the module in it that makes the vectors.
        example_inputs: those of the architecture, if its config does not name the number of features of a frame.
    """
    return Architecture(
        example_inputs=example_inputs,
        sparse=(attention,),
        mechanism="relative keys within blocks",
        silence=silenced_children(positions),
        native=no_native(
            "This encoder compares each query with vectors for the distances within a block of frames. No scheme of "
            "this library acts in blocks.",
            by=_ADDED,
        ),
    )


#: The declarations by the model types that they are for.
SPARSE: dict[tuple[str, ...], Architecture] = {
    ("longformer",): Architecture(sparse=("LongformerSelfAttention",)),
    ("reformer",): Architecture(
        unsupported=refused_if(
            lambda config: config.axial_pos_embds,
            "with `axial_pos_embds=True` the vector of a position is concatenated from rows of two tables, and no "
            "scheme acts in its sparse attention. With axial_pos_embds=False it accepts schemes that add vectors.",
        ),
        attention_classes=("LSHSelfAttention", "LocalSelfAttention"),
        sparse=("LSHSelfAttention", "LocalSelfAttention"),
        tables=("embeddings.position_embeddings.embedding",),
    ),
    ("led",): Architecture(sparse=("LEDEncoderSelfAttention",)),
    ("nystromformer",): Architecture(sparse=("NystromformerSelfAttention",), rows_before=2),
    ("yoso",): Architecture(sparse=("YosoSelfAttention",), rows_before=2),
    ("big_bird",): Architecture(sparse=_block_sparse("BigBird")),
    ("bigbird_pegasus",): Architecture(sparse=_block_sparse("BigBirdPegasus")),
    ("longt5",): Architecture(
        sparse=("LongT5LocalAttention", "LongT5TransientGlobalAttention"),
        mechanism="T5 relative bias",
        silence=silenced_children("relative_attention_bias", "global_relative_attention_bias"),
        native=no_native("LongT5 adds a T5 bias in sparse attention, where no scheme of this library acts.", by=_ADDED),
    ),
    ("pegasus_x",): Architecture(
        sparse=("PegasusXGlobalLocalAttention",),
        mechanism="sinusoids of positions",
        silence=silencer(of="embed_positions", forward=no_vectors),
        native=lambda stack: SinusoidalConfig(frequencies="tensor2tensor", layout="concatenated"),
    ),
    ("gemma3n_audio",): _blocks_of_frames("Gemma3nAudioAttention", "relative_position_embedding.pos_proj"),
    ("gemma4_audio",): _blocks_of_frames(
        "Gemma4AudioAttention",
        "relative_k_proj",
        lambda module, tokens: {"input_features": numbers(1, FRAMES, module.config.subsampling_conv_channels[0])},
    ),
    ("granite_speech_encoder",): _blocks_of_frames("GraniteSpeechConformerAttention", "rel_pos_emb"),
    ("granite_speech_plus_encoder",): _blocks_of_frames("GraniteSpeechPlusConformerAttention", "rel_pos_emb"),
    ("granite_speech5_encoder",): _blocks_of_frames(
        "GraniteSpeech5EncoderAttention",
        "rel_pos_emb",
        lambda module, tokens: {"input_features": numbers(1, FRAMES, 4 * module.config.num_mel_bins)},
    ),
}
