"""The initial tokenizer and model of a run."""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc import PositionEncodingError, patch_model, recipes
from hf_posenc.cli.catalogue import parse_layers
from hf_posenc.errors import UnknownNameError, UsageError
from hf_posenc.installation import require
from hf_posenc.loading import missing_folder
from hf_posenc.metrics.evaluation import digest
from hf_posenc.schemes.registry import as_scheme, parse_options
from training.argument_files import parse_structured
from training.arguments import LoraArguments, ModelArguments, SchemeArguments, WeightsArguments
from training.data.text import PackedRows
from training.errors import SettingsError, settings_errors
from training.swapping import HealingArguments, sample_rows

#: The `--tokenizer_name` of ByT5's bytes.
BYTES = "bytes"

#: Errors of a scheme, its options or its layers.
_SCHEME_ERRORS = (PositionEncodingError, UsageError, ValueError, TypeError)

#: Fields of a config about its origin.
_INCIDENTAL = ("_name_or_path", "transformers_version")


def load_tokenizer(arguments: ModelArguments, causal: bool) -> PreTrainedTokenizerBase:
    """Loads the tokenizer. For masked language modelling from scratch, a missing mask token is added."""
    name = arguments.tokenizer_name or arguments.model_name_or_path or arguments.config_name
    if name is None:
        raise SettingsError(
            "A model from scratch (--model_type) has no tokenizer. Give --tokenizer_name: a hub id or a "
            f"folder, or {BYTES!r} for ByT5's bytes, which need no files."
        )
    try:
        tokenizer: PreTrainedTokenizerBase = (
            ByT5Tokenizer()
            if name == BYTES
            else AutoTokenizer.from_pretrained(
                name, revision=arguments.model_revision, trust_remote_code=arguments.trust_remote_code
            )
        )
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"No tokenizer can be loaded from {name!r} ({missing_folder(name)}{error}). Give one with --tokenizer_name."
        ) from error
    if not causal and tokenizer.mask_token is None:
        if name == BYTES:
            tokenizer.mask_token = "<extra_id_0>"
        elif arguments.model_name_or_path is None:
            tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


def build_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, causal: bool, seed: int, loader: Any = None
) -> Any:
    """Returns the stock model: pretrained, or with random weights from `seed`."""
    loader = loader or (AutoModelForCausalLM if causal else AutoModelForMaskedLM)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    changes = {"vocab_size": len(tokenizer)} | {name: token for name, token in special.items() if token is not None}
    model = stock_model(arguments, loader, seed, changes)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    if getattr(model.config, "output_router_logits", False):
        raise SettingsError(
            "This model's config asks for a loss that balances its experts (output_router_logits), which this script "
            "does not add. Set output_router_logits=false."
        )
    return model


def stock_model(arguments: WeightsArguments, loader: Any, seed: int, changes: dict[str, Any], **pretrained: Any) -> Any:
    """Returns a model of an Auto class: pretrained, or with random weights from `seed`."""
    common: dict[str, Any] = {"trust_remote_code": arguments.trust_remote_code}
    if arguments.attn_implementation is not None:
        common["attn_implementation"] = arguments.attn_implementation
    set_seed(seed)
    name = arguments.model_name_or_path or arguments.config_name or str(arguments.model_type)
    try:
        if arguments.model_name_or_path is not None:
            return loader.from_pretrained(
                name, revision=arguments.model_revision, dtype=arguments.dtype, **common, **pretrained
            )
        dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        return loader.from_config(_config(arguments, changes), dtype=dtype, **common)
    except SettingsError:
        raise
    except (OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError, StrictDataclassError) as error:
        missing = missing_folder(name) if arguments.model_type is None else ""
        raise SettingsError(f"{loader.__name__} cannot build {name!r}: {missing}{error}") from error


def _config(arguments: WeightsArguments, changes: dict[str, Any]) -> Any:
    if arguments.config_name is not None:
        where = {"revision": arguments.model_revision, "trust_remote_code": arguments.trust_remote_code}
        config = AutoConfig.from_pretrained(arguments.config_name, **where)
        written, _ = type(config).get_config_dict(arguments.config_name, **where)
    elif arguments.model_type in CONFIG_MAPPING:
        config, written = CONFIG_MAPPING[arguments.model_type](), {}
    else:
        raise SettingsError(str(unknown_architecture(str(arguments.model_type))))
    overrides = _overrides(arguments.config_overrides or "")
    check_overrides(config, overrides)
    # Built again, because the config checks its fields, and computes others from them (such as the width of a head).
    return type(config).from_dict(written | changes | overrides)


