"""Caches that drop tokens: the tokens that stay keep their positions, or the call is refused.

Right is one call over the whole text in which the dropped tokens are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicLayer

from hf_posenc import AttentionSinksConfig, SinkCache, UnsupportedError, patch_model, unpatch_model
from hf_posenc.metrics.properties.logits import relativity
from hf_posenc.metrics.properties.specimen import build_specimen
from hf_posenc.schemes.scale.ssmax import SSMaxScale
from tests.kits.decoding import decoded, left_padding
from tests.matrix.running import distance, patched, tokens
from tests.models import tiny
from tests.thinning import in_turn

pytestmark = pytest.mark.usefixtures("without_gradients")
SINKS, WINDOW, LENGTH, PADS = 2, 6, 30, 5
SIZE = SINKS + WINDOW - 1
#: Two tiny layers in float32.
CLOSE = 1e-4
SINGLY = (1,) * LENGTH
PIECES: dict[str, tuple[int, ...]] = {
    "singly": SINGLY,
    "a long prompt": (17, *SINGLY[17:]),
    "in pieces": (9, 4, 1, 7, 1, 1, 7),
}


def sinks_with(inner: Any) -> dict[str, Any]:
    return {"scheme": "attention_sinks", "inner": inner, "sinks": SINKS, "window": WINDOW}


def shown(visible: Tensor) -> Tensor:
    """The mask of a call that hides all other pairs."""
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]


def in_window() -> Tensor:
    """The keys that a query sees with a `SinkCache`."""
    query, key = torch.arange(LENGTH).unsqueeze(1), torch.arange(LENGTH)
    return (key <= query) & ((query - key < WINDOW) | (key < SINKS))


INNER: list[Any] = ["rope", "p_rope", "alibi", "t5", "kerple", "none", ["rope", "alibi"]]


@pytest.mark.parametrize(("inner", "pieces", "kind"), in_turn(INNER, PIECES, ["sdpa", "eager"]), ids=str)
def test_sinks_behind_a_cache_equal_one_call(inner: Any, pieces: str, kind: str) -> None:
    model = patched("llama_gqa", sinks_with(inner), attn_implementation=kind)
    ids, mask = tokens(2, LENGTH), left_padding(LENGTH, PADS)
    whole, alone = model(ids, use_cache=False).logits, model(ids[1:, PADS:], use_cache=False).logits[0]
    for cache in (SinkCache(SINKS, WINDOW), DynamicCache()):
        assert distance(decoded(model, ids, cache, PIECES[pieces]), whole) <= CLOSE
    padded = decoded(model, ids, SinkCache(SINKS, WINDOW), PIECES[pieces], attention_mask=mask)
    assert distance(padded[0], whole[0]) <= CLOSE
    assert distance(padded[1, PADS:], alone) <= CLOSE


PLAIN: list[Any] = [
    *("none", "native", "rope", "xpos", "sinusoidal", "learned", "alibi", "t5", "kerple", "fire", "shaw", "swin"),
    *("transformer_xl", "self_extend", "repo", "pope", {"scheme": "forget_gate", "gate": "bias_only"}),
    ["rope", "ssmax"],
]


@pytest.mark.parametrize("scheme", PLAIN, ids=str)
def test_positions_stay_when_tokens_are_dropped(scheme: Any) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(2, LENGTH)
    cache = SinkCache(SINKS, WINDOW)
    found = decoded(model, ids, cache, SINGLY)
    assert distance(found, model(ids, attention_mask=shown(in_window()), use_cache=False).logits) <= CLOSE
    for layer in cache.layers:
        assert layer.keys.shape[2] == layer.values.shape[2] == SIZE
        assert layer.key_positions.tolist() == [[0, 1, *range(LENGTH - WINDOW + 1, LENGTH)]]
        assert layer.get_seq_length() == LENGTH


DECODERS: dict[str, Any] = {
    "gpt2": "GPT2LMHeadModel",
    "roberta": ("RobertaForCausalLM", {"is_decoder": True, "pad_token_id": 1}),
    "xglm": "XGLMForCausalLM",
    "mpt": "MptForCausalLM",
    "ctrl": "CTRLLMHeadModel",
    "gptj": "GPTJForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


@pytest.mark.parametrize(("decoder", "scheme"), in_turn(DECODERS, ["native", "learned", "alibi"]))
def test_architectures_that_count_slots_themselves(decoder: str, scheme: str) -> None:
    """Tables of positions, biases and masks of the stock code are made from slots, of which some are gone."""
    torch.manual_seed(0)
    name, options = DECODERS[decoder] if isinstance(DECODERS[decoder], tuple) else (DECODERS[decoder], {})
    model = tiny(name, attn_implementation="eager", **options).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.3)
    patch_model(model, scheme)
    ids, mask, length = tokens(2, LENGTH), left_padding(LENGTH, PADS), LENGTH - PADS
    whole = model(ids, attention_mask=shown(in_window()).expand(2, -1, -1, -1), use_cache=False).logits
    assert distance(decoded(model, ids, SinkCache(SINKS, WINDOW), SINGLY), whole) <= CLOSE
    alone = model(ids[1:, PADS:], attention_mask=shown(in_window()[:length, :length]), use_cache=False).logits[0]
    pieces = (PADS + 1, *SINGLY[PADS + 1 :])
    padded = decoded(model, ids, SinkCache(SINKS, WINDOW), pieces, attention_mask=mask)
    assert distance(padded[1, PADS:], alone) <= CLOSE


@pytest.mark.parametrize("scheme", ["cope", "forget_gate", "grape_ap", "grape_m", "selective_rope"])
def test_sums_over_dropped_tokens_are_refused(scheme: str) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(2, LENGTH)
    cache = SinkCache(SINKS, WINDOW)
    assert distance(decoded(model, ids, cache, SINGLY[: SIZE + 1]), model(ids[:, : SIZE + 1]).logits) <= CLOSE
    with pytest.raises(UnsupportedError, match="has dropped tokens between"):
        model(ids[:, SIZE + 1 : SIZE + 2], past_key_values=cache)


@pytest.mark.parametrize("inner", ["rope", "alibi"])
def test_generation_at_bounded_memory(inner: str) -> None:
    """Greedy, sampled beams, prompts in pieces, left padding, and one call after the other with the same cache."""
    model = patched("llama_gqa", sinks_with(inner))
    ids, mask = tokens(2, 14), left_padding(LENGTH, PADS)[:, :14]
    for more in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
        given = {"attention_mask": mask, "max_new_tokens": 16, "min_new_tokens": 16, "pad_token_id": 0, **more}
        expected = model.generate(ids, **given | {"prefill_chunk_size": None}, use_cache=True)
        cache = SinkCache(SINKS, WINDOW)
        assert torch.equal(model.generate(ids, past_key_values=cache, **given), expected), more
        assert all(layer.keys.shape[2] == SIZE for layer in cache.layers)
    cache = SinkCache(SINKS, WINDOW)
    half = model.generate(ids[:1], past_key_values=cache, max_new_tokens=8, min_new_tokens=8)
    both = model.generate(half, past_key_values=cache, max_new_tokens=8, min_new_tokens=8)
    assert torch.equal(both, model.generate(ids[:1], max_new_tokens=16, min_new_tokens=16))


def test_dropped_tokens_cannot_come_back() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, LENGTH)
    cache = SinkCache(SINKS, WINDOW)
    decoded(model, ids, cache, (SIZE,))
    cache.crop(-3)
    found = decoded(model, ids[:, SIZE - 3 :], cache, (2,))
    assert distance(found, model(ids[:, : SIZE - 1]).logits[:, -2:]) <= CLOSE
    decoded(model, ids[:, SIZE - 1 :], cache, (1, 1))
    assert not cache.is_croppable
    with pytest.raises(UnsupportedError, match="cannot be cropped"):
        cache.crop(-1)
    cache.reset()
    assert distance(decoded(model, ids, cache, (4, 4)), model(ids[:, :8]).logits) <= CLOSE


class _Kept(DynamicLayer):
    """Drops one of three tokens as soon as all of them are older than four."""

    def __init__(self, owner: _OwnCache) -> None:
        super().__init__()
        self.owner, self.seen = owner, 0
        self.third = 1 + len(owner.layers) * owner.states
        self.positions = torch.zeros(0, dtype=torch.long)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        start, self.seen = self.seen, self.seen + key_states.shape[-2]
        positions = torch.cat((self.positions, torch.arange(start, self.seen)))
        kept = (positions % 3 != self.third) | (positions // 3 * 3 + 2 > self.seen - 5)
        self.keys, self.values, self.positions = keys[:, :, kept], values[:, :, kept], positions[kept]
        if self.owner.states:
            self.key_positions = self.positions.unsqueeze(0)
        return keys, values

    def get_seq_length(self) -> int:
        return self.seen if self.owner.counts_all else super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self.positions) + query_length, self.get_seq_length() - len(self.positions)


class _OwnCache(Cache):
    """A cache of other code.

    Args:
        states: whether its layers state the positions of their keys, and drop tokens of their own.
        counts_all: whether its length is the number of all tokens, or of those that it holds.
    """

    def __init__(self, states: bool, counts_all: bool) -> None:
        self.states, self.counts_all = states, counts_all
        super().__init__(layer_class_to_replicate=lambda: _Kept(self))  # type: ignore[arg-type]


def without_third(third: int) -> Tensor:
    query, key = torch.arange(LENGTH).unsqueeze(1), torch.arange(LENGTH)
    return shown((key <= query) & ((key % 3 != third) | (key // 3 * 3 + 2 > query - 5)))


def with_own_cache(model: Any, ids: Tensor, cache: _OwnCache) -> Tensor:
    given = {} if cache.counts_all or cache.states else {"position_ids": torch.arange(LENGTH)[None]}
    return decoded(model, ids, cache, SINGLY, **given)


def giving(mask: Tensor) -> Callable[..., Any]:
    """A forward pre-hook that gives a layer a separate mask."""
    return lambda module, args, kwargs: (args, kwargs | {"attention_mask": mask})


@pytest.mark.parametrize("counts_all", [False, True])
@pytest.mark.parametrize(
    ("scheme", "states"),
    [
        *((scheme, True) for scheme in ("rope", "alibi", "t5", "shaw", "none", {"scheme": "rerope", "window": 3})),
        # Keys of a rotation carry their positions.
        ("rope", False),
    ],
    ids=str,
)
def test_any_cache_may_state_the_positions_of_its_keys(scheme: Any, states: bool, counts_all: bool) -> None:
    model, ids, cache = patched("llama_gqa", scheme), tokens(2, LENGTH), _OwnCache(states, counts_all)
    found = with_own_cache(model, ids, cache)
    assert cache.layers[0].keys.shape[2] < LENGTH
    for layer, kept in zip(model.model.layers, cache.layers, strict=True):
        layer.self_attn.register_forward_pre_hook(giving(without_third(kept.third)), with_kwargs=True)
    assert distance(found, model(ids, use_cache=False).logits) <= CLOSE


@pytest.mark.parametrize("counts_all", [False, True])
@pytest.mark.parametrize("scheme", ["alibi", "t5", "shaw", {"scheme": "self_extend", "window": 2}], ids=str)
def test_unknown_positions_are_refused(scheme: Any, counts_all: bool) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(2, LENGTH)
    with pytest.raises(UnsupportedError, match=r"fewer keys than it has seen|tokens were dropped, moved"):
        with_own_cache(model, ids, _OwnCache(False, counts_all))


def test_statements_that_do_not_fit_are_refused() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(2, LENGTH)
    for wrong in (
        torch.arange(4)[None],
        torch.arange(SIZE),
        torch.arange(3 * SIZE).view(3, SIZE),
        torch.rand(1, SIZE),
        None,
    ):
        cache = SinkCache(SINKS, WINDOW)
        decoded(model, ids, cache, (9,))
        cache.layers[1].key_positions = wrong
        with pytest.raises(UnsupportedError, match="must be a tensor of integers"):
            model(ids[:, 9:10], past_key_values=cache)
    cache = SinkCache(SINKS, WINDOW)
    decoded(model, ids, cache, (9,))
    cache.layers[1].key_positions = cache.layers[1].key_positions - 1
    with pytest.raises(UnsupportedError, match="different tokens of padded rows"):
        model(ids[:, 9:10], past_key_values=cache)


@pytest.mark.parametrize("smaller", [(SINKS - 1, WINDOW + 1), (SINKS, WINDOW - 1), (0, 2)])
def test_a_cache_that_keeps_less_than_the_scheme_sees_is_refused_before_it_changes_a_result(smaller: Any) -> None:
    model, ids = patched("llama_gqa", sinks_with("rope")), tokens(1, LENGTH)
    expected, cache, count = model(ids).logits, SinkCache(*smaller), sum(smaller)
    # It keeps one token less between calls, and drops the first one after this many.
    found = decoded(model, ids, cache, [1] * count)
    with pytest.raises(UnsupportedError, match=rf"Use SinkCache\({SINKS}, {WINDOW}\)"):
        decoded(model, ids, cache, [1], count)
    assert distance(found, expected[:, :count]) <= CLOSE


def test_where_it_cannot_work() -> None:
    ids = tokens(1, 9)
    with pytest.raises(UnsupportedError, match="layers whose mask counts slots"):
        patched("mistral_sliding", "alibi")(ids, past_key_values=SinkCache(SINKS, WINDOW))
    with pytest.raises(UnsupportedError, match="Use it with a patched model only"):
        patched("llama_gqa", None)(ids, past_key_values=SinkCache(SINKS, WINDOW))
    model = patched("llama_gqa", sinks_with("rope"))
    cache = SinkCache(SINKS, WINDOW)
    with pytest.raises(UnsupportedError, match=r"must be integers, and these position_ids are torch\.float32"):
        model(ids, position_ids=torch.arange(9.0)[None], past_key_values=cache)
    decoded(model, ids, cache, (9,))
    unpatch_model(model)
    with pytest.raises(UnsupportedError, match="has been removed"):
        model(ids[:, :1], past_key_values=cache)
    for wrong in ({"sinks": -1}, {"window": 0}, {"window": 2.0}, {"sinks": True}):
        with pytest.raises(ValueError, match="expected an integer"):
            SinkCache(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_the_decoder_of_an_encoder_decoder(scheme: str) -> None:
    model, ids = patched("bart", scheme), tokens(2, LENGTH)
    encoded = {"encoder_outputs": (model.get_encoder()(ids).last_hidden_state,)}
    cache = EncoderDecoderCache(SinkCache(SINKS, WINDOW), DynamicCache())
    expected = model(
        decoder_input_ids=ids, decoder_attention_mask=shown(in_window()).expand(2, -1, -1, -1), **encoded
    ).logits
    found = [
        model(decoder_input_ids=ids[:, step : step + 1], past_key_values=cache, **encoded).logits
        for step in range(LENGTH)
    ]
    assert distance(torch.cat(found, 1), expected) <= CLOSE


@pytest.mark.slow
def test_a_compiled_model_runs_it_outside_its_graphs() -> None:
    model, ids = patched("llama_gqa", sinks_with("alibi")), tokens(2, LENGTH)
    expected = decoded(model, ids, SinkCache(SINKS, WINDOW), PIECES["in pieces"])
    model.forward = torch.compile(model.forward)
    assert distance(decoded(model, ids, SinkCache(SINKS, WINDOW), PIECES["in pieces"]), expected) <= CLOSE


def test_hidden_pairs_do_not_hide_a_change() -> None:
    """Sinks are at fixed positions, so a shift changes logits, though the largest number is that of hidden pairs."""
    specimen = build_specimen(AttentionSinksConfig(window=1020))
    found = relativity(specimen)
    assert found.passed is False


@pytest.mark.parametrize("factor", [-0.5, 0.0])
def test_hidden_pairs_stay_hidden_under_any_scale(factor: float) -> None:
    """What `ssmax` learns may be negative."""
    model, ids = patched("llama_gqa", [sinks_with("rope"), "ssmax"]), tokens(1, LENGTH)
    for module in model.position_encoding.modules():
        if isinstance(module, SSMaxScale):
            module.scale.fill_(factor)
    other = ids.clone()
    other[:, SINKS] += 1
    # Two layers reach 10 tokens back.
    assert torch.equal(model(ids).logits[:, SINKS + 11 :], model(other).logits[:, SINKS + 11 :])
