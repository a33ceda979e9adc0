"""Where the time of one scheme goes: torch's profiler over a patched model and over the bare one.

python -m benchmarks.profile_scheme t5 --length 2048 --phase train
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import length_of, scheme_name
from benchmarks.errors import BenchmarkError
from benchmarks.lineup import BARE, DECODERS, LEVELS, SMOLLM2_LEVEL, build_lineup
from benchmarks.machine import DTYPES, check_device, synchronize
from benchmarks.subjects import PHASES, Setting, Subject
from hf_posenc.report.tables import format_table


@dataclass(frozen=True)
class Operator:
    """Self time of one operator of torch, in milliseconds per call of the model, and how often it ran in one."""

    milliseconds: float
    count: float


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 if the scheme cannot be run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_scheme",
        description="Operators of a patched model beside those of the bare one.",
    )
    parser.add_argument("scheme", type=scheme_name)
    parser.add_argument("--length", type=length_of, default=2048, help="tokens")
    parser.add_argument("--phase", choices=PHASES, default="train")
    parser.add_argument("--level", choices=(*LEVELS, SMOLLM2_LEVEL), default="model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--calls", type=int, default=3, help="of each model, in turn")
    parser.add_argument("--rows", type=int, default=20, help="operators that are shown")
    found = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if found.phase == "decode" and found.level not in DECODERS:
        parser.error(f"only these levels decode, for others have no cache: {', '.join(DECODERS)}")
    if found.calls < 1:
        parser.error("--calls has to be at least 1")
    try:
        check_device(found.device)
    except BenchmarkError as error:
        parser.error(str(error))
    try:
        setting = Setting(device=found.device, dtype=found.dtype)
        lineup = build_lineup(found.level, (BARE, found.scheme), (), found.length, setting)
        if found.scheme in lineup.left_out:
            raise BenchmarkError(lineup.left_out[found.scheme])
    except BenchmarkError as error:
        print(f"profile_scheme: {error}", file=sys.stderr)
        return 2
    totals = [operators(one, found.phase, found.length, found.calls, found.device) for one in lineup.subjects]
    print(f"{found.scheme}, {found.phase}, {found.length} tokens; milliseconds of self time in one call")
    print(profile_table(totals[0], totals[1], found.scheme, found.rows))
    return 0


def operators(subject: Subject, phase: str, length: int, calls: int, device: str) -> dict[str, Operator]:
    """Self time of every operator, by name; on CUDA that of its kernels."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with subject.ready(phase, length) as call:
        call.once()
        with profile(activities=activities) as profiled:
            for _ in range(calls):
                call.once()
            synchronize(device)
    which = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return {
        event.key: Operator(getattr(event, which) / 1e3 / calls, event.count / calls)
        for event in profiled.key_averages()
    }


def profile_table(bare: dict[str, Operator], patched: dict[str, Operator], name: str, rows: int) -> str:
    """Operators by what the scheme adds to them, and the share of the whole that is position.

    Args:
        bare: of the model without position.
        patched: of the model with it.
        name: of the scheme.
        rows: operators that are shown.
    """
    none = Operator(0.0, 0.0)
    both = {key: (patched.get(key, none), bare.get(key, none)) for key in {*bare, *patched}}
    order = sorted(both, key=lambda key: both[key][1].milliseconds - both[key][0].milliseconds)
    lines = []
    for key in order[:rows]:
        mine, other = both[key]
        times = (mine.milliseconds, other.milliseconds, mine.milliseconds - other.milliseconds)
        lines.append([key, *(f"{one:.3f}" for one in times), f"{mine.count:.0f}", f"{other.count:.0f}"])
    total, floor = (sum(one.milliseconds for one in found.values()) for found in (patched, bare))
    lines.append(["all", f"{total:.3f}", f"{floor:.3f}", f"{total - floor:.3f}", "", ""])
    table = format_table(["operator", name, "bare", "more", "runs", "bare runs"], lines)
    return f"{table}\nposition is {1 - floor / total:.1%} of the time of {name}" if total else "nothing was measured"


if __name__ == "__main__":
    sys.exit(main())
