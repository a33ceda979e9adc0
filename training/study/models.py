"""The models that a study trains, each a stock transformers class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc import UnknownNameError, patch_model, unpatch_model
from hf_posenc.metrics.forward import native_capacity
from hf_posenc.metrics.generalization.examples import end_token
from hf_posenc.recipes import Swap, frozen_teacher
from training.errors import SettingsError
from training.starting_model import build_model as starting_model, weights_digest
from training.study.cells import IMAGES, Cell, StudyTask
from training.study.corpus import starting_arguments
from training.study.data import CellData
from training.study.settings import StudySettings, TrainingSettings
from training.swapping import SAMPLE_ROWS, sample_rows

#: Larger than BERT's 0.02, which is meant for 768 dimensions: at 128 it leaves attention uniform for too long.
INITIALIZER_RANGE = 0.05
_NOT_BUILT = (
    ValueError, TypeError, KeyError, AttributeError, ArithmeticError, ImportError, RuntimeError, StrictDataclassError,
)  # fmt: skip
#: Fields of a config that a study sets, and what sets them.
_SET = {
    "hidden_size": "--hidden_size",
    "num_hidden_layers": "--num_layers",
    "num_attention_heads": "--num_heads",
    "model_type": "--model_type",
    "vocab_size": "the tokenizer",
    "num_labels": "the pictures",
    "image_size": "--train_resolution",
    "patch_size": "--patch_size",
}
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def task_model(study: StudySettings, task: StudyTask, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """The class of a task's models, and a digest of pretrained weights; `None` for new ones.

    Raises:
        SettingsError: for a model that cannot be built, or does not fit the task.
    """
    if task.name == IMAGES:
        return type(new_image_model(task, task.settings, classes=1)).__name__, None
    if not task.pretrained:
        return type(new_model(task, task.settings, tokenizer, task.lengths[-1])).__name__, None
    model = starting_model(starting_arguments(study), tokenizer, task.causal, seed=0, loader=_loader(task))
    return type(model).__name__, weights_digest(model)


def new_model(task: StudyTask, settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase, positions: int) -> Any:
    """A model with new weights, with the sizes of the study wherever its architecture has a field for them.

    Args:
        task: what it is trained on, and its architecture.
        settings: for the sizes.
        tokenizer: for the vocabulary and the special tokens.
        positions: of the longest evaluated sequence.

    Raises:
        SettingsError: if there is no such architecture for the task, or it cannot have these sizes.
    """
    model_type = task.settings.model_type or ("llama" if task.causal else "bert")
    stock = _stock_config(model_type)
    padding = tokenizer.pad_token_id or 0
    inner = 2 * settings.hidden_size
    wanted: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_heads,
        "head_dim": settings.hidden_size // settings.num_heads,
        "intermediate_size": inner,
        # Some tables (RoBERTa's) begin behind the row of the padding token.
        "max_position_embeddings": positions + (padding + 1 if task.settings.model_type and not task.causal else 0),
        "initializer_range": INITIALIZER_RANGE,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    } | ({"use_cache": False} if task.causal or task.encoder_decoder else {})
    if task.encoder_decoder:
        for part in ("encoder", "decoder"):
            wanted |= {f"{part}_layers": settings.num_layers, f"{part}_attention_heads": settings.num_heads}
            wanted |= {f"{part}_ffn_dim": inner}
        # In Marian and T5, and their descendants.
        wanted |= {"decoder_vocab_size": len(tokenizer), "num_decoder_layers": settings.num_layers, "d_ff": inner}
        wanted |= {"init_std": INITIALIZER_RANGE, "forced_eos_token_id": None}
    lacking = [name for name in _NEEDED if not hasattr(stock, name)]
    if lacking:
        raise SettingsError(f"--model_type {model_type} has no {lacking[0]} to set: its models cannot be made small.")
    fields = _without_dropout(stock) | {name: value for name, value in wanted.items() if hasattr(stock, name)}
    if task.encoder_decoder:
        # Not every config has a field for it. Some decoders mask a padding token, even if it is the first.
        fields["decoder_start_token_id"] = end_token(tokenizer)
    return _built(task, stock, fields)


def new_image_model(task: StudyTask, settings: TrainingSettings, classes: int) -> Any:
    """An image classifier with new weights, with the sizes of the study.

    Args:
        task: for its architecture.
        settings: for the sizes.
        classes: that it tells apart.

    Raises:
        SettingsError: if there is no such architecture, or it cannot have these sizes.
    """
    model_type = task.settings.model_type or "vit"
    stock = _stock_config(model_type)
    wanted: dict[str, Any] = {
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "intermediate_size": 2 * settings.hidden_size,
        "image_size": settings.train_resolution,
        "patch_size": settings.patch_size,
        "initializer_range": INITIALIZER_RANGE,
    }
    lacking = [
        name for name in ("hidden_size", "num_hidden_layers", "image_size", "patch_size") if not hasattr(stock, name)
    ]
    if lacking:
        raise SettingsError(f"--model_type {model_type} has no {lacking[0]} to set: its models cannot be made small.")
    fields = _without_dropout(stock) | {name: value for name, value in wanted.items() if hasattr(stock, name)}
    return _built(task, stock, fields, classes)


def _stock_config(model_type: str) -> PreTrainedConfig:
    if model_type not in CONFIG_MAPPING:
        raise SettingsError(f"--model_type: {UnknownNameError('architecture', model_type, CONFIG_MAPPING)}")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    except _NOT_BUILT as error:
        raise SettingsError(f"--model_type {model_type} has no default config to start from: {error}") from error
    return config


def _built(task: StudyTask, stock: PreTrainedConfig, fields: dict[str, Any], classes: int | None = None) -> Any:
    """A model with new weights. Fields of the config go by the names of the architecture, such as `n_embd`."""
    own, overrides = stock.attribute_map, task.settings.config_overrides
    for name in overrides:
        if not hasattr(stock, name):
            unknown = UnknownNameError("field", name, stock.to_dict(), owner=type(stock).__name__)
            raise SettingsError(f"--config_overrides: {unknown}")
        setting = next((how for field, how in _SET.items() if own.get(field, field) == own.get(name, name)), None)
        if setting is not None:
            raise SettingsError(f"--config_overrides has {name}, which {setting} determines.")
    given = {own.get(name, name): value for name, value in (fields | overrides).items()}
    try:
        config = type(stock)(**given)
        if classes is not None:
            config.num_labels = classes
        model = _loader(task).from_config(config)
    except _NOT_BUILT as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(
            f"--model_type {stock.model_type} cannot be used for the task {task.name!r}: {reason}"
        ) from error
    for name, value in overrides.items():
        found = getattr(config, name)
        if found != value and not (isinstance(found, dict) and found.items() >= value.items()):
            raise SettingsError(f"--config_overrides: {type(config).__name__} turns {name} = {value!r} into {found!r}.")
    return model


def _without_dropout(stock: PreTrainedConfig) -> dict[str, float]:
    return {
        name: 0.0
        for name, value in stock.to_dict().items()
        if isinstance(value, float) and ("dropout" in name or "layerdrop" in name or name.endswith("_pdrop"))
    }


def _loader(task: StudyTask) -> Any:
    if task.name == IMAGES:
        return AutoModelForImageClassification
    if task.kind == "embedding":
        return AutoModel
    if task.encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForCausalLM if task.causal else AutoModelForMaskedLM


@dataclass
class Beginning:
    """What a training begins with.

    Args:
        model: with its scheme in place.
        teacher: the model before the swap, frozen, where the training learns from it.
        swap: what took over from the old scheme, and how well; `None` for a plain patch.
    """

    model: Any
    teacher: Any = None
    swap: Swap[Any] | None = None


def begin(cell: Cell, data: CellData, tokenizer: PreTrainedTokenizerBase) -> Beginning:
    """The model of a cell as its training begins.

    New weights are drawn from the cell's seed before the patch, so that every scheme starts from the same ones. They
    are built for all the positions that are evaluated: a learned table has rows there, which training never reaches.

    Args:
        cell: which one.
        data: for the length of the longest sequence, and for the text that a start is fitted on.
        tokenizer: for the size of the vocabulary.

    Raises:
        UnsupportedError: if this architecture cannot take the scheme.
        ValueError: for a swap that cannot be made.
    """
    task, config, swap = cell.task, cell.config, cell.asked.swap
    set_seed(cell.seed)
    if cell.start is not None:
        model = _loader(task).from_pretrained(cell.start.model_folder)
    elif task.pretrained:
        arguments = starting_arguments(cell.study)
        model = starting_model(arguments, tokenizer, task.causal, cell.seed, loader=_loader(task))
    elif data.pictures is not None:
        model = new_image_model(task, cell.settings, len(data.pictures.classes))
    else:
        model = new_model(task, cell.settings, tokenizer, data.positions)
    embeds = task.kind == "embedding"
    teacher = frozen_teacher(model) if swap.distill or embeds else None
    started = None if cell.start is None else cell.start.result()
    if started is not None and started["config"] == cell.head()["config"] and not swap.swaps:
        return Beginning(model, teacher)  # an equal scheme stays as it was trained
    if config is None:
        # "native" keeps what a pretrained model has, and takes out what another cell has put in.
        return Beginning(model if cell.start is None else unpatch_model(model), teacher)
    if not swap.swaps:
        return Beginning(patch_model(model, config), teacher)
    sample = None
    if swap.initialization != "default":
        length = min(cell.settings.train_length, native_capacity(model) or cell.settings.train_length)
        sample = data.train.texts.rows(SAMPLE_ROWS, length) if embeds else sample_rows(data.train)
        if task.encoder_decoder:
            # The encoder never reads an answer.
            sample = data.collate([data.train[index] for index in range(SAMPLE_ROWS)])["input_ids"]
    # By name, so that options left out can be taken from the old scheme.
    return Beginning(model, teacher, swap.swap(model, config.name, sample, cell.options))
