"""Writes docs/results/devices.md: what ran on the strict device, which kernels CUDA would take, and graphs.

    python -m tests.devices.report

It runs all tests of `tests/devices/inside` and the behaviours of `tests/matrix` for each placement, 24 minutes on
two cores.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

import torch
import transformers

from tests.devices.test_strict_device import INSIDE, MATRIX, of_all, on_strict_device
from tests.fresh import ROOT, printed, run_python

PAGE = ROOT / "docs/results/devices.md"
PLACEMENTS = {"one": "one device", "split": "split over two", "cpu": "split, a layer on the CPU", "disk": "on disk"}
_INTRODUCTION = """# Devices

This page shows how models run on a simulated device, which keeps its memory on the CPU and has the rules of CUDA
([many devices](../how_to/many_devices.md)). It is made by the command

```bash
python -m tests.devices.report
```

## What ran

torch {torch}, transformers {transformers}. A cell shows the number of checks that pass and, after the slash, the number
that fail. These are the checks:

- Outputs and gradients are equal to those on the CPU, in Llama, GPT-2, BERT, T5, Llava, ViT and Whisper, also with
  gradient checkpointing.
- Models can be loaded, saved and dispatched with a device map of the stock model.
- The behaviours of `tests/matrix` hold in its architectures.
- On one device, no layer and no token waits for the device.

In an earlier version, in which the parts of a scheme were not on the devices of their layers, 1,420 of 1,964 checks of
models split over two devices failed.
"""
_KERNELS = """
## Kernels

The table predicts which kernel `scaled_dot_product_attention` uses on CUDA for a Llama with grouped heads
(`tests/devices/kernels.py`). On an NVIDIA H200 with torch 2.11, the prediction was right for all 416 calls that were
compared (stock and 26 schemes), except that cuDNN's kernel replaces "flash" and "efficient" in bfloat16 on that GPU.
The columns are for bfloat16 unless they say float32. "efficient" is the memory-efficient kernel, which accepts a bias
as a mask. "mask copied" means that the rows of the mask are not aligned to 16 bytes, so it is copied. "math" stands for
plain operators. They occur only where the stock model uses them too: in float32 without a mask, with grouped heads.
"""
_GRAPHS = """
## Graphs

The table shows the graphs that `torch.compile` makes of a Llama. No graph has a break (`fullgraph=True`). Every scheme
has as many graphs as the stock model: one for the first length, and one for all others.
"""
#: Outcomes of a test, by the element that a report has for it.
_OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "left out"}


def ran(tests: str, placement: str) -> list[tuple[str, str]]:
    """The name with parameters and the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        on_strict_device(tests, placement, f"--junitxml={report}", "-n", "auto", *of_all(tests, placement))
        found = []
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            outcome = next((_OUTCOMES[part.tag] for part in case if part.tag in _OUTCOMES), "ok")
            found.append((case.get("name", ""), outcome))
        return found


def main() -> None:
    """Runs everything and writes the page."""
    from tests.devices.inside.subjects import SCHEMES

    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    names = sorted(SCHEMES, key=len, reverse=True)
    for placement in PLACEMENTS:
        for tests in (INSIDE, MATRIX):
            for name, outcome in ran(tests, placement):
                parameters = re.split(r"[\[\]-]", name)
                scheme = next((one for one in names if one in parameters), "")
                totals[placement][outcome] += 1
                counts[scheme][placement][outcome] += 1
    lines = [
        _INTRODUCTION.format(torch=torch.__version__, transformers=transformers.__version__),
        "| scheme | " + " | ".join(PLACEMENTS.values()) + " |",
        "|---" * (1 + len(PLACEMENTS)) + "|",
    ]
    for scheme in ["all", *SCHEMES]:
        own = totals if scheme == "all" else counts[scheme]
        cells = [f"{own[placement]['ok']:,} / {own[placement]['failed']}" for placement in PLACEMENTS]
        lines.append(f"| {scheme} | " + " | ".join(cells) + " |")
    for heading, module in ((_KERNELS, "tests.devices.kernels"), (_GRAPHS, "tests.attention.graphs")):
        lines += [heading, printed(run_python("-W", "ignore", "-m", module))]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
