"""Finds where blocks become faster than one matrix of a bias, for `hf_posenc.attention.blockwise.SIZES`.

    python -m benchmarks.blocks --device cuda --dtype bfloat16

Each length runs with the blocks for a CPU, with the larger blocks for an accelerator, and with one matrix.
"""

from __future__ import annotations

import argparse
from unittest import mock

from benchmarks.arguments import add_device, length_of, parse_with_device
from benchmarks.levels import Sizes
from benchmarks.lineup import base_model, place
from benchmarks.machine import describe_machine, machine_line, peak_bytes, reset_peak, resident_bytes
from benchmarks.subjects import STOCK, LanguageModel, Setting
from benchmarks.timing import timed
from hf_posenc.attention import blockwise
from hf_posenc.report.tables import format_table

_CPU, _ACCELERATOR = blockwise.SIZES[True], blockwise.SIZES[False]
WAYS = {
    "small blocks": _CPU._replace(short_pairs=0),
    "large blocks": _ACCELERATOR._replace(short_pairs=0, shared_numbers=0),
    "a matrix": _ACCELERATOR._replace(short_pairs=2**40, shared_numbers=2**40, bias_numbers=2**40),
}
_SIZES = Sizes(512, 6, 8, 1376, 256)


def main(words: list[str] | None = None) -> None:
    """Prints a table: milliseconds of a forward pass and of a training step, and the memory of the latter."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=__doc__.split("\n")[0])
    add_device(parser)
    parser.add_argument("--lengths", type=length_of, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--schemes", nargs="+", default=["alibi", "t5", "forget_gate", "fire"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parse_with_device(parser, words)
    setting = Setting(_SIZES, device=options.device, dtype=options.dtype, seed=1)
    lines = []
    for scheme in (STOCK, *options.schemes):
        model = base_model("model", max(options.lengths), setting)
        subject = LanguageModel(scheme, place(scheme, model, "model"), setting, model=model)
        model.to(options.device)
        for length in options.lengths:
            for way, sizes in WAYS.items() if scheme != STOCK else [("-", _CPU)]:
                with mock.patch.dict(blockwise.SIZES, {options.device == "cpu": sizes}):
                    lines.append((scheme, str(length), way, *_measured(subject, length, options.rounds)))
    print(machine_line(describe_machine(options.device)), "\n")
    print(format_table(("scheme", "tokens", "way", "forward, ms", "training step, ms", "MiB"), lines, form="markdown"))


def _measured(subject: LanguageModel, length: int, rounds: int) -> tuple[str, str, str]:
    device = subject.setting.device
    forward = _median(subject, "forward", length, rounds)
    before = resident_bytes(device)
    reset_peak(device)
    step = _median(subject, "train", length, rounds)
    return forward, step, f"{(peak_bytes(device) - before) / 2**20:,.0f}"


def _median(subject: LanguageModel, phase: str, length: int, rounds: int) -> str:
    """Returns the median milliseconds of a call, without the first two."""
    with subject.ready(phase, length) as call:
        times = [timed(call, subject.setting.device) for _ in range(rounds + 2)][2:]
    return f"{sorted(times)[rounds // 2] * 1e3:.1f}"


if __name__ == "__main__":
    main()
