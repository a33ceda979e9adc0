"""`accelerate launch eval/generalization.py MODEL --task copy`: `hf-posenc eval generalization` on its device."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.launched import run_evaluation

if __name__ == "__main__":
    sys.exit(run_evaluation("generalization"))
