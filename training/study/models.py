"""The small models that are compared, each a stock transformers class."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc import patch_model, unpatch_model
from training.study.cells import Cell
from training.study.tasks import StudyTask

#: Larger than BERT's 0.02, which is meant for 768 dimensions: at 128 it leaves attention uniform for too long.
INITIALIZER_RANGE = 0.05


def model_class(task: StudyTask) -> type[PreTrainedModel]:
    """The stock class that a task trains."""
    return LlamaForCausalLM if task.causal else BertForMaskedLM


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
    settings = cell.settings
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "intermediate_size": 2 * settings.hidden_size,
        "max_position_embeddings": positions,
        "initializer_range": INITIALIZER_RANGE,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if cell.task.causal:
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True, use_cache=False))
    else:
        model = BertForMaskedLM(BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
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
