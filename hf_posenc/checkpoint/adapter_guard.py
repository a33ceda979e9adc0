"""Checks of PEFT configs: a config that was read from a marked adapter keeps the adapter's scheme.

The config and the weights of an adapter can be loaded separately, with functions that do not get the folder. All of
these functions create adapter layers from the config, so the model is checked there. So is what the config would train.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.errors import UnsupportedError

#: Set on the instance. It is not a dataclass field, so it is not saved and not included in `to_dict`.
_SCHEME = "_hf_posenc_scheme"


def remember(config: Any, scheme: dict[str, Any]) -> None:
    """Stores the scheme of an adapter in its config; an empty one if the adapter does not name a scheme."""
    setattr(config, _SCHEME, scheme)


def check_scheme(model: Any, config: Any) -> None:
    """Compares the scheme stored in a PEFT config with the scheme of the model that gets the adapter.

    Args:
        model: a transformers model, a PEFT model around one, or a module that holds one.
        config: a PEFT config. A config that was not read from a marked adapter is valid for every model.

    Raises:
        UnsupportedError: if the model has its stock positions, or another scheme.
    """
    scheme = getattr(config, _SCHEME, None)
    if scheme is None:
        return
    from hf_posenc.patching.place.encoding import encodings
    from hf_posenc.schemes import scheme_from_dict

    expected = scheme_from_dict(scheme) if scheme else None
    found = [encoding.config for encoding in encodings(model)]
    if found and expected in (None, *found):
        return
    trained = "a position encoding" if expected is None else f"the position encoding {expected!r}"
    kind, present = type(config).__name__, repr(found[0]) if found else "its stock positions"
    raise UnsupportedError(
        f"This {kind} was read from an adapter that was trained with {trained}, but this {type(model).__name__} has "
        f"{present}. The adapter only works with the positions it was trained with. Load the adapter with "
        "PeftModel.from_pretrained(model, folder) or hf_posenc.load_position_adapter(model, folder), which apply the "
        "scheme, or call patch_model with the scheme first. To train a new adapter with the same settings, create a "
        f"new config: {kind}(**config.to_dict())."
    )


def check_targets(model: Any, config: Any) -> None:
    """Refuses a PEFT config that would train native weights without effect, or wrap parts of a scheme.

    Linear layers among them that `target_modules="all-linear"` would include are excluded in the config.

    Args:
        model: the model that gets the adapter.
        config: a PEFT config.

    Raises:
        UnsupportedError: naming the module, and what to do.
    """
    from hf_posenc.patching.place.encoding import encodings

    found = encodings(model)
    if not found:
        return
    changes = [change for encoding in found for change in encoding.record.journal.changes if change.kind == "frozen"]
    unused = {(id(change.target), change.attribute) for change in changes}
    inside = {id(module) for encoding in found for module in encoding.modules()}
    kind, scheme = type(config).__name__, found[0].config.name
    for path, module in model.named_modules():
        names = {name for name, _ in module.named_parameters(recurse=False)}
        without_effect = {name for name in names if (id(module), name) in unused}
        if id(module) not in inside and not without_effect:
            continue
        whole = id(module) in inside or (without_effect == names and not module._modules)
        field = next(_fields(config, path, module, without_effect or names, whole), None)
        if field is None:
            continue
        if id(module) in inside:
            raise UnsupportedError(
                f"{field} of this {kind} names {path}, a part of the scheme {scheme!r}, which PEFT cannot save. The "
                f"scheme is saved next to every adapter. Leave it out of {field}; to train the scheme too, use "
                f"hf_posenc.recipes.add_lora(model, config), or set requires_grad on the parameters of "
                f"model.{ATTRIBUTE} after get_peft_model."
            )
        raise UnsupportedError(
            f"{field} of this {kind} names {path}, which has no effect in this model: the scheme {scheme!r} takes its "
            f"place, and training it would change nothing. Give {field} names that do not select it. The scheme is "
            "trained by hf_posenc.recipes.add_lora(model, config); native positions, after unpatch_model(model)."
        )


def _fields(config: Any, path: str, module: Any, parameters: set[str], whole: bool) -> Iterator[str]:
    """The fields of a PEFT config that select a module, or some of its parameters. PEFT decides what a name selects."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    names = [f"{path}.{name}" for name in parameters]
    if any(
        f".{name}".endswith(f".{one}") for name in names for one in getattr(config, "target_parameters", None) or ()
    ):
        yield "target_parameters"
    if not whole:
        return
    for field in ("modules_to_save", "trainable_token_indices"):
        chosen = getattr(config, field, None) or ()
        if not isinstance(chosen, str) and any(isinstance(one, str) and path.endswith(one) for one in chosen):
            yield field
    targets = getattr(config, "target_modules", None)
    if not targets:
        return
    if targets == "all-linear":
        excluded = getattr(config, "exclude_modules", None) or ()
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(excluded, str) and path not in excluded:
            config.exclude_modules = [*excluded, path]
        return
    decides = getattr(PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type), "_check_target_module_exists", None)
    if decides is not None and decides(config, path):
        yield "target_modules"


def check_swap(model: Any, config: Any) -> None:
    """Checks an adapter whose weights replace those of another adapter, if only its config is available.

    Raises:
        UnsupportedError: as `check_scheme`, and if the scheme has parameters, because they cannot be compared.
    """
    check_scheme(model, config)
    if getattr(config, _SCHEME, None) is None:
        return
    from hf_posenc.patching.place.encoding import encodings

    if any(next(encoding.parameters(), None) is not None for encoding in encodings(model)):
        raise UnsupportedError(
            "The scheme of this model has parameters, but the given weights do not include the parameters that the "
            "new adapter was trained with. Call peft.utils.hotswap.hotswap_adapter(model, folder, name), which "
            "hf_posenc extends to compare them."
        )


def check_second(model: Any, name: str) -> None:
    """Checks that the scheme does not change under an adapter that is added to others.

    Args:
        model: a PEFT model.
        name: of the new adapter.

    Raises:
        UnsupportedError: if parameters of the scheme are trained, because the adapters of a model share them.
    """
    others = [other for other in getattr(model, "peft_config", ()) if other != name]
    if not others:
        return
    from hf_posenc.patching.place.encoding import encodings

    for encoding in encodings(model):
        if any(parameter.requires_grad for parameter in encoding.parameters()):
            raise UnsupportedError(
                f"The parameters of the scheme {encoding.config.name!r} are being trained, and all adapters of a model "
                f"share them: training {others[0]!r} would change the new adapter {name!r} too. If a trainer of TRL "
                "adds it as its reference model, pass the trainer "
                "ref_model=AutoModelForCausalLM.from_pretrained(model.config._name_or_path) instead. Otherwise freeze "
                "the scheme first: model.get_base_model().position_encoding.requires_grad_(False)."
            )
