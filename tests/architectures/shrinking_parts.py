"""The shrunk config of a model that reads more than text: the rules of `shrinking`, applied to every config in it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from .overrides import OVERRIDES
from .shrinking import OVERRIDES as TEXT_OVERRIDES, PER_LAYER, SHRUNK
from .shrinking_modalities import (
    COMPOSITE_VOCABULARY,
    LAYER_INDICES,
    SHRUNK_LISTS,
    SHRUNK_NUMBERS,
    SPECIAL_TOKENS,
    is_special_token,
)

#: Fields that a config computes from others.
_DERIVED = frozenset(("stage_names", "out_features", "out_indices", "num_labels", "id2label", "label2id", "head_dim"))
#: Fields of models that halve the resolution several times.
_HIERARCHICAL = frozenset(("depths", "kernel_sizes", "sr_ratios", "sequence_reduction_ratios", "neck_hidden_sizes"))
#: Towers of configs that leave them out and do not name them.
_TOWERS = {
    ("embedding_gemma2", "vision_config"): "gemma4_vision",
    ("embedding_gemma2", "audio_config"): "gemma4_audio",
}
#: Models of timm, whose sizes follow from their names.
_SIZES_BY_NAME = frozenset(("timm_wrapper", "timm_backbone", "gemma3n_vision"))
_LAYERS = ("num_layers", "num_hidden_layers", "depth", "encoder_layers", "decoder_layers", "n_layer")


def shrunk_tree(config: PreTrainedConfig, special: dict[str, int] | None = None) -> dict[str, Any]:
    """Fields of a small config of the same class.

    Args:
        special: ids of special tokens by name, shared by all configs of a model; filled on the way.
    """
    special = {} if special is None else special
    if type(config).model_type in _SIZES_BY_NAME:
        return OVERRIDES.get(type(config).model_type, {})
    parts = {name: part for name in type(config).sub_configs if (part := _sub_config(config, name)) is not None}
    known = {name: value for name, value in config.to_dict().items() if name not in type(config).sub_configs}
    given: dict[str, Any] = {}
    for name, value in known.items():
        small = _small(name, value, known)
        if small is not None:
            given[name] = small
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if known.get(name):
            given[name] = COMPOSITE_VOCABULARY
    for name, value in known.items():
        if is_special_token(name, value):
            given[name] = special.setdefault(name, SPECIAL_TOKENS + len(special))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if known.get(name) is not None:
            given[name] = SHRUNK[name]
    given |= per_head(given) | per_layer(known, given)
    given |= _rotary(config, known, given)
    given |= _outputs_of_stages(config, known, given)
    given |= {name: _part(part, special) for name, part in parts.items()}
    model_type = type(config).model_type
    return _merged(_merged(given, TEXT_OVERRIDES.get(model_type, {})), OVERRIDES.get(model_type, {}))


def _sub_config(config: PreTrainedConfig, name: str) -> PreTrainedConfig | None:
    """A config inside another one; towers that the default leaves out are built all the same."""
    part = getattr(config, name, None)
    if part is None and name in ("vision_config", "audio_config"):
        known = type(config).sub_configs[name]
        model_type = getattr(known, "model_type", None)
        made = CONFIG_MAPPING[model_type] if model_type else getattr(known, "config_class", known)
        if made is AutoConfig:
            tower = _TOWERS.get((type(config).model_type, name))
            return None if tower is None else CONFIG_MAPPING[tower]()
        return made()
    return part if isinstance(part, PreTrainedConfig) else None


def _part(part: PreTrainedConfig, special: dict[str, int]) -> dict[str, Any]:
    """A config inside another one; the outer config may have set fields that are not the defaults of its class."""
    fields = {name: value for name, value in part.to_dict().items() if name not in _DERIVED}
    return fields | {"model_type": type(part).model_type} | shrunk_tree(part, special)


def _small(name: str, value: Any, known: dict[str, Any]) -> Any:
    """The value of a field in the tiny model, or `None` where the default stays."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, list | tuple):
        if name in SHRUNK_LISTS:
            return [SHRUNK_LISTS[name]] * len(value)
        if name in LAYER_INDICES:
            return [0, 1][: len(value)] if len(value) > 1 else [1]
        if name == "patch_size":
            return [min(one, 4) for one in value]
        if name == "tubelet_size":
            return [value[0], *(min(one, 4) for one in value[1:])]
        if name == "image_size":
            return [16] * len(value)
        return None
    if name == "patch_size":
        return min(value, 4)
    if name == "image_size" and isinstance(value, int):
        return 64 if _HIERARCHICAL & set(known) else 16
    if name == "embed_dim" and "depths" in known:
        return 16
    if name == "window_size" and "depths" in known:
        return 2
    small = SHRUNK.get(name, SHRUNK_NUMBERS.get(name))
    return small if isinstance(value, int) else None


