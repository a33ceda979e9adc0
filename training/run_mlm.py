"""Trains a masked language model, from scratch or from pretrained weights, with any position encoding.

    python training/run_mlm.py --model_type bert --config_overrides hidden_size=64,num_hidden_layers=2 \
        --tokenizer_name bytes --scheme alibi --output_dir outputs/alibi --max_steps 300
    accelerate launch --config_file training/accelerate/ddp_gpu.yaml training/run_mlm.py settings.yaml --seed 1

All options can stand in one YAML or JSON file; flags after it take their place. The same command again resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import TrainingArguments

from training.argument_files import parse_arguments
from training.arguments import DataArguments, LoraArguments, ModelArguments, RunArguments, SchemeArguments
from training.healing_run import Healing
from training.language_modeling import RunInput, exit_status, train_language_model
from training.swapping import HealingArguments

_RUN = (ModelArguments, SchemeArguments, DataArguments, LoraArguments, RunArguments, TrainingArguments)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments

    def run() -> None:
        *parsed, healing = parse_arguments((*_RUN, HealingArguments), words, __doc__)
        given = RunInput(*parsed)
        heals = healing.swaps or healing.distill
        train_language_model(given, causal=False, healing=Healing(healing, given, causal=False) if heals else None)

    return exit_status("run_mlm", run)


if __name__ == "__main__":
    sys.exit(main())
