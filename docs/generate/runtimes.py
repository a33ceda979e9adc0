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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "reference" / "runtimes.md"
DATA = ROOT / "docs" / "results" / "runtimes.json"
PACKAGES = ("torch", "transformers", "onnxruntime", "onnxscript", "xllamacpp", "gguf")


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


def page(record: dict[str, Any]) -> str:
    """Returns the page for a record."""
    from tests.export.runtimes import RUNTIMES

    cells = record["cells"]
    sections = [_section(model, runtimes, cells[model]) for model, runtimes in RUNTIMES.items() if model in cells]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return HEAD.format(versions=versions) + "\n\n".join(sections) + "\n"


def _section(model: str, runtimes: Any, cells: dict[str, Any]) -> str:
    from hf_posenc.report.tables import markdown_table
    from tests.export.runtimes import shown

    schemes = cells[runtimes[0].target]
    rows = [
        (f"`{scheme}`", *(shown(cells[runtime.target][scheme], runtime) for runtime in runtimes)) for scheme in schemes
    ]
    table = markdown_table(("", *(runtime.name for runtime in runtimes)), rows)
    return f"## {model}\n\n{table}"


HEAD = """# Runtimes

<!-- Written by docs/generate/runtimes.py. Edits are lost. -->

Which scheme runs in which program that does not know this package. Every cell with a number is an export of a tiny
random model with `export_model`, run in that program.

**If a cell says no**, `export_model` raises an error that says what was tried and what can be done instead:

- ONNX Runtime runs nearly every scheme of a decoder or an encoder, but no encoder-decoder
  ([how](../how_to/run_in_onnx_runtime.md)).
- *Own code* is a checkpoint with a file of code that transformers runs after `trust_remote_code=True`
  ([how](../how_to/serve.md#share-it-with-its-code)).
- [`hf-posenc serve`](../how_to/serve.md) runs the patched checkpoint itself, with transformers.
- The only biases that llama.cpp has are ALiBi and, in T5 models, that of T5. vLLM has ALiBi only, and SGLang no bias.

What the cells say:

- **A number** is the largest difference from the patched model in transformers, in float32, relative to the largest
  output. llama.cpp is compared by probabilities of the next token, which differ less, or by hidden states of a model
  without a head. Its rounded GELU causes the differences of GPT-2 and BERT.
- **plug-in** is about the *patched* checkpoint: the engine runs it with a plug-in of this package ([vLLM and
  SGLang](../how_to/serve_engines.md)). It was not run for this table, and SGLang's plug-in was never run in the real
  SGLang. A scheme with a number in the first column can also be exported to a plain checkpoint, which
  needs no plug-in. Compare its numbers in your engine.
- **no**, and what the program does not have:
  - *vectors*: it cannot add the scheme's vectors to the embeddings.
  - *map*: it cannot change queries and keys as the scheme does, by more than one rotation with fixed frequencies.
  - *rotation*: it rotates, but not in the way of the scheme.
  - *bias*: it cannot add the scheme's bias to the logits.
  - *scale*: it cannot multiply the logits by the scheme's factor.
  - *patch_model*: the scheme cannot be placed in this model at all.

*Decoding* means token by token with a cache. Q8_0 and int8 round the weights to 8 bits, which is where their
differences come from. The reasons and the carriers of all cells are in [runtimes.json](../results/runtimes.json).

Written by `python docs/generate/runtimes.py`. Versions: {versions}. On a CPU.

"""

if __name__ == "__main__":
    main()
