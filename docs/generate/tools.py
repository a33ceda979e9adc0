"""Writes docs/reference/tools.md by running every check of tests/integrations with every scheme.

python docs/generate/tools.py                 # everything, about 15 minutes on two cores
python docs/generate/tools.py --only "PEFT"   # rows whose group or name contains the text; the others are kept
python docs/generate/tools.py --no-run        # the page again from the record
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "reference" / "tools.md"
DATA = ROOT / "docs" / "results" / "tools.json"
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "sentence-transformers", "optimum-quanto", "torchao",
    "bitsandbytes", "hqq", "lm_eval",
)  # fmt: skip
#: Tools whose result is no number that a table could compare: how they take a scheme, the test, and the page.
OTHERS = (
    ("`from_pretrained`, `AutoModel.from_config`", "the argument `position_encoding=`", "checkpoint/test_requested.py",
     "patching.md#in-one-argument"),
    ("pipelines", '`model_kwargs={"position_encoding": ...}`', "checkpoint/test_requested.py",
     "patching.md#in-one-argument"),
    ("sentence-transformers", '`model_kwargs={"position_encoding": ...}`', "checkpoint/test_requested.py",
     "patching.md#in-one-argument"),
    ("lm-eval", "`--model_args pretrained=FOLDER,position_encoding=...`", "checkpoint/test_requested.py",
     "evaluations.md#lm-evaluation-harness"),
    ("TRL in a script", '`model_init_kwargs={"position_encoding": ...}`', "checkpoint/test_requested.py", "trl.md"),
    ("TRL's commands", "`hf-posenc run trl sft --model_init_kwargs ...`", "integrations/test_trl.py",
     "train_with_other_tools.md#trls-commands"),
    ("axolotl", "the plug-in `hf_posenc.axolotl.PositionEncodingPlugin`, and the key `position_encoding`",
     "integrations/test_axolotl.py", "train_with_other_tools.md#axolotl"),
    ("`AutoPeftModel`", "the argument `position_encoding=` for the base model", "checkpoint/test_requested.py",
     "patching.md#in-one-argument"),
    ("programs without the plug-in", '`export_model(..., to="remote_code")`, loaded with `trust_remote_code=True`',
     "export/test_remote_code.py", "serve.md#share-it-with-its-code"),
    ("`evaluate`", '`evaluate.load("eval/position_encoding", "loss")`', "metrics/test_every_evaluation.py",
     "evaluations.md#modules-for-evaluate"),
    ("dask", "`compare.py --executor dask`: the training runs of a study on a cluster", "training/test_executors.py",
     "studies.md#on-a-cluster"),
    ("submitit (SLURM)", "`compare.py --executor submitit`: one job for each training. SLURM itself was not run",
     "training/test_executors.py",
     "studies.md#on-a-cluster"),
    ("TensorBoard, trackio, wandb", "`--report_to` of the training scripts and of studies",
     "training/test_executors.py", "studies.md#trackers"),
)  # fmt: skip


def main() -> int:
    """Runs the checks; returns 1 if one of them found a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text in the group or name of the rows to run")
    parser.add_argument("--no-run", action="store_true", help="write the page from docs/results/tools.json")
    arguments = parser.parse_args()
    record = json.loads(DATA.read_text()) if DATA.is_file() else {"cells": {}}
    failures = [] if arguments.no_run else _run(record, arguments.only)
    print("\n".join(failures), file=sys.stderr)
    DATA.write_text(json.dumps(record, indent=1) + "\n")
    if failures:
        # The results are kept, so that --only can add the rest.
        return 1
    PAGE.write_text(page(record))
    return 0


