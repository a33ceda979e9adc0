"""Writes docs/reference/runtimes.md by exporting every scheme to every target, and running each export.

python docs/generate/runtimes.py                 # everything
python docs/generate/runtimes.py --only gguf     # one target; the results of the others are kept
python docs/generate/runtimes.py --model GPT-2   # one model, likewise
python docs/generate/runtimes.py --new           # schemes that have no result yet
python docs/generate/runtimes.py --no-run        # the page again from the record
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "reference" / "runtimes.md"
DATA = ROOT / "docs" / "results" / "runtimes.json"
PACKAGES = ("torch", "transformers", "onnxruntime", "onnxscript", "xllamacpp", "gguf")


@dataclass(frozen=True)
class Program:
    """A column of the table of answers.

    Args:
        name: of the program.
        target: the value of `to=` of the export that it loads.
        plug_in: its name in the record, if a plug-in of this package can load the patched checkpoint in it.
    """

    name: str
    target: str
    plug_in: str = ""


PROGRAMS = (
    Program("transformers", "stock"),
    Program("remote code", "remote_code"),
    Program("ONNX Runtime", "onnx"),
    Program("llama.cpp", "gguf"),
    Program("vLLM", "stock", plug_in="vllm"),
    Program("SGLang", "stock", plug_in="sglang"),
)


def main() -> None:
    """Runs the exports and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TARGET", help="export to this target only")
    parser.add_argument("--model", default="", help="export this model only")
    parser.add_argument("--new", action="store_true", help="export schemes only that have no result yet")
    parser.add_argument("--no-run", action="store_true", help="write the page from docs/results/runtimes.json")
    arguments = parser.parse_args()
    record = json.loads(DATA.read_text()) if DATA.is_file() else {"cells": {}}
    if not arguments.no_run:
        _run(record, arguments.only, arguments.model, new=arguments.new)
    PAGE.write_text(page(record))


def _run(record: dict[str, Any], only: str, only_model: str, *, new: bool) -> None:
    """Fills the record in place: the outcome of each export by model, target and scheme."""
    import torch
    import transformers

    from tests.export.runtimes import RUNTIMES, SCHEMES, outcome

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for model, runtimes in RUNTIMES.items():
        for target, runtime in {runtime.target: runtime for runtime in runtimes}.items():
            if only not in ("", target) or only_model not in ("", model):
                continue
            started, of_model = time.monotonic(), record["cells"].setdefault(model, {})
            known = of_model.get(target, {}) if new else {}
            of_model[target] = {
                scheme: known[scheme] if scheme in known else outcome(model, scheme, runtime) for scheme in SCHEMES
            }
            record["versions"] = {name: _version(name) for name in PACKAGES}
            DATA.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{model}, {target}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _version(name: str) -> str:
    try:
        return version(name).split("+")[0]
    except PackageNotFoundError:
        return "not installed"


