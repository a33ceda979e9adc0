"""Tests of others that a patched model fails for a reason that is right, or not this package's. Each has its reason."""

from __future__ import annotations

import re

#: Arms, a pattern of the test's name, a pattern of its error, and the reason. The first that fits counts.
ACCEPTED: list[tuple[str, str, str, str]] = [
    (
        "alibi t5",
        "test_batching_equivalence",
        "Batched and Single",
        "outputs at padding tokens differ, because their positions depend on the batch; no other token reads them",
    ),
]


def reason(arm: str, test: str, error: str) -> str | None:
    """Why a difference is accepted; `None` if it is not."""
    for arms, name, message, why in ACCEPTED:
        if arm in arms.split() and re.search(name, test) and re.search(message, error):
            return why
    return None
