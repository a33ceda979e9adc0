r"""Trains a causal language model, from scratch or from pretrained weights, with any position encoding.

    python training/run_clm.py --model_type llama --config_overrides hidden_size=64,num_hidden_layers=2 \
        --tokenizer_name bytes --scheme alibi --output_dir outputs/alibi --max_steps 300
    accelerate launch --config_file training/accelerate/ddp_gpu.yaml training/run_clm.py settings.yaml --seed 1

All options can be in one YAML or JSON file, and flags after it override it. Run the same command again to resume.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, which has modules of common names

from transformers import TrainingArguments

from hf_posenc.patching.place.lengths import context_length, update_tokenizer_length
from hf_posenc.recipes import frozen_teacher
from training.argument_files import parse_arguments
from training.arguments import DataArguments, LoraArguments, ModelArguments, RunArguments, SchemeArguments, refuse
from training.data.blocking import packed_batches
from training.data.text import load_rows
from training.errors import SettingsError
from training.one_run import exit_status, finish, set_up, start, train_and_evaluate, trains
from training.starting_model import add_lora, apply_scheme, build_model, check_scheme, load_tokenizer
from training.swapping import HealingArguments
from training.trainer import data_seed, training_steps

#: All options, in the order of the arguments of `train`.
OPTIONS = (
    ModelArguments, SchemeArguments, DataArguments, LoraArguments, RunArguments, TrainingArguments, HealingArguments,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `exit_status`."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status("run_clm", lambda: train(*parse_arguments(OPTIONS, words, __doc__)))


def train(
    model_options: ModelArguments,
    scheme: SchemeArguments,
    data: DataArguments,
    lora: LoraArguments,
    run: RunArguments,
    arguments: TrainingArguments,
    healing: HealingArguments,
    *,
    causal: bool = True,
) -> dict[str, float]:
    """Trains and evaluates. Resumes if the output folder contains checkpoints of this run.

    Returns:
        The content of `all_results.json`.
    """
    # Options: invalid ones are refused before anything is written.
    set_up(arguments, model_options, scheme, data, lora, healing)
    if causal:
        refuse("is for masked language models. Train them with run_mlm.py.", ["mlm_probability"], data)
    else:
        of_causal = ["pose_length", "self_distill"]
        refuse("is for causal language models. Train them with run_clm.py.", of_causal, data, healing)
    if data.pose_length is not None and healing.teaches:
        raise SettingsError(
            "--pose_length trains at positions that the teacher of --distill or --self_distill does not know. Use only "
            "one of them."
        )
    check_scheme(scheme)

    # Data: rows of tokens. No document is in both parts.
    tokenizer = load_tokenizer(model_options, causal)
    with arguments.main_process_first(desc="loading and tokenising"):
        train_rows, eval_rows, text = load_rows(data, tokenizer, causal, seed=data_seed(arguments))
    if trains(arguments):
        healing.check_run(arguments, training_steps(len(train_rows), arguments), lora=lora.lora)

    # Model: the stock model, and a frozen copy if it is also the teacher.
    model = build_model(model_options, tokenizer, causal, seed=arguments.seed)
    teacher = frozen_teacher(model) if healing.distill else None
    native_length = context_length(model)

    # Patch: the scheme replaces the native one, and the tokenizer gets its length.
    apply_scheme(model, scheme, healing, train_rows)
    update_tokenizer_length(tokenizer, model, native_length)
    batches = packed_batches(model, data, causal, vocabulary=len(tokenizer))
    if lora.lora:
        model = add_lora(model, lora, causal)

    # Trainer: a run only resumes if the settings that determine its curve are the same.
    decisive: dict[str, Any] = {
        "objective": "causal" if causal else "masked", "train_text": train_rows.stream.digest(),
        "block_size": data.block_size, "packing": data.packing,
        "mlm_probability": None if causal else data.mlm_probability, **asdict(scheme), **asdict(lora),
        **healing.settings(),
    }  # fmt: skip
    if data.pose_length is not None:
        decisive |= {"pose_length": data.pose_length, "pose_chunks": data.pose_chunks}
    if arguments.load_best_model_at_end:
        decisive["validation_text"] = eval_rows.stream.digest()
    trainer, checkpoint = start(
        run, arguments, model, decisive, causal=causal, train_dataset=train_rows, eval_dataset=eval_rows,
        data_collator=batches, processing_class=tokenizer, callbacks=healing.callbacks(),
        loss_hooks=healing.loss_hooks(model, teacher, causal),
    )  # fmt: skip

    # Train, evaluate and save.
    logging.getLogger("run_clm" if causal else "run_mlm").info("%s", text)
    results: dict[str, float] = {"train_rows": len(train_rows), "eval_rows": len(eval_rows)}
    results |= train_and_evaluate(trainer, checkpoint, adapter=lora.lora)
    finish(trainer, results)
    return results


if __name__ == "__main__":
    sys.exit(main())
