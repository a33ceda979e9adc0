"""The two small models that are compared, each a stock transformers class."""

from __future__ import annotations

from typing import Any

from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_posenc import get_scheme, patch_model
from training.settings import CompareSettings

#: Larger than BERT's 0.02, which is meant for 768 dimensions: at 128 it leaves attention uniform for too long.
INITIALIZER_RANGE = 0.05

#: Used where `--scheme_options` says nothing else. The paper's sinusoids have the size of its token vectors, because it
#: multiplies those by sqrt(hidden) (arXiv:1706.03762, section 3.4). Neither of these models does, so the sinusoids come
#: down to the tokens instead: at scale 1 they would drown them.
DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {"sinusoidal": {"scale": 0.07}}


def build_model(
    task: str, scheme: str, options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, settings: CompareSettings
) -> PreTrainedModel:
    """A new model with the scheme in place.

    The stock weights are drawn from `seed` before the patch, so that every scheme starts from the same ones. The model
    is built for `max_length` positions: a learned table has rows there, which training never reaches.

    Raises:
        UnsupportedError: if this architecture cannot take the scheme.
    """
    set_seed(settings.seed)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "intermediate_size": 2 * settings.hidden_size,
        "max_position_embeddings": settings.max_length,
        "initializer_range": INITIALIZER_RANGE,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if task == "causal":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True, use_cache=False))
    else:
        model = BertForMaskedLM(BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    patch_model(model, get_scheme(scheme).from_options(options))
    return model


def trainable_parameters(model: PreTrainedModel) -> int:
    """How many numbers the optimiser changes; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
