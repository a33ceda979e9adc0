"""The argument `position_encoding` of `from_pretrained` and `from_config`: a scheme that is placed in the new model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.errors import UnknownNameError, UnsupportedError
from hf_posenc.wrapping import Call

if TYPE_CHECKING:
    from hf_posenc.schemes.scheme import SchemeConfig

#: Its name while a config is read that has an attribute `position_encoding`, to which transformers would assign it.
SET_ASIDE = "_requested_position_encoding"
_PLACES = ("part", "layers", "elsewhere")


def with_requested_scheme(call: Call, build: Callable[[Call], Any]) -> Any:
    """Builds a model, and patches it with the scheme that the call asks for.

    Args:
        call: of `from_pretrained` or `_from_config`.
        build: returns the model, or a tuple that begins with it, for the call without this argument.

    Raises:
        UnknownNameError, ValueError, TypeError, UsageError: for what is not a scheme, before anything is loaded.
        UnsupportedError: as `patch_model`, and if the folder is an adapter that was trained with another scheme.
    """
    names = [name for name in (ATTRIBUTE, SET_ASIDE) if name in call.kwargs]
    if not names or _knows_the_argument(call["cls"]):
        return build(call)
    requested = next((call.kwargs[name] for name in names if call.kwargs[name] is not None), None)
    plain = Call(
        call.original,
        call.signature,
        call.args,
        {name: value for name, value in call.kwargs.items() if name not in names},
    )
    if requested is None:
        return build(plain)
    from hf_posenc.patching.patch import patch_model
    from hf_posenc.patching.place.encoding import current_encoding

    config, places = read_request(requested)
    built = build(plain)
    model = built[0] if isinstance(built, tuple) else built
    before = current_encoding(model)
    patch_model(model, config, **places)
    if getattr(model, "_hf_peft_config_loaded", False):
        _check_adapter(model, before, call.arguments.get("pretrained_model_name_or_path"))
    return built


def read_request(requested: Any) -> tuple[SchemeConfig, dict[str, Any]]:
    """The scheme that a value of the argument asks for, and the other arguments of `patch_model` in it.

    Raises:
        UnknownNameError, ValueError, TypeError, UsageError: for what is not a scheme.
    """
    from hf_posenc.schemes import as_scheme
    from hf_posenc.schemes.written import parse_scheme

    if isinstance(requested, str) and ":" in requested:
        return parse_scheme(requested), {}
    try:
        scheme, places = _split(requested)
        return as_scheme(scheme), places
    except UnknownNameError as error:
        if isinstance(requested, Mapping):
            error.add_note(f"Beside the scheme and its options, the dictionary takes {', '.join(map(repr, _PLACES))}.")
        raise


def _check_adapter(model: Any, before: Any, source: Any) -> None:
    """Refuses a scheme with which the adapter that transformers has loaded was not trained.

    Warns if the adapter names no scheme, as where it is loaded into a patched model.
    """
    from hf_posenc.checkpoint.peft_hooks import warn_about_no_scheme

    if before is None:
        warn_about_no_scheme(model, source)
    elif before.config != model.position_encoding.config:
        raise UnsupportedError(
            f"The adapter in {source} was trained with the scheme {before.config.name!r}, so it does not suit "
            f"{ATTRIBUTE}={model.position_encoding.config.name!r}. Leave out {ATTRIBUTE}, or load the base model of "
            "the adapter with it and train a new adapter."
        )


def _knows_the_argument(model_class: Any) -> bool:
    """Whether a model class of another project, or its config, has an argument of this name."""
    owners = (model_class, model_class.config_class)
    return any(owner is not None and ATTRIBUTE in inspect.signature(owner).parameters for owner in owners)


def _split(requested: Any) -> tuple[Any, dict[str, Any]]:
    """The scheme, and the arguments of `patch_model` that stand in the same dictionary."""
    from hf_posenc.schemes.registry import get_scheme

    if not isinstance(requested, Mapping) or "scheme" not in requested:
        return requested, {}
    scheme = requested["scheme"]
    if not isinstance(scheme, str) and requested.keys() <= {"scheme", *_PLACES}:
        return scheme, {name: value for name, value in requested.items() if name != "scheme"}
    options = {field.name for field in dataclasses.fields(get_scheme(scheme))} if isinstance(scheme, str) else set()
    places = {name: requested[name] for name in _PLACES if name in requested and name not in options}
    return {name: value for name, value in requested.items() if name not in places}, places
