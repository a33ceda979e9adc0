"""Peak memory of every subject, phase and length, each in a separate process.

The peak of a process never falls, and a subject reuses memory that another one has freed. So each measurement starts a
new process. It first runs a short call, so that memory that is allocated only once does not count.
"""

from __future__ import annotations

import gc
import multiprocessing
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from benchmarks.arguments import subjects_of
from benchmarks.errors import BenchmarkError
from benchmarks.lineup import CONTROL, build_lineup
from benchmarks.machine import peak_bytes, reset_peak, resident_bytes, synchronize, within_free_memory
from benchmarks.peers import peer_subjects
from benchmarks.subjects import BARE, DECODING, Setting
from benchmarks.timing import reason_of, timed

_WARM_UP_TOKENS = 64
#: Above this length, only a few subjects are measured, in a training step.
_LONG = 8192
#: The subjects above that length, and those that are measured with the peers in one attention call.
_FEW = (BARE, "rope", "alibi", "t5")


def memory_requests(options: Namespace) -> list[dict[str, Any]]:
    """Returns `level`, `phase`, `length`, `subject` and, for a peer, `peers` (its group) of each measurement of a run.

    Whole models are measured with every scheme, attention with the peers and the schemes they are compared with.
    """
    requests = []
    for length in sorted(set(options.memory_lengths)):
        for level in options.levels:
            for phase in options.phases:
                long = length > _LONG
                if phase in DECODING or (long and (level, phase) != ("model", "train")):
                    continue
                few = long or level == "attention"
                at = {"level": level, "phase": phase, "length": length}
                names = [
                    label for label in subjects_of(options, level) if label in _FEW or not (few or label == CONTROL)
                ]
                requests += [at | {"subject": name, "peers": []} for name in names]
                for group in options.peers if level == "attention" else ():
                    subjects, _ = peer_subjects([group], options.setting)
                    requests += [at | {"subject": subject.name, "peers": [group]} for subject in subjects]
    return requests


def peak_memory(request: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Measures one call in a new process. Returns the memory before it (`before_bytes`), the increase to the peak
    (`phase_bytes`), their sum (`total_bytes`) and its `seconds`; or the `reason` why it was not measured.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure_here, request, setting).result()
        except BrokenProcessPool:
            return {"reason": "the process was killed, probably because it ran out of memory"}
        # Any error is recorded in the results, and the run continues.
        except Exception as error:
            return {"reason": reason_of(error)[0]}


def measure_here(request: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Measures one call in this process, which must be new."""
    device, phase, length = setting.device, request["phase"], request["length"]
    name, peers = request["subject"], request["peers"]
    subjects, left_out = build_lineup(request["level"], () if peers else (name,), peers, length, setting)
    subject = next((candidate for candidate in subjects if candidate.name == name), None)
    if subject is None:
        raise BenchmarkError(left_out.get(name, f"there is no subject {name!r}"))
    del subjects
    with subject.ready(phase, min(length, _WARM_UP_TOKENS)) as call:
        call.once()
    gc.collect()
    synchronize(device)
    before = resident_bytes(device)
    reset_peak(device)
    # Memory for things that a subject builds once, such as a mask, counts.
    with within_free_memory(device), subject.ready(phase, length) as call:
        seconds = timed(call, device)
        peak = peak_bytes(device)
    return {
        "before_bytes": before, "phase_bytes": peak - before, "total_bytes": peak, "seconds": round(seconds, 3)
    }  # fmt: skip
