"""`accelerate launch eval/properties.py --markdown`: `hf-posenc eval properties` on its device."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.launched import run_evaluation

if __name__ == "__main__":
    sys.exit(run_evaluation("properties"))
