"""Other ways to the same attention, by group.

Every peer maps `(batch, length, hidden)` to the same shape; its projections are replaced by copies, as in the reduced
Llama that the schemes run in. Each is measured against the same code without position, and all against the bare Llama.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from benchmarks.kernel_peers import flash, flex, kernel, masks, position_bias
from benchmarks.module_peers import bloom, mpt, t5, x_transformers
from benchmarks.subjects import Setting, Subject

PEER_GROUPS: dict[str, Callable[[Setting], list[Subject]]] = {
    "kernel": kernel,
    "mask": masks,
    "position_bias": position_bias,
    "bloom": bloom,
    "mpt": mpt,
    "t5": t5,
    "x_transformers": x_transformers,
    "flex": flex,
    "flash": flash,
}
#: The package that a group needs, what to call the group, and what to do where it is missing.
_PACKAGES = {
    "x_transformers": ("x_transformers", "x-transformers", "pip install -c constraints.txt -e '.[bench]'"),
    "flash": ("flash_attn", "FlashAttention", "it needs a GPU and pip install flash-attn"),
}


def peer_subjects(groups: Sequence[str], setting: Setting) -> tuple[list[Subject], dict[str, str]]:
    """The subjects of some groups of `PEER_GROUPS`, and the reasons why others are missing, by name."""
    subjects: list[Subject] = []
    missing: dict[str, str] = {}
    for group in groups:
        package, name, remedy = _PACKAGES.get(group, ("", "", ""))
        if package and importlib.util.find_spec(package) is None:
            missing[name] = f"not installed: {remedy}"
            continue
        if group == "flash" and setting.dtype == "float32":
            missing[name] = "its kernel takes half precision only: --dtype bfloat16"
            continue
        subjects += PEER_GROUPS[group](setting)
    return subjects, missing


def peer_names(group: str, setting: Setting) -> list[str]:
    """The subjects of one of `PEER_GROUPS`; none where its package is not installed."""
    return [subject.name for subject in peer_subjects([group], setting)[0]]
