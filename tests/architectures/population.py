"""The architectures under test: every model of the auto mappings, and options that default configs hide."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from tests.versions import must_have

#: Kinds of architectures and their titles, in the order of the page.
KINDS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoders",
    "encoder": "Encoders",
    "text": "Other text models",
    "image-text": "Images and text",
    "audio-text": "Audio and text",
    "any-to-any": "Images, audio and text",
    "vision": "Vision",
    "video": "Video",
    "audio": "Audio",
    "time series": "Time series",
    "other": "Layouts, tables, graphs, proteins and other inputs",
}
WITH_VOCABULARY_HEAD = ("causal", "masked", "seq2seq", "encoder")

#: What the name of an argument of a forward says about the input; many classes leave `input_modalities` at "text".
_ARGUMENTS = {
    **dict.fromkeys(("input_ids", "audio_input_ids"), "text"),
    "decoder_input_ids": "text",
    **dict.fromkeys(("pixel_values", "image_patches", "flattened_patches", "image_pixel_values"), "image"),
    **dict.fromkeys(("grid_thw", "pixel_position_ids"), "image"),
    **dict.fromkeys(("pixel_values_videos",), "video"),
    **dict.fromkeys(("input_features", "input_values", "audio_mel", "audio_input_features", "latents"), "audio"),
    **dict.fromkeys(("past_values",), "time"),
}
#: Arguments of inputs that are neither text, nor pictures, nor sound, nor series.
_OTHER_ARGUMENTS = frozenset(
    (
        *("bbox", "xpath_tags_seq", "entity_ids", "states", "visual_feats", "protein_input_ids", "noise_embeds"),
        *("marks", "visual_embeds", "shared_kv_states", "actions", "context_hidden_states"),
    )
)
#: Text models whose inputs are not plain tokens: bytes in patches, tables, codes, or any of them.
_OTHER_TYPES = frozenset(("blt", "tapas", "perceiver"))
_SPEAKING = ("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "SPEECH_SEQ_2_SEQ")
_OF_VIDEO = frozenset(modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One architecture under one head.

    Args:
        kind: a key of `KINDS`.
        variant: a name for options other than the defaults; empty for the default config.
    """

    kind: str
    model_type: str
    variant: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """`causal-llama`, `masked-deberta[relative]`."""
        return f"{self.kind}-{self.model_type}" + (f"[{self.variant}]" if self.variant else "")

    @property
    def has_vocabulary_head(self) -> bool:
        """Whether the model reads tokens only and scores tokens."""
        return self.kind in WITH_VOCABULARY_HEAD


