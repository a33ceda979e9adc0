"""Which architectures are looked at: every text model of the auto mappings, and what their default configs hide."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

#: Entries of the mappings that are not text models of their own: wrappers around a text model that has its own entry,
#: models that also need pixels, audio, bytes in patches or entities.
COMPOSITE = frozenset(
    (
        "blt",
        "dots3_note",
        "emu3",
        "fuyu",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_assistant",
        "gemma4_unified",
        "gemma4_unified_assistant",
        "git",
        "got_ocr2",
        "llama4",
        "mllama",
        "moshi",
        "moss_transcribe_diarize",
        "musicgen",
        "musicgen_melody",
        "phi4_multimodal",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
        "trocr",
        "whisper",
        "layoutlm",
        "luke",
        "modernvbert",
        "perceiver",
        "tapas",
        "ultravbert",
    )
)
#: The same class under another name.
ALIASES = frozenset(("gpt-sw3", "internlm3", "iquestcoder"))

#: Encoder-decoders. The last six are refused, for sparse attention or for what their errors say.
SEQ2SEQ = (
    *("t5", "mt5", "umt5", "switch_transformers", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot"),
    *("blenderbot-small", "plbart", "mvp", "nllb-moe"),
    *("pegasus_x", "bigbird_pegasus", "fsmt", "led", "longt5", "prophetnet"),
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One architecture under one head.

    Args:
        kind: "causal", "masked", "seq2seq" or "encoder".
        model_type: the config's model type.
        variant: a name for options other than the defaults; empty for the default config.
        options: those options.
    """

    kind: str
    model_type: str
    variant: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """`causal-llama`, `masked-deberta[relative]`."""
        return f"{self.kind}-{self.model_type}" + (f"[{self.variant}]" if self.variant else "")


def default_pairs() -> list[Pair]:
    """Every text architecture under the causal and the masked head."""
    skipped = COMPOSITE | ALIASES
    causal = [Pair("causal", name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in skipped]
    masked = [Pair("masked", name) for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if name not in skipped]
    return sorted(causal, key=lambda pair: pair.model_type) + sorted(masked, key=lambda pair: pair.model_type)


def extra_pairs() -> list[Pair]:
    """Encoder-decoders, encoders, and options that a default config hides."""
    ropes: list[tuple[str, dict[str, Any]]] = [
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16}),
        (
            "longrope",
            {
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            "llama3",
            {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        ),
        ("proportional", {"partial_rotary_factor": 0.5}),
    ]
    relative = (("relative_attention", True), ("pos_att_type", ["c2p", "p2c"]), ("position_biased_input", False))
    return [
        *(Pair("seq2seq", name) for name in SEQ2SEQ),
        Pair("encoder", "t5"),
        Pair("encoder", "umt5"),
        *(
            Pair("causal", "llama", kind, (("rope_parameters", {"rope_type": kind, "rope_theta": 1e4} | options),))
            for kind, options in ropes
        ),
        Pair("masked", "esm", "rotary", (("position_embedding_type", "rotary"),)),
        Pair("masked", "deberta", "relative", relative),
        Pair("masked", "deberta-v2", "relative", relative),
        Pair("causal", "falcon", "new decoder", (("new_decoder_architecture", True),)),
        Pair("masked", "big_bird", "full", (("attention_type", "original_full"),)),
        Pair("causal", "big_bird", "full", (("attention_type", "original_full"),)),
        Pair("seq2seq", "bigbird_pegasus", "full", (("attention_type", "original_full"),)),
        Pair("causal", "falcon", "alibi", (("alibi", True),)),
        Pair("causal", "xlnet", "unidirectional", (("attn_type", "uni"),)),
        Pair("masked", "distilbert", "sinusoidal", (("sinusoidal_pos_embds", True),)),
        Pair("masked", "xlm", "sinusoidal", (("sinusoidal_embeddings", True),)),
        Pair("masked", "roformer", "rotary value", (("rotary_value", True),)),
    ]


def all_pairs() -> list[Pair]:
    """What the table in docs/reference/architectures.md covers."""
    return default_pairs() + extra_pairs()
