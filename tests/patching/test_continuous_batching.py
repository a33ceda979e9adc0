"""Continuous batching of a patched model: equal to plain generation, or refused at the call."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_posenc import UnsupportedError, unpatch_model
from hf_posenc.schemes import HierarchicalConfig
from tests.matrix.running import patched, tokens

YARN = {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 16}}
SETTINGS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def batched(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(**SETTINGS, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, block_size=32, max_batch_tokens=64),
        warmup=False,
    )
    assert [result.error for result in results.values()] == [None] * len(prompts)
    return [result.generated_tokens for result in results.values()]


def alone(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    result = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **SETTINGS, eos_token_id=None)
    tail: list[int] = result[0, len(prompt) :].tolist()
    return tail


@pytest.mark.parametrize(
    ("architecture", "scheme", "backend"),
    [
        ("llama_gqa", "none", "eager"),
        ("llama_gqa", YARN, "sdpa"),
        ("llama_gqa", "sinusoidal", "eager"),
        ("llama_gqa", "ssmax", "sdpa"),
        # Without a rotary function of its own a model maps keys on their way to the attention function.
        ("gpt2", YARN, "eager"),
        ("gpt2", "xpos", "sdpa"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["scheme"],
)
def test_batches_equal_prompts_alone(architecture: str, scheme: Any, backend: str) -> None:
    model = patched(architecture, scheme)
    model.set_attn_implementation(backend)
    prompts = [tokens(1, length, seed)[0].tolist() for seed, length in enumerate((5, 9, 12))]
    expected = [alone(model, prompt) for prompt in prompts]
    assert batched(model, prompts) == expected


BIAS = "adds a bias to the logit of every key, and keys lie in pages that the attention function alone reads"
WIDE = "its PopeMap makes heads 2 times as wide, and pages are as wide as the model's own heads"
LENGTHS = "it encodes a token by the length of its sequence, or by tokens that a cache does not keep"


@pytest.mark.parametrize(
    ("architecture", "scheme", "reason"),
    [
        ("llama_gqa", "alibi", BIAS),
        ("llama_gqa", "t5", BIAS),
        ("gpt2", "forget_gate", BIAS),
        ("llama_gqa", {"scheme": "self_extend", "window": 4, "group": 2}, BIAS),
        ("llama_gqa", "pope", WIDE),
        ("gpt2", "normalized_integer", LENGTHS),
        ("llama_gqa", HierarchicalConfig(separators=(7,)), LENGTHS),
        ("llama_gqa", {"scheme": "schedule", "layers": [{"scheme": "rope"}, {"scheme": "alibi"}]}, BIAS),
        ("bloom", "none", "BloomAttention computes its scores itself, without the attention interface"),
    ],
)
def test_what_pages_cannot_serve_is_refused_before_any_thread_starts(
    architecture: str, scheme: Any, reason: str
) -> None:
    model, before = patched(architecture, scheme), copy.deepcopy(ARGUMENTS)
    implementation = model.config._attn_implementation
    for call in (
        lambda one: one.generate_batch([[5, 6, 7]], **ARGUMENTS),
        lambda one: one.init_continuous_batching(**ARGUMENTS),
        lambda one: one.continuous_batching_context_manager(**ARGUMENTS).__enter__(),
        lambda one: one.generate(torch.tensor([[5, 6, 7]]), cache_implementation="paged"),
        lambda one: copy.deepcopy(one).generate_batch([[5, 6, 7]], **ARGUMENTS),
    ):
        with pytest.raises(UnsupportedError, match="Continuous batching cannot run the scheme") as refusal:
            call(model)
        assert reason in str(refusal.value)
        assert "Use model.generate() with a batch that is padded on the left." in str(refusal.value)
    assert model.config._attn_implementation == implementation
    assert ARGUMENTS["generation_config"].to_dict() == before["generation_config"].to_dict()


ARGUMENTS: dict[str, Any] = {"generation_config": GenerationConfig(**SETTINGS, eos_token_id=-1)}


def test_the_stock_model_underneath_batches_again() -> None:
    model, prompts = patched("llama_gqa", None), [[5, 6, 7], [9, 8, 7, 6]]
    expected = [alone(model, prompt) for prompt in prompts]
    again = unpatch_model(patched("llama_gqa", "alibi"))
    assert "init_continuous_batching" not in again.__dict__
    assert batched(again, prompts) == expected
