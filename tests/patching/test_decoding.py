"""Decoding with every kind of cache equals one call, for any positions and padding of the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap
from transformers import DynamicCache, StaticCache

from tests.kits.decoding import decoded, left_padding
from tests.matrix.running import distance, drawn, patched, tokens
from tests.patching.test_given_positions import DISTANCE_BIASES, FEATURES, PAIRWISE, POSITIONS

pytestmark = pytest.mark.usefixtures("without_gradients")
LENGTH, PADS = 20, 5
#: Several tokens, one, and several behind cached ones.
PIECES = (9, 1, 6, 1, 1, 2)
SCHEMES: list[Any] = [
    "none",
    "rope",
    "xpos",
    "sinusoidal",
    "ssmax",
    *DISTANCE_BIASES,
    *PAIRWISE,
    *FEATURES,
    [{"scheme": "repo", "initial_std": 0.5}, "alibi"],
]
CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=LENGTH + 3),
    "made by the model": lambda config: None,
}


def inputs() -> dict[str, dict[str, Tensor]]:
    """Positions and masks, each with a column for every token."""
    mask = left_padding(LENGTH, PADS)
    repeated = torch.tensor([0, 1, 2, 2, 2, *range(5, LENGTH)]).expand(2, -1)
    ones = torch.ones_like(mask)
    return {
        "plain": {},
        "padding": {"attention_mask": mask},
        "padding and positions": {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
        "repeated positions": {"position_ids": repeated, "attention_mask": ones},
        **{kind: {"position_ids": POSITIONS[kind]} for kind in ("gaps", "one row of gaps", "from 7 on", "random")},
    }


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_steps_behind_a_cache_equal_one_call(scheme: Any, turn: int) -> None:
    """Inputs use the caches in turn; the longer run has all pairs."""
    model, ids = patched("llama_gqa", scheme, attn_implementation="sdpa"), tokens(2, LENGTH)
    caches = itertools.islice(itertools.cycle(CACHES.values()), turn + SCHEMES.index(scheme) % 3, None)
    for (kind, given), cache in zip(inputs().items(), caches, strict=False):
        expected = model(ids, **given, use_cache=True).logits
        found = decoded(model, ids, cache(model.config), PIECES, **given)
        real = given.get("attention_mask", torch.ones(2, LENGTH)).bool()
        assert distance(found[real], expected[real]) <= 1e-4, kind
        if "padding" in kind:
            alone = model(ids[1:, PADS:], use_cache=True).logits[0]
            assert distance(found[1, PADS:], alone) <= 1e-4, kind


@pytest.mark.parametrize("scheme", ["string", "cope", "grape_ap", *FEATURES], ids=str)
def test_products_of_a_scheme_are_not_taken_for_those_of_the_module(scheme: Any) -> None:
    """Bloom's scores are found by the width of a head, which is also a number of cached tokens here."""
    model, ids = drawn(patched("bloom", scheme), std=0.3), tokens(2, LENGTH)
    found = decoded(model, ids, DynamicCache(), [1] * LENGTH)
    assert distance(found, model(ids, use_cache=False).logits) <= 1e-4


#: Schemes whose decoding steps reuse numbers that follow from weights.
KEEPING: list[Any] = [
    "t5",
    "fire",
    "string",
    {"scheme": "tupe", "num_positions": 64},
    "log_cpb",
    "shaw",
    "disentangled",
    "low_rank_relative",
    "grape",
]


@pytest.mark.parametrize("scheme", KEEPING, ids=str)
def test_a_cache_that_is_emptied_keeps_nothing_of_other_weights(scheme: Any) -> None:
    """Some optimizers, and PEFT's merges, write to `weight.data`, which torch does not count."""
    model, ids = patched("llama_gqa", scheme), tokens(1, LENGTH)
    dynamic, static = DynamicCache(), StaticCache(model.config, max_cache_len=LENGTH)
    for turn in range(2):
        for cache in (dynamic, static):
            assert distance(decoded(model, ids, cache, PIECES), model(ids, use_cache=False).logits) <= 1e-4, turn
        dynamic.crop(-LENGTH)
        static.reset()
        for weight in model.position_encoding.parameters():
            weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(turn))


@pytest.mark.parametrize("scheme", [*KEEPING, "rerope", "attention_sinks"], ids=str)
def test_models_of_an_ensemble_decode_together(scheme: Any) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(1, LENGTH)
    weights = {name: torch.stack((weight, 1.1 * weight)) for name, weight in model.named_parameters()}

    def run(weights: dict[str, Tensor]) -> Any:
        return decoded(lambda *ids, **given: functional_call(model, weights, ids, given), ids, DynamicCache(), PIECES)

    alone = [run({name: weight[index] for name, weight in weights.items()}) for index in range(2)]
    assert distance(vmap(run)(weights), torch.stack(alone)) <= 1e-4


@pytest.mark.parametrize("scheme", KEEPING, ids=str)
def test_weights_may_be_made_for_each_token(scheme: Any) -> None:
    """Torch gives the memory of a weight that is freed to the next."""
    model, ids = drawn(patched("llama_gqa", scheme), std=0.3), tokens(1, 10)
    names = [name for name, _ in model.named_parameters() if "position_encoding" in name]

    def run(made: list[Any], most: int) -> Tensor:
        cache, found = DynamicCache(), []
        for index, token in enumerate(ids.split(1, dim=1)):
            made.append({name: model.get_parameter(name) * (1 + 0.3 * index) for name in names})
            found.append(functional_call(model, made[-1], (token,), {"past_key_values": cache}).logits)
            del made[most:]
        return torch.cat(found, dim=1)

    torch.testing.assert_close(run([], most=0), run([], most=len(ids[0])))


@pytest.mark.parametrize("scheme", KEEPING, ids=str)
@torch.enable_grad()
def test_a_training_step_between_tokens(scheme: Any) -> None:
    """Fused optimizers do not count what they write."""

    def run(fused: bool) -> Tensor:
        model, ids, cache = drawn(patched("llama_gqa", scheme), std=0.3), tokens(1, 10), DynamicCache()
        optimizer = torch.optim.SGD(model.position_encoding.parameters(), lr=0.5, fused=fused)
        with torch.no_grad():
            model(ids[:, :5], past_key_values=cache)
            model(ids[:, 5:6], past_key_values=cache)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        with torch.no_grad():
            logits: Tensor = model(ids[:, 6:7], past_key_values=cache).logits
        return logits

    assert distance(run(fused=True), run(fused=False)) <= 1e-4