#: Mappings by what they map to: "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MODEL" (base models).
MAPPINGS: dict[str, Mapping[str, Any]] = {
    name.removeprefix("MODEL_FOR_").removesuffix("_NAMES").removesuffix("_MAPPING"): mapping
    for name, mapping in vars(modeling_auto).items()
    if name.startswith("MODEL_") and name.endswith("_NAMES")
}
#: Which mapping names the main class of a model type: generation first, then the base model, then any head.
_ORDER = (
    *("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "TEXT_TO_WAVEFORM"),
    *("TEXT_TO_SPECTROGRAM", "CAUSAL_LM", "MASKED_LM", "CTC", "RNNT", "TDT", "TIME_SERIES_PREDICTION", "MODEL"),
)


def class_name(model_type: str, mapping: str = "") -> str:
    """The name of the main class of a model type, or of its class in a mapping."""
    names = (mapping,) if mapping else (*(name for name in _ORDER if name in MAPPINGS), *MAPPINGS)
    found = next(MAPPINGS[name][model_type] for name in names if model_type in MAPPINGS[name])
    return found if isinstance(found, str) else str(found[0])


def class_named(name: str, model_type: str) -> type[Any]:
    """The class itself; some are not exported by the package."""
    found: type[Any] | None = getattr(transformers, name, None)
    if found is None:
        package = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
        names = sorted(name for name in dir(package) if name.startswith("modeling_"))
        modules = (importlib.import_module(f"{package.__name__}.{one}") for one in names)
        found = next(getattr(module, name) for module in modules if hasattr(module, name))
    return found


@functools.cache
def modalities(model_type: str) -> frozenset[str]:
    """What the main class reads: "text", "image", "video", "audio", "time", "other"."""
    found = class_named(class_name(model_type), model_type)
    if _missing(found):
        return frozenset(("image",) if model_type in MAPPINGS.get("IMAGE", ()) else ("audio",))
    declared = getattr(found, "input_modalities", None)
    stated = set(declared if isinstance(declared, list | tuple) else [declared] if declared else [])
    arguments = inspect.signature(found.forward).parameters
    if model_type in _OTHER_TYPES or _OTHER_ARGUMENTS & set(arguments):
        return frozenset(("other",))
    read = {modality for name, modality in _ARGUMENTS.items() if name in arguments}
    if not read:
        main = _ARGUMENTS.get(str(found.main_input_name), "")
        read = stated - {"text"} or {main or "text"}
    if read == {"text"} and stated & {"image", "audio"} and "text" not in stated:
        read = stated
    if any(model_type in MAPPINGS.get(mapping, ()) for mapping in _SPEAKING):
        read = read | {"audio"}
    if "image" in read and (model_type in _OF_VIDEO or stated >= {"video"} > stated & {"image"}):
        read = read - {"image"} | {"video"}
    return frozenset(read)


def _missing(found: type[Any]) -> bool:
    """Whether a class is a stand-in for one that needs a package that is not installed."""
    return bool(vars(found).get("_backends"))


@functools.cache
def aliases() -> dict[str, str]:
    """Model types whose main class is that of another type, and that type."""
    owners: dict[str, str] = {}
    found: dict[str, str] = {}
    own = sorted(
        known_model_types(),
        key=lambda name: (not _owns(name), model_type_to_module_name(name) != name, name),
    )
    for model_type in own:
        owner = owners.setdefault(class_name(model_type), model_type)
        if owner != model_type:
            found[model_type] = owner
    return found


def _owns(model_type: str) -> bool:
    found = class_named(class_name(model_type), model_type)
    config = None if _missing(found) else getattr(found, "config_class", None)
    return getattr(config, "model_type", None) == model_type


def model_types() -> list[str]:
    """Every distinct architecture: all model types of the auto mappings without aliases."""
    return sorted(set(known_model_types()) - set(aliases()))


def kinds_of(model_type: str) -> list[str]:
    """The kinds under which a model type is looked at; text models may have a causal and a masked head."""
    read = modalities(model_type)
    if "other" in read:
        return ["other"]
    if read == {"text"}:
        heads = {"CAUSAL_LM": "causal", "MASKED_LM": "masked", "SEQ_TO_SEQ_CAUSAL_LM": "seq2seq"}
        return [kind for mapping, kind in heads.items() if model_type in MAPPINGS[mapping]] or ["text"]
    if "audio" in read and read & {"image", "video"}:
        return ["any-to-any"]
    if "text" in read:
        return ["audio-text"] if "audio" in read else ["image-text"]
    return [
        "time series" if "time" in read else "audio" if "audio" in read else "vision" if "image" in read else "video"
    ]


def default_pairs() -> list[Pair]:
    """Every architecture under each of its kinds."""
    pairs = [Pair(kind, model_type) for model_type in model_types() for kind in kinds_of(model_type)]
    return sorted(pairs, key=lambda pair: (list(KINDS).index(pair.kind), pair.model_type))


def extra_pairs() -> list[Pair]:
    """Encoders of encoder-decoders, and options that a default config hides."""
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


def pair_named(name: str) -> Pair:
    """The pair of a name, without a look at all others.

    An older transformers without this model type skips the running test.
    """
    for pair in extra_pairs():
        if pair.name == name:
            return pair
    kind = next(kind for kind in KINDS if name.startswith(f"{kind}-"))
    model_type = name.removeprefix(f"{kind}-")
    must_have(model_type, any(model_type in mapping for mapping in MAPPINGS.values()))
    return Pair(kind, model_type)


def pairs_of(model_type: str) -> list[Pair]:
    """An architecture under each of its kinds, and with the options that its default config hides."""
    if model_type in aliases():
        return []
    own = [Pair(kind, model_type) for kind in kinds_of(model_type)]
    return own + [pair for pair in extra_pairs() if pair.model_type == model_type]


def known_model_types() -> list[str]:
    """All model types of the mappings, aliases included; this imports no model."""
    return sorted(set().union(*MAPPINGS.values()))
