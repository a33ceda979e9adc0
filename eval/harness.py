"""lm-evaluation-harness on patched models: `accelerate launch eval/harness.py --model hf --model_args ... --tasks ...`.

The same as `hf-posenc lm-eval` and `python -m hf_posenc.integrations.lm_eval`; every option is lm-eval's.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_posenc.cli import main

if __name__ == "__main__":
    sys.exit(main(["lm-eval", *sys.argv[1:]]))
