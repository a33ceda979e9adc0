"""Measures the time per token of exported models in llama.cpp, as a ratio to the first model.

    python -m benchmarks.llama_cpp gguf/stock gguf/none gguf/alibi

Each argument is a folder from `export_model(..., to="gguf")`. In every round, each file runs once in a separate
process, in random order, with the default cache. The times are those that llama.cpp reports. Ratios are computed within
a round. The first file runs twice per round, which shows the noise of the machine.
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

import torch

from benchmarks.machine import describe_machine, machine_line
from benchmarks.timing import quartiles
from hf_posenc.report.tables import markdown_table

#: The timed phases: reading a prompt, and writing tokens after it. In milliseconds per token.
PHASES = ("reading", "writing")
Times = dict[str, list[float]]  # by phase, one per round
_SPREAD = "{median:.2f} ({low:.2f} to {high:.2f})"
#: Exits without the destructor of the server, which may wait for its thread forever.
_SERVER = """
import json, os, sys, xllamacpp
file, prompt, steps, threads = json.load(sys.stdin)
options = xllamacpp.CommonParams()
options.model.path, options.n_parallel, options.n_gpu_layers, options.verbosity = file, 1, 0, 1
options.n_ctx = options.n_batch = len(prompt) + steps
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
options.warmup = options.fit_params = False
request = {"prompt": prompt, "n_predict": steps, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
print(json.dumps(xllamacpp.Server(options).handle_completions(request)["timings"]), flush=True)
os._exit(0)
"""


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_cpp", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder with a file model.gguf")
    parser.add_argument("--prompt", type=int, default=512, help="tokens to read (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="tokens to write (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    files = {folder: Path(folder, "model.gguf") for folder in options.folders}
    if missing := [folder for folder, file in files.items() if not file.is_file()]:
        parser.error(f"no file model.gguf in {', '.join(missing)}")
    first, tokens = options.folders[0], random.Random(0).choices(range(1000, 2000), k=options.prompt)
    times = measure(lambda name: timed(files[name], tokens, options.steps), list(files), options.rounds)
    rows = [
        (name, phase, f"{statistics.median(seconds):.2f}", _SPREAD.format(**quartiles(seconds, times[first][phase])))
        for name, by_phase in times.items()
        for phase, seconds in by_phase.items()
    ]
    sizes = f"A prompt of {options.prompt} tokens and {options.steps} new tokens, {options.rounds} rounds."
    table = markdown_table(("file", "phase", "ms per token", f"over {first}"), rows)
    print(machine_line(describe_machine("cpu")), sizes, table, sep="\n\n")
    return 0


def measure(run: Callable[[str], Mapping[str, float]], names: Sequence[str], rounds: int) -> dict[str, Times]:
    """Runs every subject once per round, in random order. Returns the times by name and phase."""
    generator, again = random.Random(0), f"{names[0]} again"
    times: dict[str, Times] = {name: {phase: [] for phase in PHASES} for name in (*names, again)}
    for _ in range(rounds):
        for name in generator.sample(list(times), len(times)):
            for phase, milliseconds in run(names[0] if name == again else name).items():
                times[name][phase].append(milliseconds)
    return times


def timed(file: Path, prompt: Sequence[int], steps: int) -> dict[str, float]:
    """Returns the times that llama.cpp reports, in milliseconds per token, by phase."""
    task = json.dumps([str(file), list(prompt), steps, torch.get_num_threads()])
    ran = subprocess.run([sys.executable, "-c", _SERVER], input=task, stdout=subprocess.PIPE, text=True, check=True)
    timings = json.loads(ran.stdout.splitlines()[-1])
    return {phase: timings[f"{name}_per_token_ms"] for phase, name in zip(PHASES, ("prompt", "predicted"), strict=True)}


if __name__ == "__main__":
    sys.exit(main())
