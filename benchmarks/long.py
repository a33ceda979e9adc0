"""One forward and backward pass of a long input, with its peak memory: a scheme beside the bare model.

    python -m benchmarks.long --length 16384 --scheme t5

A tensor of `heads x length x length` in float32 takes 8.6 GB at 16384 tokens and 8 heads, and a training step would
hold several of them in every layer.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.arguments import length_of, scheme_name
from benchmarks.errors import BenchmarkError
from benchmarks.lineup import BARE
from benchmarks.machine import DTYPES, check_device
from benchmarks.memory import peak_memory
from benchmarks.subjects import Setting


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 if one of the two could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long", description="A training step on one long input, and its peak memory."
    )
    parser.add_argument("--length", type=length_of, default=16384, help="tokens")
    parser.add_argument("--scheme", type=scheme_name, default="t5")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    found = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        check_device(found.device)
    except BenchmarkError as error:
        parser.error(str(error))
    setting = Setting(device=found.device, dtype=found.dtype)
    heads = setting.sizes.num_heads
    dense = heads * found.length**2 * DTYPES[found.dtype].itemsize
    print(
        f"{setting.sizes.num_layers} layers, {found.length} tokens, forward and backward; one bias of heads x length x"
    )
    print(f"length would take {dense / 1e9:.2f} GB.")
    failed = False
    for name in (BARE, found.scheme):
        result = peak_memory("model", name, "train", found.length, setting)
        if "reason" in result:
            failed = True
            print(f"{name:12} not run: {result['reason']}", flush=True)
        else:
            told = f"{result['phase_bytes'] / 1e9:.2f} GB above the {result['before_bytes'] / 1e9:.2f} GB before it"
            print(f"{name:12} {result['seconds']:8.1f} s, peak {told}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