def _run(record: dict[str, Any], only: str) -> list[str]:
    """Fills the record in place; returns the cells that are neither equal nor refused."""
    import torch
    import transformers

    from tests.integrations.table import TOOLS
    from tests.integrations.tool import SCHEMES, outcome

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failures, cells = [], {}
    for tool in TOOLS:
        key = f"{tool.group} / {tool.name}"
        if only not in key:
            cells[key] = record["cells"].get(key, {})
            continue
        if tool.missing():
            failures.append(f"{key}: needs {', '.join(tool.missing())}: pip install '.[tools]'")
            continue
        started = time.monotonic()
        cells[key] = {}
        for name, scheme in SCHEMES.items():
            try:
                cells[key][name] = outcome(tool, scheme)
            except Exception as error:
                # Another library may raise any error; the page is only written if every cell has a result.
                failures.append(f"{key}, {name}: {type(error).__name__}: {error}")
        print(f"{key}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    record["cells"] = cells
    record["versions"] = {name: _version(name) for name in PACKAGES}
    return failures


def _version(name: str) -> str:
    try:
        return version(name).split("+")[0]
    except PackageNotFoundError:
        return "not installed"


def _without_scheme(cell: str) -> str:
    """A reason without the name of the scheme, so that it is listed once for all schemes."""
    return re.sub(r"the position encoding '\w+'", "a position encoding", cell)


def _title(guide: str) -> str:
    """The heading of a page of docs/how_to."""
    return (ROOT / "docs" / "how_to" / guide.partition("#")[0]).read_text(encoding="utf-8").split("\n", 1)[0][2:]


def page(record: dict[str, Any]) -> str:
    """Returns the page for a record."""
    from hf_posenc.report.tables import markdown_table
    from tests.integrations.adapting import WITHOUT_ROW
    from tests.integrations.table import TOOLS
    from tests.integrations.tool import EQUAL, SCHEMES

    every = [cell for cells in record["cells"].values() for cell in cells.values()]
    equal = sum(cell == EQUAL for cell in every)
    # In the order in which the page shows them.
    cells = [record["cells"][f"{tool.group} / {tool.name}"][name] for tool in TOOLS for name in SCHEMES]
    reasons = [cell for cell in dict.fromkeys(map(_without_scheme, cells)) if cell != EQUAL]
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}
    shown = {cell: "equal" if cell == EQUAL else f"refused ({numbers[_without_scheme(cell)]})" for cell in cells}
    rows: dict[str, list[Any]] = {}
    for tool in TOOLS:
        own = record["cells"][f"{tool.group} / {tool.name}"]
        rows.setdefault(tool.group, []).append((tool.name, *(shown[own[name]] for name in SCHEMES), tool.oracle))
    tables = {group: markdown_table(("", *SCHEMES, "equal to"), own) for group, own in rows.items()}
    sections = "\n\n".join(f"## {group}\n\n{table}" for group, table in tables.items())
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    absent = "\n".join(f"- `{name}`: {why}." for name, why in WITHOUT_ROW.items())
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    others = markdown_table(
        ("tool", "how it gets the scheme", "tested in", "guide"),
        [(tool, how, f"`tests/{test}`", f"[{_title(guide)}](../how_to/{guide})") for tool, how, test, guide in OTHERS],
    )
    return f"""# Tools

<!-- Written by docs/generate/tools.py. Edits are lost. -->

This page lists the libraries that were tested with patched models. First come the tools that accept a scheme as an
argument, or that work with a patched model unchanged. The tables after that compare numbers: each row runs a tool on a
tiny random Llama (or a BERT, if the row says so) with {len(SCHEMES)} schemes.

{others}

For engines and file formats, such as vLLM, SGLang, llama.cpp and ONNX Runtime, see [Runtimes](runtimes.md).

## How to read the tables

A cell compares the numbers of the tool with those in the last column:

- **equal**: the numbers are the same. float32 outputs agree to 1e-4 of the largest one, and generated tokens exactly,
  unless the row says otherwise.
- **refused**: the call raises an error that gives the reason. The number refers to the [list of reasons](#reasons).

Of {len(every)} cells, {equal} are equal and {len(every) - equal} are refused. A different number would fail the test.
`rope + yarn` is RoPE with YaRN scaling by 4 from 16 tokens. `self_extend` has a window of 4 and groups of 2.

The tables were written by `python docs/generate/tools.py` on a CPU, with {versions}.
`pytest tests/integrations -m 'slow or not slow'` checks every cell. The default test run checks some of them. Both need
`pip install '.[tools]'`.

{sections}

PEFT methods that are not in the table:

{absent}

## Reasons

{notes}
"""


if __name__ == "__main__":
    raise SystemExit(main())