def per_head(given: dict[str, Any]) -> dict[str, Any]:
    """Sizes of heads whose keys are computed from a compressed state."""
    return {"num_key_value_heads": 4, "head_dim": SHRUNK["qk_rope_head_dim"]} if "kv_lora_rank" in given else {}


def per_layer(known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """As many layers as there are kinds of them, and lists of that length."""
    lists = [name for name in PER_LAYER if isinstance(known.get(name), list | tuple)]
    kinds = {name: list(dict.fromkeys(known[name])) for name in lists}
    count = max((2, *(len(one) for one in kinds.values())))
    found: dict[str, Any] = {name: count for name in _LAYERS if name in given} if lists else {}
    for name, one in kinds.items():
        found[name] = [one[min(layer, len(one) - 1)] for layer in range(count)]
    return found


def _rotary(config: PreTrainedConfig, known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Sections of M-RoPE that add up to the smaller half of a head."""
    parameters = known.get("rope_parameters")
    if not isinstance(parameters, dict) or not _has_sections(config):
        return {}
    head = given.get("head_dim") or given.get("hidden_size", 64) // given.get("num_attention_heads", 4)
    return {"rope_parameters": _with_sections(parameters, head)}


def _has_sections(config: PreTrainedConfig) -> bool:
    """Whether the code of the model cuts the rotary dimensions into sections; the default config need not say so."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    return "vocab_size" in config.to_dict() and "mrope_section" in inspect.getsource(importlib.import_module(name))


def _with_sections(parameters: dict[str, Any], head: int) -> dict[str, Any]:
    inner = {name: one for name, one in parameters.items() if isinstance(one, dict)}
    if inner:
        return parameters | {name: _with_sections(one, head) for name, one in inner.items()}
    half = int(head * parameters.get("partial_rotary_factor", 1.0)) // 2
    rest = max(half // 4, 1)
    return parameters | {"mrope_section": [half - 2 * rest, rest, rest]}


def _outputs_of_stages(config: Any, known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The layers whose outputs a backbone returns, among those that are left."""
    if not hasattr(config, "out_indices") or not hasattr(config, "stage_names"):
        return {}
    found: dict[str, Any] = {"out_features": None, "out_indices": None}
    layers = next((name for name in ("num_hidden_layers", "num_layers", "depth") if name in given), None)
    indices = known.get("out_indices")
    if layers is not None and indices is not None and "depths" not in known:
        count = max(2, len(indices))
        return found | {layers: count, "out_indices": list(range(count - len(indices) + 1, count + 1))}
    return {"out_indices": indices, "out_features": None} if indices is not None else {}


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields with changes, those of a config inside it one by one."""
    merged = dict(fields)
    for name, value in changes.items():
        inner = merged.get(name)
        is_part = isinstance(value, dict) and isinstance(inner, dict) and "model_type" in inner
        merged[name] = _merged(inner, value) if is_part else value
    return merged
