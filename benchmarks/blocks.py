"""Where one matrix of a bias stops being faster than blocks, which `hf_posenc.attention.blockwise.SIZES` decides.

    python -m benchmarks.blocks --device cuda --dtype bfloat16

Each length runs with the blocks of a CPU, with the larger ones of an accelerator, and with one matrix.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from unittest import mock

import torch

from benchmarks.arguments import add_device, length_of, parse_with_device
from benchmarks.lineup import base_model, place
from benchmarks.machine import (
    describe_machine,
    machine_line,
    peak_bytes,
    reset_peak,
    resident_bytes,
    synchronize,
)
from benchmarks.subjects import STOCK, Setting, Sizes
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
        place(scheme, model, "model")
        model.to(setting.tokens(1).device)
        for length in options.lengths:
            for way, sizes in WAYS.items() if scheme != STOCK else [("-", _CPU)]:
                with mock.patch.dict(blockwise.SIZES, {options.device == "cpu": sizes}):
                    lines.append((scheme, str(length), way, *_measured(model, setting, length, options.rounds)))
    print(machine_line(describe_machine(options.device)), "\n")
    print(format_table(("scheme", "tokens", "way", "forward, ms", "training step, ms", "MiB"), lines, form="markdown"))


def _measured(model: torch.nn.Module, setting: Setting, length: int, rounds: int) -> tuple[str, str, str]:
    ids = setting.tokens(length)

    def median(call: Callable[[], object]) -> str:
        times = []
        for _ in range(rounds + 2):
            begin = perf_counter()
            call()
            synchronize(setting.device)
            times.append(perf_counter() - begin)
        return f"{sorted(times[2:])[rounds // 2] * 1e3:.1f}"

    forward = median(torch.no_grad()(lambda: model(input_ids=ids, use_cache=False)))
    before = resident_bytes(setting.device)
    reset_peak(setting.device)
    step = median(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward())
    peak = peak_bytes(setting.device) - before
    model.zero_grad(set_to_none=True)
    return forward, step, f"{peak / 2**20:,.0f}"


if __name__ == "__main__":
    main()
