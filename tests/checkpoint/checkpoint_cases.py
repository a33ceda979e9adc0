"""Tiny random models of different build, the schemes they are saved with, and how their outputs are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 64
LENGTH = 14


def llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **options,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=48, bos_token_id=0, eos_token_id=0
        )
    )


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=48,
        )
    )


def roberta() -> RobertaForMaskedLM:
    return RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=50,
        )
    )


def t5(**options: Any) -> T5ForConditionalGeneration:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, **options))


def qwen2_moe() -> Qwen2MoeForCausalLM:
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
        )
    )


@dataclass(frozen=True)
class Case:
    """A model of one family with one scheme."""

    build: Callable[[], PreTrainedModel]
    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    learned: bool = False

    @property
    def name(self) -> str:
        return f"{self.build.__name__}-{self.scheme}"


CASES = [
    Case(llama, "none"),
    Case(llama, "alibi"),
    Case(llama, "t5", learned=True),
    Case(llama, "learned", learned=True),
    Case(llama, "sinusoidal"),
    Case(llama, "rope", {"theta": 500.0}),
    Case(llama, "p_rope", {"fraction": 0.5}),
    Case(gpt2, "alibi"),
    Case(gpt2, "rope"),
    Case(gpt2, "learned", {"num_positions": 80}, learned=True),
    Case(bert, "none"),
    Case(bert, "t5", learned=True),
    Case(bert, "rope"),
    Case(roberta, "learned", {"num_positions": 64}, learned=True),
    Case(roberta, "alibi"),
    Case(t5, "alibi"),
    Case(t5, "rope"),
    Case(qwen2_moe, "alibi"),
    Case(qwen2_moe, "t5", learned=True),
]


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Gives every weight a distinct, clearly visible value, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "position_encoding" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def token_ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs(model: PreTrainedModel, ids: torch.Tensor | None = None) -> torch.Tensor:
    """`(batch, length, vocabulary or hidden)` of one forward call."""
    ids = token_ids() if ids is None else ids
    arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, use_cache=False, **arguments)[0]


def write_reference(model: PreTrainedModel, folder: Path) -> None:
    """What a fresh process needs to check that it loaded the same model."""
    place = folder / "reference"
    place.mkdir(parents=True)
    reference = {"ids": token_ids(), "outputs": outputs(model).float().contiguous()}
    reference["bfloat16"] = outputs(copy.deepcopy(model).to(torch.bfloat16)).float().contiguous()
    save_file(reference, place / "reference.safetensors")
    (place / "architecture").write_text(type(model).__name__)
