"""The small models that are compared, each a stock transformers class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc import UnknownNameError, patch_model, unpatch_model
from hf_posenc.metrics.forward import native_capacity
from hf_posenc.recipes import Swap, frozen_teacher, swap_scheme
from training.errors import SettingsError
from training.starting_model import build_model as starting_model, weights_digest
from training.study.cells import Cell
from training.study.corpus import starting_arguments
from training.study.data import CellData
from training.study.settings import StudySettings
from training.study.tasks import StudyTask
from training.study.training_settings import TrainingSettings
from training.swapping import SAMPLE_ROWS, sample_rows

#: Larger than BERT's 0.02, which is meant for 768 dimensions: at 128 it leaves attention uniform for too long.
INITIALIZER_RANGE = 0.05


def model_class(task: StudyTask) -> type[PreTrainedModel]:
    """The stock class that a task trains.

    Raises:
        SettingsError: if there is no such architecture, or it has no model of this kind.
    """
    classes = MODEL_FOR_CAUSAL_LM_MAPPING if task.causal else MODEL_FOR_MASKED_LM_MAPPING
    model_type = _model_type(task)
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in classes:
        # Only here, because it imports every architecture there is.
        known = [name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in classes]
        kind = "causal" if task.causal else "masked"
        raise SettingsError(
            f"--model_type: {UnknownNameError('architecture', model_type, known, owner=f'{kind} language models')}"
        )
    found: type[PreTrainedModel] | tuple[type[PreTrainedModel], ...] = classes[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, tuple) else found


def _model_type(task: StudyTask) -> str:
    return task.settings.model_type or ("llama" if task.causal else "bert")


def model_config(
    task: StudyTask, settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase, positions: int
) -> PreTrainedConfig:
    """The config of a task's models, with the sizes of the study wherever the architecture has a field for them.

    Args:
        task: what they are trained on, and their architecture.
        settings: for the sizes.
        tokenizer: for the vocabulary and the special tokens.
        positions: of the longest evaluated sequence.

    Raises:
        SettingsError: if the architecture has no field for a size, or refuses these.
    """
    model_type = _model_type(task)
    stock = CONFIG_MAPPING[model_type]()
    padding = tokenizer.pad_token_id or 0
    wanted: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_heads,
        "head_dim": settings.hidden_size // settings.num_heads,
        "intermediate_size": 2 * settings.hidden_size,
        # Some tables (RoBERTa's) begin behind the row of the padding token.
        "max_position_embeddings": positions + (padding + 1 if task.settings.model_type and not task.causal else 0),
        "initializer_range": INITIALIZER_RANGE,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    if task.causal:
        wanted["use_cache"] = False
    lacking = [name for name in _NEEDED if not hasattr(stock, name)]
    if lacking:
        raise SettingsError(f"--model_type {model_type} has no {lacking[0]} to set: its models cannot be made small.")
    dropout = {
        name: 0.0
        for name, value in stock.to_dict().items()
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop"))
    }
    try:
        return type(stock)(**dropout, **{name: value for name, value in wanted.items() if hasattr(stock, name)})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise SettingsError(f"--model_type {model_type} cannot have the sizes of this study: {error}") from error


_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def task_model(study: StudySettings, task: StudyTask, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """The class of a task's models, and a digest of pretrained weights; `None` for new ones.

    Raises:
        SettingsError: for a model that cannot be built, or is none of its kind.
    """
    if not task.pretrained:
        model_config(task, task.settings, tokenizer, task.settings.max_length)
        return model_class(task).__name__, None
    model = _pretrained(study, task, tokenizer, seed=0)
    return type(model).__name__, weights_digest(model)


def _pretrained(study: StudySettings, task: StudyTask, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    arguments = starting_arguments(study)
    loader = AutoModel if task.kind == "embedding" else None
    return starting_model(arguments, tokenizer, task.causal, seed, loader)


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
    model = _before_the_scheme(cell, data, tokenizer)
    config, swap = cell.entry.config, cell.entry.swap
    embeds = cell.task.kind == "embedding"
    teacher = frozen_teacher(model) if swap.distill or embeds else None
    started = None if cell.start is None else cell.start.result()
    if started is not None and started["config"] == cell.entry.config_dict() and not swap.swaps:
        return Beginning(model, teacher)  # an equal scheme stays as it was trained
    if config is None:
        # "native" keeps what a pretrained model has, and takes out what another cell has put in.
        return Beginning(model if cell.start is None else unpatch_model(model), teacher)
    if not swap.swaps:
        return Beginning(patch_model(model, config), teacher)
    sample = None
    if swap.initialization != "default":
        lengths = min(cell.settings.train_length, native_capacity(model) or cell.settings.train_length)
        sample = data.train.texts.rows(SAMPLE_ROWS, lengths) if embeds else sample_rows(data.train)
    made = swap_scheme(
        model,
        # By name, so that options left out can be taken from the old scheme.
        config.name,
        initialization=swap.initialization,
        sample=sample,
        table_extension=swap.table_extension,
        gradual=swap.gradual_steps > 0,
        **cell.entry.options,
    )
    return Beginning(model, teacher, made)


def _before_the_scheme(cell: Cell, data: CellData, tokenizer: PreTrainedTokenizerBase) -> Any:
    set_seed(cell.seed)
    if cell.start is not None:
        return _loader(cell.task).from_pretrained(cell.start.model_folder)
    if cell.task.pretrained:
        return _pretrained(cell.study, cell.task, tokenizer, cell.seed)
    return model_class(cell.task)(model_config(cell.task, cell.settings, tokenizer, data.positions))


def _loader(task: StudyTask) -> Any:
    if task.kind == "embedding":
        return AutoModel
    return AutoModelForCausalLM if task.causal else AutoModelForMaskedLM


def trainable_parameters(model: PreTrainedModel) -> int:
    """How many numbers the optimizer changes; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
