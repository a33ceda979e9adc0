"""Grammar in minimal pairs: `accelerate launch eval/minimal_pairs.py MODEL --task FILE`.

The same as `hf-posenc eval minimal-pairs`, on the device that accelerate chose. The first process measures, the
others leave.
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
    sys.exit(0 if device is None else main(["eval", "minimal-pairs", "--device", str(device), *sys.argv[1:]]))
