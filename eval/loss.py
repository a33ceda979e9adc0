"""Loss by length of a model: `accelerate launch eval/loss.py MODEL --text FILE --lengths 128 512 1024`.

The same as `hf-posenc eval loss`, on the device that accelerate chose. The first process measures, the
others leave.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import PartialState

from hf_posenc.cli import main

if __name__ == "__main__":
    state = PartialState()
    status = main(["eval", "loss", "--device", str(state.device), *sys.argv[1:]]) if state.is_main_process else 0
    state.destroy_process_group()
    sys.exit(status)
