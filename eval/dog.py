"""The dog test of a model: `accelerate launch eval/dog.py MODEL --schemes none rope alibi`.

The same as `hf-posenc eval dog`, on the device that accelerate chose.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.launched import run_evaluation

if __name__ == "__main__":
    sys.exit(run_evaluation("dog"))