def answers(record: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Returns by scheme and program whether the scheme runs there: "yes", "plug-in", "no", or in which models."""
    schemes = next(iter(record["cells"]["Llama"].values()))
    return {
        scheme: {program.name: _answer(record["cells"], program, scheme) for program in PROGRAMS} for scheme in schemes
    }


def _answer(cells: dict[str, Any], program: Program, scheme: str) -> str:
    if program.plug_in:
        # Engines were tested with decoders only. What the plug-in refuses, the engine would compute in another way.
        if "refused" in cells["Llama"][program.plug_in][scheme]:
            return "no"
        return "plug-in" if "refused" in cells["Llama"][program.target][scheme] else "yes"
    outcomes = {
        model.removesuffix(" without a head"): targets[program.target][scheme]
        for model, targets in cells.items()
        if program.target in targets and targets[program.target][scheme].get("because") != "patch_model"
    }
    runs = sorted(model for model, found in outcomes.items() if "refused" not in found)
    others = sorted(outcomes.keys() - runs)
    if not runs or not others:
        return "yes" if runs else "no"
    return f"yes, not in {', '.join(others)}" if len(others) < len(runs) else f"in {', '.join(runs)}"


def page(record: dict[str, Any]) -> str:
    """Returns the page for a record."""
    from hf_posenc.report.tables import markdown_table
    from tests.export.runtimes import RUNTIMES

    cells = record["cells"]
    names = [program.name for program in PROGRAMS]
    rows = [(f"`{scheme}`", *(found[name] for name in names)) for scheme, found in answers(record).items()]
    sections = [_section(model, runtimes, cells[model]) for model, runtimes in RUNTIMES.items() if model in cells]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    head = HEAD.format(versions=versions, answers=markdown_table(("scheme", *names), rows))
    return head + "\n\n".join(sections) + "\n"


def _section(model: str, runtimes: Any, cells: dict[str, Any]) -> str:
    from hf_posenc.report.tables import markdown_table
    from tests.export.runtimes import ENGINES, shown

    columns = [runtime for runtime in runtimes if runtime.target not in ENGINES]
    rows = [
        (f"`{scheme}`", *(shown(cells[runtime.target][scheme], runtime) for runtime in columns))
        for scheme in cells[columns[0].target]
        if any("refused" not in cells[runtime.target][scheme] for runtime in columns)
    ]
    return f"### {model}\n\n{markdown_table(('scheme', *(runtime.name for runtime in columns)), rows)}"


HEAD = """# Runtimes

<!-- Written by docs/generate/runtimes.py. Edits are lost. -->

This page shows which schemes run in which programs. To export a model, call
`hf_posenc.export_model(model, "folder", to="stock")` for transformers, `to="remote_code"` for transformers with
`trust_remote_code=True`, `to="onnx"` for ONNX Runtime, or `to="gguf"` for llama.cpp. vLLM and SGLang load the export
for transformers.

<p class="row-filter" data-example="alibi, llama.cpp=yes"></p>

{answers}

- **yes**: the export gives the same numbers as the patched model. A tiny Llama, GPT-2, BERT and T5 with random weights
  were tried. "In BERT" means that it works in this model only, and "not in T5" that it works in the others. For
  example, llama.cpp runs T5's bias in a T5 and in no other model.
- **plug-in**: vLLM or SGLang loads the patched checkpoint itself, and needs the
  [plug-in](../how_to/serve_engines.md) of this package.
- **remote code**: the checkpoint contains a file of code, which transformers runs with `trust_remote_code=True`
  ([how](../how_to/serve.md#share-it-with-its-code)).
- **no**: `export_model` raises an error that says what is missing and what to do instead. You can always use
  [`hf-posenc serve`](../how_to/serve.md), which runs every patched checkpoint in transformers.

vLLM and SGLang were not run for this table: their columns follow from the export and from the checks of the plug-in.
Four schemes were [compared in vLLM](../how_to/serve_engines.md#the-same-numbers) on a CPU. SGLang was never run.
Compare the numbers of an export in your engine before you rely on it.

## Measured differences

Each number is the largest difference between the export, run in that program, and the patched model in transformers,
in float32 and relative to the largest output. *Decoding* means one token at a time, with a cache. The differences for
Q8_0 and int8 are larger because these formats round the weights to 8 bits.

llama.cpp returns probabilities of the next token, or hidden states for a model without a head, so these are compared.
The differences for GPT-2 and BERT are larger because llama.cpp approximates GELU.

If a cell says *no*, it names what the program lacks:

- *vectors*: it cannot add the scheme's vectors to the embeddings.
- *map*: it cannot change queries and keys in any way other than by one rotation with fixed frequencies.
- *rotation*: it has a rotation, but not this one.
- *bias*: it cannot add the scheme's bias to the attention logits.
- *scale*: it cannot multiply the attention logits by the scheme's factor.
- *patch_model*: the scheme cannot be placed in this model at all.

The table of a model leaves out the schemes that no program can run in it. All reasons, and how each export stores its
scheme, are in [runtimes.json](../results/runtimes.json).

Written by `python docs/generate/runtimes.py` on a CPU, with {versions}.

"""

if __name__ == "__main__":
    main()
