r"""Trains a masked language model, from scratch or from pretrained weights, with any position encoding.

    python training/run_mlm.py --model_type bert --config_overrides hidden_size=64,num_hidden_layers=2 \
        --tokenizer_name bytes --scheme alibi --output_dir outputs/alibi --max_steps 300
    accelerate launch --config_file training/accelerate/ddp_gpu.yaml training/run_mlm.py settings.yaml --seed 1

All options can be in one YAML or JSON file, and flags after it override it. Run the same command again to resume. The
steps of a run are those of run_clm.py, but the model predicts masked tokens instead of the next token.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, which has modules of common names

from training.argument_files import parse_arguments
from training.one_run import exit_status
from training.run_clm import OPTIONS, train


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `exit_status`."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status("run_mlm", lambda: train(*parse_arguments(OPTIONS, words, __doc__), causal=False))


if __name__ == "__main__":
    sys.exit(main())