def unknown_architecture(name: str) -> UnknownNameError:
    """Returns the error for a `model_type` that transformers does not have."""
    return UnknownNameError("architecture", name, CONFIG_MAPPING, listing="transformers.CONFIG_MAPPING")


def check_overrides(config: Any, overrides: dict[str, Any]) -> None:
    """Raises `SettingsError` for a field that a config does not have, with similar names."""
    for name in overrides:
        if not hasattr(config, name):
            kind = type(config).__name__
            unknown = UnknownNameError("field", name, config.to_dict(), owner=kind, listing=f"{kind}().to_dict()")
            raise SettingsError(f"--config_overrides: {unknown}")


def _overrides(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        return _mapping(text, "config_overrides")
    try:
        return parse_options(text.split(",") if text else [])
    except UsageError as error:
        raise SettingsError(f"--config_overrides: {error} If values contain commas, give a JSON mapping.") from error


def _mapping(text: str, option: str) -> dict[str, Any]:
    parsed = parse_structured(text, option)
    if not isinstance(parsed, dict):
        raise SettingsError(f"--{option} is not a mapping of options to values: {text!r}.")
    return parsed


def apply_scheme(
    model: Any, arguments: SchemeArguments, healing: HealingArguments | None = None, rows: PackedRows | None = None
) -> None:
    """Patches the model with the requested scheme. Without one, the model stays as it is."""
    if arguments.scheme is None:
        return
    with settings_errors(f"--scheme {arguments.scheme}", *_SCHEME_ERRORS):
        scheme, options = _scheme(arguments.scheme, "scheme"), _scheme_options(arguments)
        if arguments.scheme_layers is not None:
            options["layers"] = parse_layers(arguments.scheme_layers)
        if arguments.elsewhere is not None:
            options["elsewhere"] = _scheme(arguments.elsewhere, "elsewhere")
        if healing is not None and healing.swaps:
            sample = None if healing.initialization == "default" else sample_rows(rows)
            healing.swap(model, scheme, sample, options)
        else:
            patch_model(model, scheme, **options)


def check_scheme(arguments: SchemeArguments) -> None:
    """Raises for an unknown scheme or option, before text is read and a model is built, which may take long."""
    of_scheme = {name: value for name, value in _scheme_options(arguments).items() if name != "part"}
    for option, options in (("scheme", of_scheme), ("elsewhere", {})):
        text = getattr(arguments, option)
        if text is not None:
            with settings_errors(f"--{option} {text}", *_SCHEME_ERRORS):
                as_scheme(_scheme(text, option), **options)


def _scheme_options(arguments: SchemeArguments) -> dict[str, Any]:
    return _mapping(arguments.scheme_options or "{}", "scheme_options")


def _scheme(text: str, option: str) -> Any:
    return parse_structured(text, option) if text.lstrip()[:1] in ("[", "{") else text


def add_lora(model: Any, arguments: LoraArguments, causal: bool) -> Any:
    """Returns the model with LoRA matrices. All parameters of its scheme are trained as well."""
    require("--lora", "peft")
    from peft import LoraConfig, TaskType, get_peft_model

    names, patched = arguments.lora_target_modules, getattr(model, "position_encoding", None) is not None
    with settings_errors(f"--lora_target_modules {names}, --lora_r {arguments.lora_r}", ValueError):
        config = LoraConfig(
            task_type=TaskType.CAUSAL_LM if causal else None,
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules=names if names == "all-linear" else names.split(","),
            exclude_modules=r".*position_encoding.*" if patched else None,
        )
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return recipes.add_lora(model, config) if patched else get_peft_model(model, config)


def weights_digest(model: Any) -> str:
    """Returns a digest of a model's config and all of its weights."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _INCIDENTAL}
    weights = itertools.chain.from_iterable(model.state_dict().items())
    return digest(json.dumps(config, sort_keys=True, default=str), *weights)
