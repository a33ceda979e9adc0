"""What parts state about their methods, for faster ways to compute the same, and what becomes of it in subclasses."""

from __future__ import annotations

import itertools

#: The methods of a map of queries and keys.
MAP_METHODS = ("phases", "prepared", "map_query", "map_key")
#: What a part states about its methods, for faster ways to compute the same. A class that overrides one of these
#: methods has inherited a statement about another one, so it gets the neutral value unless it makes its own.
_STATEMENTS = {
    **dict.fromkeys(("separable", "rotates_heads", "other_heads", "zero_below", "factor_of_all"), ("forward",)),
    **dict.fromkeys(("reads_content", "reads_later_keys", "whole_heads"), ("forward",)),
    **dict.fromkeys(("keeps_distances", "last_position"), ("forward", "renumber")),
    **dict.fromkeys(("angles_stay", "angles_of_own_token"), ("rotated", "angles", "places")),
    "turns_by_frequencies": (*MAP_METHODS, "angles", "attention_factor", "for_both_of_pair"),
}
#: The methods that parts state something about.
STATED_METHODS = frozenset(itertools.chain(MAP_METHODS, *_STATEMENTS.values()))


def overrides(kind: type, method: str, statement: str) -> bool:
    """Whether a class has another method than the class that it has `statement` from.

    A statement of a class in which the method is abstract is about the methods of all subclasses.
    """
    stated = next(getattr(one, method, None) for one in kind.__mro__ if statement in vars(one))
    names = getattr(getattr(stated, "__code__", None), "co_names", ())
    return stated not in (None, getattr(kind, method, None)) and "NotImplementedError" not in names


def withdraw_statements(kind: type) -> None:
    """Gives the statements of a class about methods that it overrides their neutral values."""
    for statement, methods in _STATEMENTS.items():
        makers = [vars(one)[statement] for one in kind.__mro__ if statement in vars(one)]
        if makers and any(overrides(kind, method, statement) for method in methods):
            setattr(kind, statement, makers[-1])


def symmetric_by_methods(kind: type) -> bool:
    """False for a map that overrides one of `map_query` and `map_key`, and not what was stated about both."""
    names = ("map_query", "map_key", "symmetric")
    query, key, stated = (next(i for i, one in enumerate(kind.__mro__) if name in vars(one)) for name in names)
    return query == key or min(query, key) >= stated
