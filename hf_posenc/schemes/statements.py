"""What parts state about their methods, for faster ways to compute the same, and what becomes of it in subclasses."""

from __future__ import annotations

import itertools
from typing import Any

from hf_posenc.errors import warn_user

#: The methods of a map of queries and keys.
MAP_METHODS = ("phases", "prepared", "map_query", "map_key")
#: What a part states about its methods, for faster ways to compute the same. A class that overrides one of these
#: methods has inherited a statement about another one, so it gets the neutral value unless it makes its own.
_STATEMENTS = {
    **dict.fromkeys(("separable", "rotates_heads", "other_heads", "zero_below", "factor_of_all"), ("forward",)),
    **dict.fromkeys(("reads_content", "reads_later_keys", "whole_heads"), ("forward",)),
    **dict.fromkeys(("keeps_distances", "last_position"), ("forward", "renumber")),
    **dict.fromkeys(("angles_stay", "angles_of_own_token"), ("rotated", "angles", "places")),
    "reads_magnitude": ("map_query", "map_key"),
    "turns_by_frequencies": (*MAP_METHODS, "angles", "attention_factor", "for_both_of_pair"),
}
#: The methods that parts state something about.
STATED_METHODS = frozenset(itertools.chain(MAP_METHODS, *_STATEMENTS.values()))


def overrides(kind: type, method: str, statement: str) -> bool:
    """Whether a class has another method than the class that it has `statement` from.

    A statement of a class in which the method is abstract is about the methods of all subclasses.
    """
    stated = next(getattr(base, method, None) for base in kind.__mro__ if statement in vars(base))
    names = getattr(getattr(stated, "__code__", None), "co_names", ())
    return stated not in (None, getattr(kind, method, None)) and "NotImplementedError" not in names


def withdraw_statements(kind: type) -> None:
    """Gives the statements of a class about methods that it overrides their neutral values."""
    for statement, methods in _STATEMENTS.items():
        makers = [vars(base)[statement] for base in kind.__mro__ if statement in vars(base)]
        if makers and any(overrides(kind, method, statement) for method in methods):
            setattr(kind, statement, makers[-1])


def symmetric_by_methods(kind: type) -> bool:
    """False for a map that overrides one of `map_query` and `map_key`, and not what was stated about both."""
    names = ("map_query", "map_key", "symmetric")
    query, key, stated = (next(i for i, base in enumerate(kind.__mro__) if name in vars(base)) for name in names)
    return query == key or min(query, key) >= stated


def overlooked(part: Any) -> str:
    """Describes what was set on a part, not on its class, and would be ignored by faster ways; empty if nothing was.

    Warns about hooks that are not called.
    """
    kind, attributes = type(part), vars(part)
    # Accelerate sets a `forward` that calls the original one, and leaves a bound method.
    known = "_old_forward" in attributes or attributes.get("forward") == kind.forward.__get__(part)
    if methods := STATED_METHODS.intersection(attributes) - ({"forward"} if known else set()):
        return (
            f"A {kind.__name__} has its own {min(methods)!r}, set on the object and not on its class. Faster ways to "
            f"compute it would ignore this. Define the method in a subclass of {kind.__name__}."
        )
    if not any(getattr(part, name, None) for name in ("map_query", "separable", "rotates_heads", "num_features")):
        return ""
    hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    for hook in hooks:
        if type(hook).__module__.startswith("torch.nn.utils."):
            return (
                f"{type(hook).__name__} computes a weight of a {kind.__name__} in a hook before its forward, but other "
                "methods of this part read its weights, too, and would read an outdated value. Remove the hook "
                "(prune.remove, remove_weight_norm), and use torch.nn.utils.parametrize or parametrizations."
            )
    if hooks:
        warn_user(
            f"A hook of a {kind.__name__} is not always called, because this part is also used through methods other "
            f"than forward. To change what it computes, define the methods in a subclass of {kind.__name__}."
        )
    return ""
