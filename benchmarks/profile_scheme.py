"""Shows where the time of a scheme goes, with torch's profiler on a patched model and on the bare model.

python -m benchmarks.profile_scheme t5 --length 2048 --phase train
"""

from __future__ import annotations

import argparse
import sys

from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import add_device, length_of, parse_with_device, scheme_name, whole_number
from benchmarks.levels import DECODERS, DEFAULT_LEVELS, SMOLLM2_LEVEL
from benchmarks.lineup import build_lineup
from benchmarks.machine import synchronize
from benchmarks.subjects import BARE, PHASES, Setting, Subject
from hf_posenc.report.tables import format_table


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 if the scheme cannot be run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_scheme",
        description="Compare the operators of a patched model with those of the bare model.",
    )
    parser.add_argument("scheme", type=scheme_name)
    parser.add_argument("--length", type=length_of, default=2048, help="tokens")
    parser.add_argument("--phase", choices=PHASES, default="train")
    parser.add_argument("--level", choices=(*DEFAULT_LEVELS, SMOLLM2_LEVEL), default="model")
    add_device(parser)
    parser.add_argument("--calls", type=whole_number(1), default=3, help="calls of each model, alternating")
    parser.add_argument("--rows", type=int, default=20, help="number of operators to show")
    options = parse_with_device(parser, arguments)
    if options.phase == "decode" and options.level not in DECODERS:
        parser.error(f"only these levels can decode, because others have no cache: {', '.join(DECODERS)}")
    setting = Setting(device=options.device, dtype=options.dtype)
    subjects, left_out = build_lineup(options.level, (BARE, options.scheme), (), options.length, setting)
    if options.scheme in left_out:
        print(f"profile_scheme: {left_out[options.scheme]}", file=sys.stderr)
        return 2
    bare, patched = (
        operators(subject, options.phase, options.length, options.calls, options.device) for subject in subjects
    )
    none = (0.0, 0.0)
    both = {name: (*patched.get(name, none), *bare.get(name, none)) for name in sorted({*bare, *patched})}
    order = sorted(both, key=lambda name: both[name][2] - both[name][0])[: options.rows]
    mine, runs, floor, bare_runs = (sum(column) for column in zip(*both.values(), strict=True))
    both["all"] = mine, runs, floor, bare_runs
    rows = []
    for name in (*order, "all"):
        times = (both[name][0], both[name][2], both[name][0] - both[name][2])
        rows.append((name, *(f"{time:.3f}" for time in times), f"{both[name][1]:.0f}", f"{both[name][3]:.0f}"))
    print(f"{options.scheme}, {options.phase}, {options.length} tokens; milliseconds of self time in one call")
    print(format_table(["operator", options.scheme, "bare", "more", "runs", "bare runs"], rows))
    print(f"position is {1 - floor / mine:.1%} of the time of {options.scheme}")
    return 0


def operators(subject: Subject, phase: str, length: int, calls: int, device: str) -> dict[str, tuple[float, float]]:
    """Returns milliseconds of self time and runs of every operator in one call, by name; on CUDA, of the kernels."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with subject.ready(phase, length) as call:
        call.once()
        with profile(activities=activities) as profiled:
            for _ in range(calls):
                call.once()
            synchronize(device)
    which = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return {event.key: (getattr(event, which) / 1e3 / calls, event.count / calls) for event in profiled.key_averages()}


if __name__ == "__main__":
    sys.exit(main())
