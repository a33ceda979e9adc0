"""Modes of generate, caches, pipelines and batching."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache, pipeline

from tests.integrations.subject import (
    NEW_TOKENS,
    argmax_decoding,
    assert_close,
    assert_same_tokens,
    bert,
    left_padded,
    llama,
    text,
    tokenizer,
    tokens,
)
from tests.integrations.tool import Tool
from tests.kits.decoding import decoded

_SETTINGS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
_STEP_BY_STEP = "most likely token after each whole forward, no cache"
_WITHOUT_CACHE = "the same call with use_cache=False"


def _against_no_cache(**settings: Any) -> Any:
    def check(scheme: Any) -> None:
        model, prompt = llama(scheme), tokens(1, 9)
        found = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            # A scheme may have switched the cache off in the model's own generation config.
            own = {"use_cache": use_cache} if model.generation_config.use_cache or not use_cache else {}
            found.append(model.generate(prompt, **(_SETTINGS | settings | own)))
        assert_same_tokens(*found)

    return check


def _against_argmax(rows: int = 1, padding: int = 0, **settings: Any) -> Any:
    def check(scheme: Any) -> None:
        model, prompt = llama(scheme), tokens(rows, 9)
        found = model.generate(**left_padded(prompt, padding), **(_SETTINGS | settings))
        assert_same_tokens(found[:, padding:], argmax_decoding(model, prompt))

    return check


def _streaming(scheme: Any) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Collected(BaseStreamer):
        def __init__(self) -> None:
            self.ids: list[torch.Tensor] = []

        def put(self, value: torch.Tensor) -> None:
            self.ids.append(value.reshape(-1))

        def end(self) -> None:
            pass

    model, prompt, streamer = llama(scheme), tokens(1, 9), Collected()
    model.generate(prompt, streamer=streamer, **_SETTINGS)
    assert_same_tokens(torch.cat(streamer.ids).unsqueeze(0), argmax_decoding(model, prompt))


def _assisted(scheme: Any) -> None:
    model, prompt = llama(scheme), tokens(1, 9)
    assistant = llama(scheme, num_hidden_layers=1)
    found = model.generate(prompt, assistant_model=assistant, **_SETTINGS)
    assert_same_tokens(found, argmax_decoding(model, prompt))


def _early_exit(scheme: Any) -> None:
    model, prompt = llama(scheme), tokens(1, 9)
    expected, layers = argmax_decoding(model, prompt), model.config.num_hidden_layers
    try:
        found = model.generate(prompt, assistant_early_exit=1, **_SETTINGS)
        assert_same_tokens(found, expected)
    finally:
        assert model.config.num_hidden_layers == layers, "the config was left changed"
        assert_same_tokens(model.generate(prompt, **_SETTINGS), expected)


def _sliding_layers(scheme: Any) -> None:
    from tests.matrix.running import patched

    model, prompt = patched("gemma3_two_rotaries", scheme), tokens(2, 9)
    model.generation_config.eos_token_id = None
    assert_same_tokens(model.generate(prompt, **_SETTINGS), argmax_decoding(model, prompt))


def _quantised_cache(scheme: Any) -> None:
    """Keys and values of 8 bits move the outputs by a percent or two; other positions move them by their own size."""
    from transformers import QuantizedCache

    model, prompt = llama(scheme, hidden_size=128, head_dim=32), tokens(1, 12)
    cache = QuantizedCache("hqq", model.config, nbits=8, axis_key=1, axis_value=1, q_group_size=16, residual_length=4)
    with torch.no_grad():
        expected = model(prompt, use_cache=False).logits[:, 8:]
    assert_close(decoded(model, prompt, cache, [8, 1, 1, 1, 1])[:, 8:], expected, tolerance=0.05)


def _chunks(scheme: Any) -> None:
    """A prompt in three pieces."""
    model, prompt = llama(scheme), tokens(2, 12)
    with torch.no_grad():
        expected = model(prompt, use_cache=False).logits
    assert_close(decoded(model, prompt, DynamicCache(), [4, 4, 4]), expected)


def _static_object(scheme: Any) -> None:
    model, prompt = llama(scheme), tokens(2, 9)
    cache = StaticCache(config=model.config, max_cache_len=32)
    found = model.generate(prompt, past_key_values=cache, **_SETTINGS)
    assert_same_tokens(found, argmax_decoding(model, prompt))


def _crop(scheme: Any) -> None:
    """A conversation that returns to an earlier turn."""
    model, prompt, cache = llama(scheme), tokens(1, 12), DynamicCache()
    other = torch.cat((prompt[:, :7], tokens(1, 4, seed=5)), dim=1)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        cache.crop(-5)
        found = model(other[:, 7:], past_key_values=cache).logits
        expected = model(other, use_cache=False).logits[:, 7:]
    assert_close(found, expected)


def _continuous_batching(scheme: Any) -> None:
    from transformers import ContinuousBatchingConfig

    model = llama(scheme)
    prompts = [tokens(1, length)[0].tolist() for length in (9, 5, 7)]
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    paged = ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=64)
    answers = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=paged)
    found = {tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in answers.values()}
    model.set_attn_implementation("sdpa")
    for prompt in prompts:
        expected = argmax_decoding(model, torch.tensor([prompt]))[0, len(prompt) :].tolist()
        assert found[tuple(prompt)] == expected


def _text_generation_pipeline(scheme: Any) -> None:
    model, prompts = llama(scheme), tokens(2, 9)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer(), batch_size=2)
    longer = torch.cat((tokens(1, 3, seed=4)[0], prompts[1]))
    answers = generator([text(prompts[0]), text(longer)], return_tensors=True, **_SETTINGS)
    for prompt, (answer,) in zip((prompts[0], longer), answers, strict=True):
        found = torch.tensor([answer["generated_token_ids"]])
        assert_same_tokens(found[:, -len(prompt) - NEW_TOKENS :], argmax_decoding(model, prompt.unsqueeze(0)))


def _fill_mask_pipeline(scheme: Any) -> None:
    model, ids = bert(scheme), tokens(1, 9)
    ids[0, 4] = 3
    words = text(ids[0]).split()
    words[4] = "[MASK]"
    (best,) = pipeline("fill-mask", model=model, tokenizer=tokenizer(), top_k=1)(" ".join(words))
    with torch.no_grad():
        expected = model(ids).logits[0, 4]
    assert best["token"] == int(expected.argmax())


def _feature_extraction_pipeline(scheme: Any) -> None:
    model, ids = bert(scheme).bert, tokens(1, 9)
    found = pipeline("feature-extraction", model=model, tokenizer=tokenizer(), return_tensors=True)(text(ids[0]))
    with torch.no_grad():
        assert_close(found, model(ids).last_hidden_state)


TOOLS = [
    Tool("Generating", "greedy", _against_argmax(rows=2), _STEP_BY_STEP),
    Tool("Generating", "greedy, left-padded batch", _against_argmax(rows=2, padding=3), "each row alone, no cache"),
    Tool("Generating", "sampling", _against_no_cache(do_sample=True, top_k=20), _WITHOUT_CACHE),
    Tool("Generating", "beam search", _against_no_cache(num_beams=3), _WITHOUT_CACHE),
    Tool("Generating", "beam sampling", _against_no_cache(num_beams=3, do_sample=True), _WITHOUT_CACHE),
    Tool("Generating", "streaming", _streaming, _STEP_BY_STEP),
    Tool("Generating", "chunked prefill", _against_argmax(prefill_chunk_size=4), _STEP_BY_STEP),
    Tool("Generating", "prompt lookup", _against_argmax(prompt_lookup_num_tokens=3), _STEP_BY_STEP),
    Tool("Generating", "assisted decoding", _assisted, _STEP_BY_STEP),
    Tool("Generating", "early exit", _early_exit, _STEP_BY_STEP + "; the next call too"),
    Tool("Generating", "continuous batching (generate_batch)", _continuous_batching, _STEP_BY_STEP),
    Tool("Generating", "pipeline, text-generation, batched", _text_generation_pipeline, _STEP_BY_STEP),
    Tool("Generating", "pipeline, fill-mask (BERT)", _fill_mask_pipeline, "a plain forward"),
    Tool("Generating", "pipeline, feature-extraction (BERT)", _feature_extraction_pipeline, "a plain forward"),
    Tool("Caches", "dynamic, in chunks", _chunks, "one forward of the whole"),
    Tool("Caches", "dynamic, cropped", _crop, "one forward of the whole"),
    Tool("Caches", "static", _against_argmax(cache_implementation="static", disable_compile=True), _STEP_BY_STEP),
    Tool("Caches", "static, made by hand", _static_object, _STEP_BY_STEP),
    Tool("Caches", "sliding layers (Gemma 3)", _sliding_layers, _STEP_BY_STEP),
    Tool("Caches", "quantised (HQQ, 8 bits)", _quantised_cache, "one forward of the whole, within 5 %", ("hqq",)),
]
