"""Caches that other code changes, fills or copies: the next call is correct or refused.

Right is what the same rows give without a cache.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_posenc import SinkCache, UnsupportedError, accept_cache, patch_model, unpatch_model
from tests import versions
from tests.matrix.running import distance, patched, tokens
from tests.thinning import in_turn

pytestmark = pytest.mark.usefixtures("without_gradients")
ROWS, CACHED, LENGTH = 3, 10, 14
#: Two tiny layers in float32.
CLOSE = 1e-4


def ids_of_rows() -> Tensor:
    return tokens(ROWS, LENGTH)


def filled(model: Any, cache: Any = None, ids: Tensor | None = None, **given: Any) -> Any:
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids_of_rows()[:, :CACHED] if ids is None else ids, past_key_values=cache, **given)
    return cache


def each(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """The same change of keys and values in every layer, by hand."""

    def by_hand(cache: Any) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)

    return by_hand


def in_place(cache: Any) -> None:
    order = torch.arange(CACHED).flip(0)
    for layer in cache.layers:
        layer.keys.copy_(layer.keys.index_select(2, order))


def by_layer(name: str, *arguments: Any) -> Callable[[Any], None]:
    def call(cache: Any) -> None:
        for layer in cache.layers:
            getattr(layer, name)(*arguments)

    return call


ORDER = torch.tensor([2, 0, 1])
#: The change, the remaining rows, and the remaining number of tokens of each.
FOLLOWED: dict[str, tuple[Callable[[Any], Any], list[int], int]] = {
    "reorder_cache": (lambda cache: cache.reorder_cache(ORDER), [2, 0, 1], CACHED),
    "a row twice": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0], CACHED),
    "batch_select_indices": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1], CACHED),
    "batch_repeat_interleave": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], CACHED),
    "crop": (lambda cache: cache.crop(-3), [0, 1, 2], CACHED - 3),
    "crop, then reorder": (lambda cache: (cache.crop(-3), cache.reorder_cache(ORDER)), [2, 0, 1], CACHED - 3),
    "by layers": (by_layer("batch_repeat_interleave", 2), [0, 0, 1, 1, 2, 2], CACHED),
    "rows by hand": (each(lambda one: one[ORDER]), [2, 0, 1], CACHED),
    "end cut by hand": (each(lambda one: one[:, :, :-4]), [0, 1, 2], CACHED - 4),
    "end cut into a copy": (each(lambda one: one[:, :, :-4].clone()), [0, 1, 2], CACHED - 4),
    "rows and end by hand": (each(lambda one: one[ORDER, :, :6]), [2, 0, 1], 6),
}
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "first tokens dropped": each(lambda one: one[:, :, 3:]),
    "tokens dropped between": each(lambda one: one[:, :, [0, 1, 5, 6, 7, 8, 9]]),
    "tokens moved": each(lambda one: one[:, :, [*range(4, CACHED), *range(4)]]),
    "gathered in place": in_place,
    "cut in place": lambda cache: [setattr(layer.keys, "data", layer.keys[:, :, 3:]) for layer in cache.layers],
    "merged": each(lambda one: torch.cat((one, one), 2)),
    "own keys": each(torch.randn_like),
    "one layer cut": lambda cache: each(lambda one: one[:, :, :-2])(type("", (), {"layers": cache.layers[:1]})),
    "appended": lambda cache: [
        cache.update(layer.keys[:, :, :1], layer.values[:, :, :1], index) for index, layer in enumerate(cache.layers)
    ],
}
SCHEMES: list[Any] = ["alibi", "t5", "shaw", "forget_gate"]
GAPS = torch.arange(LENGTH) + torch.tensor([[0], [5], [9]]) * (torch.arange(LENGTH) > 4)


#: Which keeps fewer tokens than are cached here.
SINKS = {"scheme": "attention_sinks", "inner": "t5", "sinks": 2, "window": 6}


def sink_cache() -> SinkCache:
    return SinkCache(sinks=2, window=6)


OF_ROWS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")


@pytest.mark.parametrize(
    ("change", "scheme", "gaps"),
    [*in_turn(FOLLOWED, SCHEMES, [False, True]), *itertools.product(OF_ROWS, [SINKS], [False, True])],
    ids=str,
)
def test_rows_and_ends_are_followed(change: str, scheme: Any, gaps: bool) -> None:
    model, ids = patched("llama_gqa", scheme), ids_of_rows()
    positions = GAPS if gaps else torch.arange(LENGTH).expand(ROWS, -1)
    do, rows, left = FOLLOWED[change]
    expected = model(ids, position_ids=positions).logits[rows, left:]
    cache = filled(model, sink_cache() if scheme is SINKS else None, position_ids=positions[:, :CACHED])
    do(cache)
    for one in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        given = {"position_ids": positions[rows, left:], "past_key_values": one}
        assert distance(model(ids[rows, left:], **given).logits, expected) <= CLOSE


@pytest.mark.parametrize(("change", "scheme"), in_turn(UNKNOWN, SCHEMES))
def test_other_changes_are_refused(scheme: str, change: str) -> None:
    model, ids = patched("llama_gqa", scheme), ids_of_rows()
    cache = filled(model)
    UNKNOWN[change](cache)
    for one in (copy.deepcopy(cache), cache):
        with pytest.raises(UnsupportedError, match="tokens were dropped, moved, added or overwritten"):
            model(ids[:, CACHED:], past_key_values=one)


@pytest.mark.parametrize(
    ("scheme", "cached", "message"),
    [
        ("alibi", 0, "were not encoded"),
        ("alibi", CACHED, "tokens were dropped, moved, added"),
        # Its layers may hold as many keys, but of different tokens.
        (SINKS, 0, "were not encoded"),
        (SINKS, CACHED, "a call did not end"),
    ],
    ids=str,
)
def test_the_cache_of_a_call_that_failed_is_not_continued(scheme: Any, cached: int, message: str) -> None:
    """Some layers hold the tokens of that call."""
    model, ids = patched("llama_gqa", scheme), ids_of_rows()
    cache = sink_cache() if scheme is SINKS else DynamicCache(config=model.config)
    if cached:
        filled(model, cache, ids[:, :cached])
    with model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(ids[:, cached:], past_key_values=cache)
    with pytest.raises(UnsupportedError, match=message):
        model(ids[:, cached:], past_key_values=cache)


@pytest.mark.parametrize("change", ["first tokens dropped", "tokens dropped between"])
def test_keys_that_carry_their_position_are_as_in_stock(change: str) -> None:
    model, stock, ids = patched("llama_gqa", "native"), patched("llama_gqa", None), ids_of_rows()
    found = []
    for one in (model, stock):
        cache = filled(one)
        UNKNOWN[change](cache)
        given = {"position_ids": torch.arange(CACHED, LENGTH).expand(ROWS, -1), "past_key_values": cache}
        found.append(one(ids[:, CACHED:], **given).logits)
    assert distance(*found) <= CLOSE


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_belongs_to_the_scheme_that_filled_it(kind: str) -> None:
    """Before a patch, from one scheme to another, and after its removal."""
    model, ids = patched("llama_gqa", None), ids_of_rows()

    def empty() -> Any:
        return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)

    def goes_on(cache: Any) -> None:
        model(ids[:, CACHED : CACHED + 1], past_key_values=cache)

    of_stock = filled(model, empty())
    patch_model(model, "alibi")
    with pytest.raises(UnsupportedError, match="filled before the model was patched"):
        goes_on(of_stock)
    of_alibi = filled(model, empty())
    patch_model(model, "t5")
    with pytest.raises(UnsupportedError, match="encoded with 'alibi', and this model now has 't5'"):
        goes_on(of_alibi)
    before = copy.deepcopy(of_alibi)
    unpatch_model(model)
    for cache in (of_alibi, before, copy.deepcopy(of_alibi)):
        with pytest.raises(UnsupportedError, match="encoded with 'alibi', which has been removed"):
            goes_on(cache)
    goes_on(of_stock)
    patch_model(model, "alibi")
    goes_on(of_alibi)
    unpatch_model(model)
    of_alibi.reset()
    # Before transformers 5.18, a dynamic cache is then full of zeros.
    with pytest.raises(UnsupportedError) if kind == "dynamic" and versions.before("5.18") else contextlib.nullcontext():
        goes_on(of_alibi)


def test_accepted_keys_have_the_positions_that_were_stated() -> None:
    """Dropped tokens; and keys that came from elsewhere."""
    model, ids = patched("llama_gqa", "alibi"), ids_of_rows()
    kept = [0, 1, 5, 6, 7, 8, 9]
    left = torch.tensor([*kept, *range(CACHED, LENGTH)])
    expected = model(ids[:, left], position_ids=left[None], use_cache=True).logits[:, len(kept) :]
    # The keys of the second layer remember the tokens that were dropped, so they are made without them.
    cache = filled(model, ids=ids[:, kept])
    rebuilt = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    given = {"position_ids": torch.arange(CACHED, LENGTH)[None]}
    with pytest.raises(UnsupportedError, match="put together from tensors"):
        model(ids[:, CACHED:], past_key_values=rebuilt, **given)
    with pytest.raises(ValueError, match="holds 7 tokens"):
        accept_cache(rebuilt, torch.arange(CACHED)[None])
    for wrong in (kept, torch.tensor([kept]).float()):
        with pytest.raises(TypeError, match="a tensor of integers"):
            accept_cache(rebuilt, wrong)  # type: ignore[arg-type]
    cache = filled(model, ids=ids[:, kept], position_ids=torch.tensor([kept]))
    rebuilt = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    accept_cache(rebuilt, torch.tensor([kept]))
    assert distance(model(ids[:, CACHED:], past_key_values=rebuilt, **given).logits, expected) <= CLOSE


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_an_encoder_decoder_follows_too(scheme: str) -> None:
    model, ids = patched("bart", scheme), ids_of_rows()
    encoded = {"encoder_outputs": (model.get_encoder()(ids).last_hidden_state,)}
    expected = model(decoder_input_ids=ids, **encoded).logits

    def cache_of(count: int) -> EncoderDecoderCache:
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        model(decoder_input_ids=ids[:, :count], past_key_values=cache, **encoded)
        return cache

    cache = cache_of(CACHED)
    cache.self_attention_cache.crop(-2)
    found = model(decoder_input_ids=ids[:, CACHED - 2 :], past_key_values=cache, **encoded).logits
    assert distance(found, expected[:, CACHED - 2 :]) <= CLOSE
    cache = cache_of(CACHED)
    UNKNOWN["tokens dropped between"](cache.self_attention_cache)
    with pytest.raises(UnsupportedError, match="tokens were dropped"):
        model(decoder_input_ids=ids[:, CACHED:], past_key_values=cache, **encoded)


@pytest.mark.parametrize("name", ["mistral_sliding", "llama_gqa"])
def test_windows_and_static_slots(name: str) -> None:
    """Windows move by themselves; a static cache is cropped without any change of its keys."""
    ids, model = ids_of_rows(), patched(name, "alibi")
    expected = model(ids).logits
    cache = filled(model, None if name == "mistral_sliding" else StaticCache(model.config, max_cache_len=20))
    cache.reorder_cache(ORDER)
    for step in range(CACHED, LENGTH):
        found = model(ids[ORDER, step : step + 1], past_key_values=cache).logits
        assert distance(found, expected[ORDER, step : step + 1]) <= CLOSE
    for layer in cache.layers:
        layer.keys[:, :, 0] = layer.keys[:, :, 1]
    with pytest.raises(UnsupportedError, match="overwritten"):
        model(ids[ORDER, :1], past_key_values=cache)
