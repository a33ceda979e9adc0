"""Tiny random models of different build, the schemes they are saved with, and how their outputs are compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    RobertaForMaskedLM,
    T5ForConditionalGeneration,
)

from tests.models import tiny

VOCABULARY = 64
LENGTH = 14


def llama(**options: Any) -> LlamaForCausalLM:
    return tiny("LlamaForCausalLM", vocab_size=VOCABULARY, **options)


def gpt2() -> GPT2LMHeadModel:
    return tiny("GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=48, bos_token_id=0, eos_token_id=0)


def bert() -> BertForMaskedLM:
    return tiny("BertForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=48)


def roberta() -> RobertaForMaskedLM:
    return tiny("RobertaForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=50)


def t5(**options: Any) -> T5ForConditionalGeneration:
    return tiny("T5ForConditionalGeneration", vocab_size=VOCABULARY, **options)


def qwen2_moe() -> Qwen2MoeForCausalLM:
    return tiny(
        "Qwen2MoeForCausalLM", vocab_size=VOCABULARY, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip


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

    @property
    def every_route(self) -> bool:
        """Whether it is saved in every form and loaded by every function: one or two of each architecture."""
        return self.learned or self.build is t5


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


def as_format_1(folder: Path) -> Path:
    """Makes the JSON file of a scheme without its model one of format 1, which has no hash of its content."""
    path = folder / "position_encoding.json"
    entry = json.loads(path.read_text()) | {"format": 1}
    path.write_text(json.dumps({name: entry[name] for name in entry if name not in ("sha256", "adapter_weights")}))
    return path


def write_reference(model: PreTrainedModel, folder: Path) -> None:
    """What a fresh process needs to check that it loaded the same model."""
    place = folder / "reference"
    place.mkdir(parents=True)
    reference = {"ids": token_ids(), "outputs": outputs(model).float().contiguous()}
    reference["bfloat16"] = outputs(copy.deepcopy(model).to(torch.bfloat16)).float().contiguous()
    save_file(reference, place / "reference.safetensors")
    (place / "architecture").write_text(type(model).__name__)
