"""Layers that are called by other code in a loop have the positions that their arguments state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_posenc import SinkCache
from hf_posenc.errors import UnsupportedError
from tests.kits.decoding import left_padding
from tests.matrix.running import distance, drawn, patched, tokens

pytestmark = pytest.mark.usefixtures("without_gradients")
LENGTH, PADS = 12, 4
PIECES = (5, 1, 1, 5)
SCHEMES: list[Any] = [
    *("rope", "xpos", "string", "sinusoidal", "learned", "ssmax", "alibi", "t5", "fire", "shaw", "forget_gate", "repo"),
    *("self_extend", ["alibi", "rope"]),
]
GAPS = torch.tensor([[0, 1, 2, 5, 6, 7, 8, 20, 21, 22, 23, 24]])


def own_loop(model: Any, ids: Tensor, mask: Tensor, positions: Tensor | None, cache: Any) -> Iterator[Tensor]:
    """The hidden states of each piece behind the last layer."""
    start, width = 0, LENGTH if isinstance(cache, StaticCache) else 0
    for count in PIECES:
        stop = start + count
        keys = width or stop
        visible = mask[:, None, None, :keys].bool() & torch.ones(count, keys, dtype=torch.bool).tril(start)
        given = torch.arange(start, stop)[None] if positions is None else positions[:, start:stop]
        hidden = model.model.embed_tokens(ids[:, start:stop])
        options = {"position_embeddings": model.model.rotary_emb(hidden, given), "past_key_values": cache}
        if positions is not None:
            options["position_ids"] = given
        for layer in model.model.layers:
            hidden = layer(hidden, attention_mask=visible, **options)
        yield model.model.norm(hidden)
        start = stop


@pytest.mark.parametrize("kind", ["plain", "static", "padding", "gaps"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_loop_over_layers_equals_the_model(scheme: Any, kind: str) -> None:
    model, ids = drawn(patched("llama_gqa", scheme, attn_implementation="sdpa"), std=0.3), tokens(2, LENGTH)
    mask = left_padding(LENGTH, PADS if kind == "padding" else 0)
    positions = GAPS.expand(2, -1) if kind == "gaps" else None
    cache = StaticCache(model.config, max_cache_len=LENGTH) if kind == "static" else DynamicCache(config=model.config)
    expected = model.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    found = torch.cat([*own_loop(model, ids, mask, positions, cache)], dim=1)
    assert distance(found[mask.bool()], expected[mask.bool()]) <= 1e-4


def test_a_loop_over_layers_that_compute_scores_themselves() -> None:
    model, ids = patched("bloom", ["t5", "rope"]), tokens(2, LENGTH)
    stack, cache, start, found = model.transformer, DynamicCache(), 0, []
    expected = stack(ids, use_cache=False).last_hidden_state
    for count in PIECES:
        stop = start + count
        hidden = stack.word_embeddings_layernorm(stack.word_embeddings(ids[:, start:stop]))
        mask = torch.full((count, stop), torch.finfo(torch.float32).min).triu(1 + start)[None, None]
        for layer in stack.h:
            alibi = torch.zeros(2 * model.config.n_head, 1, stop)
            hidden = layer(hidden, alibi=alibi, attention_mask=mask, layer_past=cache, use_cache=True)[0]
        found.append(stack.ln_f(hidden))
        start = stop
    assert distance(torch.cat(found, dim=1), expected) <= 1e-4


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal"])
def test_a_cache_that_drops_tokens_is_refused(scheme: str) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(1, LENGTH)
    cache = SinkCache(sinks=1, window=4)
    with pytest.raises(UnsupportedError, match=r"was called outside its model with a SinkCache.*Call the whole model"):
        next(own_loop(model, ids, torch.ones_like(ids), None, cache))
