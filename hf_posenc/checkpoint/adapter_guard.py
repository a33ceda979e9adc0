"""A PEFT config that was read from a marked adapter remembers the scheme, also where it is used without the adapter.

The config and the weights of an adapter can be loaded apart, with functions that never see the folder. What they share
is that adapter layers are made from the config, so that is where the model is checked.
"""

from __future__ import annotations

from typing import Any

from hf_posenc.errors import UnsupportedError

#: Set on the instance. It is no field of the dataclass, so it is neither saved nor passed on by `to_dict`.
_SCHEME = "_hf_posenc_scheme"


def remember(config: Any, scheme: dict[str, Any]) -> None:
    """Tells a config the scheme its adapter was trained with; an empty one if the adapter does not name it."""
    setattr(config, _SCHEME, scheme)


def check_scheme(model: Any, config: Any) -> None:
    """Compares the scheme that a PEFT config remembers with that of the model its adapter is put into.

    Args:
        model: a transformers model, a PEFT model around one, or a module that holds one.
        config: a PEFT config; one that was not read from a marked adapter fits every model.

    Raises:
        UnsupportedError: if the model has its stock positions, or another scheme.
    """
    scheme = getattr(config, _SCHEME, None)
    if scheme is None:
        return
    from hf_posenc.patching.place.in_force import encodings
    from hf_posenc.schemes import scheme_from_dict

    expected = scheme_from_dict(scheme) if scheme else None
    found = [encoding.config for encoding in encodings(model)]
    if found and expected in (None, *found):
        return
    trained = "a position encoding" if expected is None else f"the position encoding {expected!r}"
    kind, present = type(config).__name__, repr(found[0]) if found else "its stock positions"
    raise UnsupportedError(
        f"This {kind} was read from an adapter that was trained with {trained}, and this {type(model).__name__} has "
        f"{present}. The adapter cannot work with other positions than its own. "
        "Load the adapter with PeftModel.from_pretrained(model, folder) or hf_posenc.load_position_adapter(model, "
        "folder), which place the scheme, or call patch_model with it first. To train a new adapter with the same "
        f"settings, make a config of its own: {kind}(**config.to_dict())."
    )


def check_swap(model: Any, config: Any) -> None:
    """Checks the weights of an adapter that are put in the place of another's, where only the config is at hand.

    Raises:
        UnsupportedError: as `check_scheme`; also if the scheme has parameters, which cannot be compared.
    """
    check_scheme(model, config)
    if getattr(config, _SCHEME, None) is None:
        return
    from hf_posenc.patching.place.in_force import encodings

    if any(next(encoding.parameters(), None) is not None for encoding in encodings(model)):
        raise UnsupportedError(
            "The scheme of this model has parameters, and those that the new adapter was trained with are not among "
            "the weights given here. Call peft.utils.hotswap.hotswap_adapter(model, folder, name), which hf_posenc "
            "extends to compare them."
        )
