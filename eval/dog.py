"""The dog test of a model: `accelerate launch eval/dog.py MODEL --schemes none rope alibi`.

The same as `hf-posenc eval dog`, on the device that accelerate chose. Sharing one sentence between processes would
gain nothing: the first process measures, the others leave.
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
    status = main(["eval", "dog", "--device", str(state.device), *sys.argv[1:]]) if state.is_main_process else 0
    state.destroy_process_group()
    sys.exit(status)
