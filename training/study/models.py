"""The small models that are compared, each a stock transformers class."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc import UnknownNameError, patch_model, unpatch_model
from training.errors import SettingsError
from training.study.cells import Cell
from training.study.tasks import StudyTask
from training.study.training_settings import TrainingSettings

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


def build_model(cell: Cell, tokenizer: PreTrainedTokenizerBase, positions: int) -> PreTrainedModel:
    """The model of a cell as its training begins, with the scheme in place.

    New weights are drawn from the cell's seed before the patch, so that every scheme starts from the same ones. They
    are built for all the positions that are evaluated: a learned table has rows there, which training never reaches.

    Args:
        cell: which one.
        tokenizer: for the size of the vocabulary.
        positions: of the longest evaluated sequence.

    Raises:
        UnsupportedError: if this architecture cannot take the scheme.
    """
    set_seed(cell.seed)
    if cell.start is not None:
        return _continued(cell, cell.start)
    model: PreTrainedModel = model_class(cell.task)(model_config(cell.task, cell.settings, tokenizer, positions))
    if cell.entry.config is not None:
        patch_model(model, cell.entry.config)
    return model


def _continued(cell: Cell, start: Cell) -> PreTrainedModel:
    """The trained model of another cell, with this cell's scheme; an equal scheme stays as it was trained."""
    loader = AutoModelForCausalLM if cell.task.causal else AutoModelForMaskedLM
    model: PreTrainedModel = loader.from_pretrained(start.model_folder)
    if cell.entry.config == start.entry.config:
        return model
    if cell.entry.config is None:
        return unpatch_model(model)
    return patch_model(model, cell.entry.config)


def trainable_parameters(model: PreTrainedModel) -> int:
    """How many numbers the optimizer changes; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
