"""The evaluation scripts: `accelerate launch eval/NAME.py ...` is `hf-posenc eval NAME ...` on accelerate's device."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import PartialState

from hf_posenc.cli import main
from training.machine import is_first_process, launched_on_cpu


def run(script: str) -> None:
    """Runs the evaluation with the name of the file `script`, on accelerate's device, and exits.

    Only the first process measures. The others exit, because sharing one measurement would gain nothing.
    """
    name = Path(script).stem.replace("_", "-")
    state = PartialState(cpu=launched_on_cpu())
    state.destroy_process_group()  # The first process may take any time.
    device = [] if name == "properties" else ["--device", str(state.device)]
    sys.exit(main(["eval", name, *device, *sys.argv[1:]]) if is_first_process() else 0)
