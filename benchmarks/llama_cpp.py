"""Time per token in llama.cpp of exported models, as a ratio to the first of them.

    python -m benchmarks.llama_cpp stock=gguf/stock none=gguf/none alibi=gguf/alibi

Each argument is a name and a folder that `export_model(..., to="gguf")` has written. In every round each file runs
once in a process of its own, in random order, with the default cache. The times are its own. Ratios are taken
within a round. The first file runs twice per round, which shows the noise of the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

from benchmarks.machine import describe_machine, machine_line
from hf_posenc.export.gguf.run import complete

_PHASES = {"reading": "prompt_per_token_ms", "writing": "predicted_per_token_ms"}


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_cpp", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=_named_file, metavar="NAME=FOLDER")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are read (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="tokens that are written (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    found = parser.parse_args(arguments)
    (first, first_file), *_ = found.files
    files = {**dict(found.files), f"{first} again": first_file}
    times: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in _PHASES} for name in files}
    generator = random.Random(0)
    prompt = [generator.randrange(1000, 2000) for _ in range(found.prompt)]
    for _ in range(found.rounds):
        for name in generator.sample(list(files), len(files)):
            context = found.prompt + found.steps
            (completion,) = complete(files[name], [prompt], found.steps, context=context, precise=False)
            for phase, key in _PHASES.items():
                times[name][phase].append(completion.timings[key])
    print(machine_line(describe_machine("cpu")))
    print(f"\nA prompt of {found.prompt} tokens and {found.steps} new tokens, {found.rounds} rounds.\n")
    print(f"| file | reading, ms per token | over {first} | writing, ms per token | over {first} |")
    print("| --- | --- | --- | --- | --- |")
    for name in files:
        cells = [cell for phase in _PHASES for cell in _cells(times[name][phase], times[first][phase])]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


def _named_file(word: str) -> tuple[str, Path]:
    name, equals, folder = word.partition("=")
    file = Path(folder, "model.gguf")
    if not (name and equals and file.is_file()):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=FOLDER with a file model.gguf in the folder")
    return name, file


def _cells(own: list[float], first: list[float]) -> list[str]:
    """The median time, and the median of the ratios with their quartiles."""
    ratios = [mine / its for mine, its in zip(own, first, strict=True)]
    if len(ratios) < 2:
        return [f"{own[0]:.2f}", f"{ratios[0]:.2f}"]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [f"{statistics.median(own):.2f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]


if __name__ == "__main__":
    sys.exit(main())
