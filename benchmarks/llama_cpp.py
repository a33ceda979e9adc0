"""Time per token in llama.cpp of exported models, as a ratio to the first of them.

    python -m benchmarks.llama_cpp stock=gguf/stock none=gguf/none alibi=gguf/alibi

Each argument is a name and a folder that `export_model(..., to="gguf")` has written. In every round each file runs
once in a process of its own, in random order, with the default cache. The times are its own. Ratios are taken
within a round. The first file runs twice per round, which shows the noise of the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.machine import describe_machine, machine_line
from benchmarks.timing import quartiles
from hf_posenc.report.tables import markdown_table

#: What is timed: a prompt that is read, and tokens that are written after it. Milliseconds per token.
PHASES = ("reading", "writing")
#: Ends without the destructor of the server, which may wait for its thread forever.
_SERVER = """
import json, os, sys, xllamacpp
file, prompt, steps = json.load(sys.stdin)
options = xllamacpp.CommonParams()
options.model.path, options.n_parallel, options.n_gpu_layers, options.verbosity = file, 1, 0, 1
options.n_ctx = options.n_batch = len(prompt) + steps
options.warmup = options.fit_params = False
request = {"prompt": prompt, "n_predict": steps, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
print(json.dumps(xllamacpp.Server(options).handle_completions(request)["timings"]), flush=True)
os._exit(0)
"""


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_cpp", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=_named_file, metavar="NAME=FOLDER")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are read (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="tokens that are written (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    files = dict(options.files)
    first = options.files[0][0]
    generator = random.Random(0)
    tokens = [generator.randrange(1000, 2000) for _ in range(options.prompt)]
    times = measure(lambda name: timed(files[name], tokens, options.steps), list(files), options.rounds)
    print(machine_line(describe_machine("cpu")))
    print(f"\nA prompt of {options.prompt} tokens and {options.steps} new tokens, {options.rounds} rounds.\n")
    rows = [
        (name, *(cell for phase in PHASES for cell in _cells(by_phase[phase], times[first][phase])))
        for name, by_phase in times.items()
    ]
    heads = [head for phase in PHASES for head in (f"{phase}, ms per token", f"over {first}")]
    print(markdown_table(("file", *heads), rows))
    return 0


def measure(
    run: Callable[[str], Mapping[str, float]], names: Sequence[str], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Runs every subject once in each round, in random order; returns the times by name and phase."""
    generator, again = random.Random(0), f"{names[0]} again"
    times: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in (*names, again)}
    for _ in range(rounds):
        for name in generator.sample(list(times), len(times)):
            by_phase = run(names[0] if name == again else name)
            for phase in PHASES:
                times[name][phase].append(by_phase[phase])
    return times


def timed(file: Path, prompt: Sequence[int], steps: int) -> dict[str, float]:
    """llama.cpp's own times in milliseconds per token, by phase."""
    task = json.dumps([str(file), list(prompt), steps])
    ran = subprocess.run([sys.executable, "-c", _SERVER], input=task, capture_output=True, text=True, check=True)
    timings = json.loads(ran.stdout.splitlines()[-1])
    return {phase: timings[f"{name}_per_token_ms"] for phase, name in zip(PHASES, ("prompt", "predicted"), strict=True)}


def _named_file(word: str) -> tuple[str, Path]:
    name, equals, folder = word.partition("=")
    file = Path(folder, "model.gguf")
    if not (name and equals and file.is_file()):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=FOLDER with a file model.gguf in the folder")
    return name, file


def _cells(times: list[float], first: list[float]) -> list[str]:
    """The median time, and the median of the ratios with their quartiles."""
    spread = "{median:.2f} ({low:.2f} to {high:.2f})".format(**quartiles(times, first))
    return [f"{statistics.median(times):.2f}", spread]


if __name__ == "__main__":
    sys.exit(main())
