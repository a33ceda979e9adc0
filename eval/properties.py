"""The properties of all schemes: `python eval/properties.py --markdown > docs/results/properties.md`.

The same as `hf-posenc eval properties`. It measures formulas, not models, and takes a minute on one CPU core: there is
nothing for several processes or a GPU to do. Of several processes the first measures, the others leave.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_posenc.cli import main
from training.launched import first_process_device

if __name__ == "__main__":
    device = first_process_device()
    sys.exit(0 if device is None else main(["eval", "properties", *sys.argv[1:]]))
