"""Of which subjects, phases and lengths peak memory is measured, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.arguments import Options
from benchmarks.lineup import BARE, CONTROL
from benchmarks.peers import peer_names
from benchmarks.subjects import decodes

#: Beyond this length only a few subjects are measured, in a training step.
_LONG = 8192
_LONG_SUBJECTS = (BARE, "rope", "alibi", "t5")
#: At the level of attention, beside the peers.
_BESIDE_PEERS = (BARE, "rope", "alibi", "t5")


@dataclass(frozen=True)
class MemoryRequest:
    """One measurement; `peers` names the group of a peer, and is empty for schemes."""

    level: str
    subject: str
    phase: str
    length: int
    peers: tuple[str, ...] = ()


def memory_requests(options: Options) -> list[MemoryRequest]:
    """All of a run: whole models with every scheme, attention with the peers and the schemes they are compared with."""
    requests = []
    phases = [phase for phase in options.phases if not decodes(phase)]
    for length in options.memory_lengths:
        for level in options.levels:
            for phase in phases:
                requests += _of_cell(options, level, phase, length)
    return requests


def _of_cell(options: Options, level: str, phase: str, length: int) -> list[MemoryRequest]:
    names = [name for name in options.subjects_of(level) if name != CONTROL]
    if level == "attention":
        names = [name for name in names if name in _BESIDE_PEERS]
    if length > _LONG:
        if level != "model" or phase != "train":
            return []
        names = [name for name in names if name in _LONG_SUBJECTS]
    requests = [MemoryRequest(level, name, phase, length) for name in names]
    if level == "attention" and length <= _LONG:
        for group in options.peers:
            requests += [
                MemoryRequest(level, name, phase, length, (group,)) for name in peer_names(group, options.setting)
            ]
    return requests
