"""Peak memory: every subject, phase and length in a process of its own.

The peak of a process never falls, and what one subject has freed the next one finds. So each measurement starts a fresh
process, runs a short call once so that what is allocated only once does not count, and then the one that is measured.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.arguments import Options
from benchmarks.errors import BenchmarkError
from benchmarks.lineup import BARE, CONTROL, build_lineup
from benchmarks.machine import check_device, peak_bytes, reset_peak, resident_bytes, synchronize, within_free_memory
from benchmarks.peers import peer_names
from benchmarks.subjects import Setting, Sizes, decodes

_WARM_UP_TOKENS = 64


def peak_memory(
    level: str, subject: str, phase: str, length: int, setting: Setting, *, peers: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Measures one call in a fresh process.

    Args:
        level: one of `LEVELS`.
        subject: the name of a scheme, of a reference or, with its group in `peers`, of a peer.
        phase: one of `PHASES`.
        length: tokens.
        setting: of the run.
        peers: groups of peers.

    Returns:
        `before_bytes` the process held before the call, `phase_bytes` by which the peak during it was higher,
        `total_bytes` the sum, and `seconds` of this one call; or the `reason` why there is none of it.
    """
    request = {
        "level": level,
        "subject": subject,
        "phase": phase,
        "length": length,
        "peers": peers,
        "setting": asdict(setting),
    }
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps(request)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return json.loads(ended.stdout.splitlines()[-1])
    if ended.returncode < 0:
        return {"reason": f"the process was ended by signal {-ended.returncode}, probably for want of memory"}
    lines = ended.stderr.strip().splitlines() or ["no message"]
    return {"reason": lines[-1][:300]}


def measure_here(request: dict[str, Any]) -> dict[str, Any]:
    """What the fresh process does.

    Raises:
        BenchmarkError: if there is no such subject.
    """
    described = dict(request["setting"])
    sizes = {name: Sizes(**described[name]) for name in ("sizes", "smollm2") if name in described}
    setting = Setting(**described | sizes)
    device, phase, length = setting.device, request["phase"], request["length"]
    check_device(device)
    name, peers = request["subject"], request["peers"]
    lineup = build_lineup(request["level"], () if peers else (name,), peers, length, setting)
    found = [subject for subject in lineup.subjects if subject.name == name]
    if not found:
        raise BenchmarkError(lineup.left_out.get(name, f"there is no subject {name!r}"))
    subject = found[0]
    del lineup, found
    with subject.ready(phase, min(length, _WARM_UP_TOKENS)) as call:
        call.once()
    gc.collect()
    synchronize(device)
    before = resident_bytes(device)
    reset_peak(device)
    # What a subject builds once, such as a mask, is part of what it takes.
    with within_free_memory(device), subject.ready(phase, length) as call:
        start = time.perf_counter()
        call.run()
        synchronize(device)
        seconds = time.perf_counter() - start
        peak = peak_bytes(device)
    return {
        "before_bytes": before,
        "phase_bytes": peak - before,
        "total_bytes": peak,
        "seconds": round(seconds, 3),
    }


def main(arguments: list[str]) -> int:
    """Measures what the one argument, a JSON object, asks for, and prints the result as JSON."""
    try:
        result = measure_here(json.loads(arguments[0]))
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    # Torch has no class of its own for want of memory on a CPU.
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        print(f"does not fit into the memory that is free: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
