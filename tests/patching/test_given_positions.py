"""Positions that a caller gives, with gaps, restarts and jumps: distances follow them, in one call and behind a cache.

The reference is the model without positions, given the bias of every pair of positions as an additive mask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_posenc import SequenceLengthError, UnsupportedError, native_scheme, patch_model
from hf_posenc.schemes.parts import DistanceBias, Part
from tests.kits.decoding import left_padding
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, freshly_compiled, gradients, outputs, patched, tokens
from tests.models import tiny
from tests.schemes.table import VARIANTS
from tests.thinning import in_turn, mostly_slow
from tests.versions import torch_since

pytestmark = pytest.mark.usefixtures("without_gradients")
LENGTH, BACKENDS = 20, ("sdpa", "eager")
#: Two tiny layers in float32.
CLOSE = 2e-5
SELF_EXTEND = {"scheme": "self_extend", "window": 4, "group": 2}
DISTANCE_BIASES: list[Any] = ["alibi", "t5", "kerple", "sandwich", {"scheme": "alibi", "learnable": True}]
PAIRWISE: list[Any] = ["fire", "shaw", SELF_EXTEND]
#: Biases and rotations that sum up features of tokens.
FEATURES: list[Any] = [
    "forget_gate",
    {"scheme": "repo", "initial_std": 0.5},
    {"scheme": "grape_m", "gate_scale": 1.0},
    {"scheme": "selective_rope", "initial_std": 0.5, "gate": True, "theta": 100.0},
]

GAPS = torch.tensor([0, 1, 2, 3, 4, 10, 11, 12, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51])
POSITIONS = {
    "gaps": torch.stack((GAPS, torch.arange(LENGTH) * 3)),
    "one row of gaps": torch.stack((torch.arange(LENGTH), GAPS)),
    "from 7 on": torch.stack((torch.arange(LENGTH) + 7, torch.arange(LENGTH) + 40)),
    "restarts": torch.cat((torch.arange(8), torch.arange(LENGTH - 8))).expand(2, -1),
    "backwards": torch.stack((torch.arange(LENGTH).flip(0), GAPS)),
    "random": torch.randint(0, 60, (2, LENGTH), generator=torch.Generator().manual_seed(4)),
}


@functools.cache
def without_positions(architecture: str) -> Any:
    return patched(architecture, "none", attn_implementation="eager")


def reference(model: Any, architecture: str, ids: Tensor, position_ids: Tensor, visible: Tensor) -> Tensor:
    """The outputs of a model without positions, with the bias of every pair as a mask."""
    biases = [module for module in model.position_encoding.modules() if isinstance(module, DistanceBias)]
    assert len(biases) == 1
    pairs = [[[key - query for key in row.tolist()] for query in row.tolist()] for row in position_ids]
    dense = biases[0](torch.tensor(pairs)).transpose(0, 1)
    mask = dense.masked_fill(~visible, torch.finfo(torch.float32).min)
    cache = {"use_cache": False} if ARCHITECTURES[architecture].causal else {}
    return outputs(without_positions(architecture), ids, attention_mask=mask, **cache)


def same_document(positions: Tensor) -> Tensor:
    """Transformers separates documents wherever positions do not increase by one."""
    document = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return (document.unsqueeze(1) == document.unsqueeze(2)).unsqueeze(1)


EVERYTHING = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
#: An architecture, how it is called, and the pairs that see each other at some positions. Llama separates documents if
#: it has no cache.
CALLS: dict[str, tuple[str, dict[str, bool], Callable[[Tensor], Tensor]]] = {
    "a decoder": ("llama_gqa", {"use_cache": True}, lambda _: EVERYTHING.tril()),
    "documents": ("llama_gqa", {"use_cache": False}, lambda positions: EVERYTHING.tril() & same_document(positions)),
    "an encoder": ("bert", {}, lambda _: EVERYTHING),
}


@pytest.mark.parametrize(
    ("way", "scheme"), in_turn([*itertools.product(POSITIONS, CALLS, BACKENDS)], DISTANCE_BIASES), ids=str
)
def test_the_bias_is_that_of_every_pair_of_positions(way: tuple[str, str, str], scheme: Any) -> None:
    kind, call, backend = way
    architecture, options, visible = CALLS[call]
    model, ids = patched(architecture, scheme, attn_implementation=backend), tokens(2, LENGTH)
    positions = POSITIONS[kind].to(torch.int64 if backend == "sdpa" else torch.int32)
    found = outputs(model, ids, position_ids=positions, **options)
    assert distance(found, reference(model, architecture, ids, positions, visible(positions))) <= CLOSE


@pytest.mark.parametrize("scheme", ["t5", {"scheme": "alibi", "learnable": True}, "kerple"], ids=str)
@torch.enable_grad()
def test_gradients(scheme: Any) -> None:
    """Of a learned bias over gaps, fused and plain; and over a contiguous row, where both ways have to agree."""
    found = []
    for backend in ("sdpa", "eager"):
        model = patched("llama_gqa", scheme, attn_implementation=backend)
        logits = model(tokens(2, LENGTH), position_ids=POSITIONS["gaps"]).logits
        found.append(gradients(model, logits.square().mean()))
    assert any("position_encoding" in name for name in found[0])
    for name, gradient in found[0].items():
        # Sums of some thousand pairs in another order.
        assert float((gradient - found[1][name]).norm()) <= 1e-3 * float(found[1][name].norm()), name


def hole() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 3:7] = 0
    return mask


@pytest.mark.parametrize("scheme", [*DISTANCE_BIASES, *PAIRWISE, *FEATURES], ids=str)
def test_a_hole_in_the_mask_is_no_distance(scheme: Any) -> None:
    """The tokens around it are as far apart as without the hidden ones."""
    model, ids, real = patched("llama_gqa", scheme), tokens(2, LENGTH), hole()[1].bool()
    found = model(ids, attention_mask=hole()).logits[1, real]
    assert distance(found, model(ids[1:, real]).logits[0]) <= CLOSE


@pytest.mark.parametrize(
    ("config", "label"),
    mostly_slow([(config, label) for _, config, label in VARIANTS], lambda case: case[1].endswith("-0")),
    ids=str,
)
def test_a_far_token_leaves_earlier_ones_as_they_are(config: Any, label: str) -> None:
    """In one call, where a number per key relative to the newest would round near ones."""
    try:
        model = patched("llama_gqa", config, num_attention_heads=6, head_dim=16, hidden_size=96)
    except (UnsupportedError, ValueError):
        pytest.skip("not for this model")
    if any(part.length_dependent for part in model.position_encoding.modules() if isinstance(part, Part)):
        pytest.skip("depends on the length of the sequence")
    ids, near = tokens(2, LENGTH), torch.arange(LENGTH).expand(2, -1)
    expected = model(ids, position_ids=near, use_cache=True).logits[:, :-1]
    for jump in (1000, 10**5, 2**31 - 100):
        far = near + jump * (near == LENGTH - 1)
        try:
            found = model(ids, position_ids=far, use_cache=True).logits[:, :-1]
        except SequenceLengthError:
            continue
        # Kernels that compute several values at once round the last bit differently.
        assert float((found - expected).abs().max()) <= 2e-7 * float(expected.abs().max().clamp(min=1)), jump


@pytest.mark.parametrize(
    ("scheme", "architecture"),
    in_turn(["alibi", "fire", "rope", "sinusoidal", "learned", "none", "native"], ["gpt2", "llama_gqa"]),
)
def test_a_call_has_a_position_for_every_token(scheme: str, architecture: str) -> None:
    """A single one is that of all tokens, as in stock models. Stock models raise errors of shapes for others."""
    model, ids = patched(architecture, scheme), tokens(2, LENGTH)
    expected = model(ids, position_ids=torch.full((2, LENGTH), 3)).logits
    for shape in ((), (1, 1)):
        if (architecture, scheme) != ("llama_gqa", "native") or shape:
            assert distance(model(ids, position_ids=torch.full(shape, 3)).logits, expected) <= CLOSE
    for shape in ((1, LENGTH - 1), (1, LENGTH + 2), (2, LENGTH + 1), (3, LENGTH)):
        with pytest.raises(ValueError, match=r"position_ids has the shape .* 20 new tokens in each of 2 rows"):
            model(ids, position_ids=torch.zeros(shape, dtype=torch.int64))
    if scheme not in ("none", "rope") and (architecture, scheme) != ("llama_gqa", "native"):
        with pytest.raises(IndexError, match="position_ids"):
            model(ids, position_ids=torch.arange(LENGTH)[None] - 1)


#: Scheme -> whether it refuses negative positions of tokens, and the first position that it refuses.
_BOUNDS: dict[str, tuple[Any, bool, int]] = {
    "learned": ({"scheme": "learned", "num_positions": LENGTH}, True, LENGTH),
    "xpos": ({"scheme": "xpos", "scale_base": 64}, False, 4086),
}


@pytest.mark.long
@pytest.mark.parametrize("name", _BOUNDS)
def test_a_graph_refuses_the_positions_that_a_call_refuses(name: str) -> None:
    scheme, from_first, end = _BOUNDS[name]
    model, ids, near = patched("llama_gqa", scheme, num_hidden_layers=1), tokens(1, LENGTH), torch.arange(LENGTH)[None]
    compiled = freshly_compiled(model, "aot_eager", fullgraph=True)
    expected = model(ids, position_ids=near, use_cache=False).logits
    assert distance(compiled(ids, position_ids=near, use_cache=False).logits, expected) <= CLOSE
    refused = [near - 1] * from_first + [near.clamp(max=LENGTH - 2) + end - LENGTH + 2]
    for position_ids in refused:
        for run, error in ((model, SequenceLengthError), (compiled, RuntimeError)):
            with pytest.raises(error, match=r"before the first one|longer than the|beyond the"):
                run(ids, position_ids=position_ids, use_cache=False)


@pytest.mark.long
def test_a_compiled_call_has_no_gaps_or_says_so() -> None:
    torch_since("2.13", "graphs compute the bias of gaps by position")
    model = patched("llama_gqa", "t5", attn_implementation="sdpa", num_hidden_layers=1)
    ids = tokens(2, LENGTH)
    compiled = freshly_compiled(model, fullgraph=True)
    left = hole()
    left[1, :3] = 0
    arguments: dict[str, Any] = {"use_cache": False}
    for mask in (left, left.flip(-1)):
        expected = model(ids, attention_mask=mask, **arguments).logits
        found = compiled(ids, attention_mask=mask, **arguments).logits
        assert distance(found[mask.bool()], expected[mask.bool()]) <= CLOSE
    with pytest.raises(RuntimeError, match=r"Run this call without torch\.compile"):
        compiled(ids, attention_mask=hole(), **arguments)
    packed = {"position_ids": POSITIONS["restarts"], **arguments}
    assert distance(compiled(ids, **packed).logits, model(ids, **packed).logits) <= CLOSE


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["t5", pytest.param("alibi", marks=pytest.mark.slow)])
def test_compiled_decoding_behind_a_gap(scheme: str) -> None:
    """One row of the bias is cheap at any distance, so that a graph needs no look at the positions."""
    model = patched("llama_gqa", scheme, attn_implementation="sdpa", num_hidden_layers=1)
    ids, mask = tokens(2, LENGTH), hole()
    full = model(ids, attention_mask=mask).logits
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    model(ids[:, :16], attention_mask=mask[:, :16], past_key_values=cache)
    compiled = freshly_compiled(model, fullgraph=True)
    for i in range(16, LENGTH):
        step = compiled(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits
        assert distance(step, full[:, i : i + 1]) <= 1e-4


@pytest.mark.parametrize("scheme", ["alibi", "fire"])
def test_a_compiled_call_behind_a_cache_with_gaps_is_not_one_graph_and_right(scheme: str) -> None:
    model, ids = patched("llama_gqa", scheme, num_hidden_layers=1), tokens(1, 8)

    def filled() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(ids[:, :6], position_ids=torch.tensor([[0, 1, 2, 20, 21, 22]]), past_key_values=cache)
        return cache

    given = {"position_ids": torch.tensor([[23, 24]])}
    with pytest.raises(UnsupportedError, match=r"reach 22.*would stand at 6.*Pass position_ids"):
        model(ids[:, 6:], past_key_values=filled())
    expected = model(ids[:, 6:], past_key_values=filled(), **given).logits
    found = freshly_compiled(model)(ids[:, 6:], past_key_values=filled(), **given).logits
    assert distance(found, expected) <= 1e-5
    with pytest.raises(Exception, match="a compiled graph cannot read"):
        freshly_compiled(model, fullgraph=True)(ids[:, 6:], past_key_values=filled(), **given)


@pytest.mark.long
@pytest.mark.parametrize("own_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_cache_that_a_compiled_call_filled_with_gaps_is_refused(own_cache: bool) -> None:
    """A compiled graph cannot decide what to record, so it records that positions have to be checked."""
    torch_since("2.13", "what a graph sets on a cache is lost, and the cache is refused for that")
    model, ids = patched("llama_gqa", "fire", num_hidden_layers=1), tokens(1, 8)
    compiled, ones = freshly_compiled(model), torch.ones(1, 6)
    gaps, contiguous = torch.tensor([[0, 1, 2, 20, 21, 22]]), torch.arange(6)[None]

    def filled(position_ids: Tensor) -> Any:
        cache = {} if own_cache else {"past_key_values": DynamicCache(config=model.config)}
        return compiled(ids[:, :6], position_ids=position_ids, attention_mask=ones, **cache).past_key_values

    with pytest.raises(UnsupportedError, match="were not recorded"):
        model(ids[:, 6:], past_key_values=filled(gaps))
    expected = model(ids).logits[:, 6:]
    assert distance(model(ids[:, 6:], past_key_values=filled(contiguous)).logits, expected) <= CLOSE
    assert distance(compiled(ids[:, 6:], past_key_values=filled(contiguous)).logits, expected) <= CLOSE
    cache = filled(gaps)
    with pytest.raises(RuntimeError, match="were not recorded"):
        compiled(ids[:, 6:], past_key_values=cache)


@pytest.mark.parametrize("scheme", ["native", "learned", "sinusoidal"])
@pytest.mark.parametrize("name", ["BartForCausalLM", "MarianForCausalLM"])
def test_a_table_follows_the_caller_in_a_model_that_counts_slots(name: str, scheme: str) -> None:
    torch.manual_seed(0)
    model, ids = patch_model(tiny(name, pad_token_id=1).eval(), scheme), tokens(2, LENGTH)
    order = torch.randperm(LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)[None, None]
    expected = model(ids, attention_mask=mask, use_cache=False).logits[:, order]
    assert distance(model(ids[:, order], position_ids=order[None], attention_mask=mask).logits, expected) <= CLOSE


@pytest.mark.parametrize("scheme", ["native", "learned", "sinusoidal", "rope"])
def test_generate_of_a_model_whose_table_begins_at_a_later_row(scheme: str) -> None:
    """`generate` counts from 0, also for RoBERTa, whose forward begins at 2. Stock then looks up the rows from 0 on."""
    torch.manual_seed(0)
    model, ids = tiny("RobertaForCausalLM", is_decoder=True, eos_token_id=None).eval(), tokens(2, 7)
    settings = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **settings)
    patch_model(model, native_scheme(model) if scheme == "native" else scheme)
    if scheme == "native":
        assert distance(torch.cat(model.generate(ids, **settings).logits), torch.cat(expected.logits)) <= CLOSE
        return
    if scheme != "rope":
        with pytest.raises(SequenceLengthError, match="`generate` counts from 0 unless it is given position_ids"):
            model.generate(ids, **settings)
    positions = torch.arange(2, 9).expand(2, -1)
    found = model.generate(ids, position_ids=positions, **settings).sequences
    for end in range(7, 10):
        logits = model(found[:, :end], attention_mask=torch.ones_like(found[:, :end])).logits
        assert torch.equal(logits[:, -1].argmax(-1), found[:, end])


@pytest.mark.parametrize(
    ("scheme", "kind"), in_turn([*DISTANCE_BIASES, *PAIRWISE, "rope", "none"], ["padding", "bool", "float"]), ids=str
)
def test_tokens_that_a_later_mask_hides_keep_their_positions(scheme: Any, kind: str) -> None:
    """The positions of cached tokens were counted over the mask with which they were cached."""
    model, ids = patched("llama_gqa", scheme, attn_implementation="sdpa"), tokens(2, LENGTH)
    cached, hidden = LENGTH - 3, slice(5, 9)
    padding = left_padding(LENGTH, 2)
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    seen = (padding.bool()[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()).clone()
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    seen[..., cached:, hidden] = False
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = model(ids, position_ids=positions, attention_mask=additive, use_cache=False).logits[:, cached:]
    cache = DynamicCache(config=model.config)
    model(ids[:, :cached], attention_mask=padding[:, :cached], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    later = padding.clone()
    later[:, hidden] = 0
    masks = {"padding": later, "bool": seen[..., cached:, :], "float": additive[..., cached:, :]}
    found = model(
        ids.flip(0)[:, cached:],
        position_ids=positions.flip(0)[:, cached:],
        attention_mask=masks[kind].flip(0),
        past_key_values=cache,
    ).logits
    assert distance(found.flip(0), expected) <= CLOSE


def test_a_mask_that_hides_cached_tokens_does_not_move_the_next_one_back() -> None:
    model, ids = patched("llama_gqa", "alibi"), tokens(1, LENGTH)
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    mask = torch.ones_like(ids)
    mask[:, 4:10] = 0
    with pytest.raises(UnsupportedError, match=r"reach 18.*would stand at 13"):
        model(ids[:, -1:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("scheme", ["alibi", "shaw", {"scheme": "tupe", "num_positions": 128}, SELF_EXTEND], ids=str)
@pytest.mark.parametrize("kind", ["a gap behind the cache", "a cache from 60 on", "padding within the cache"])
def test_positions_under_a_mask_that_hides_padding(scheme: Any, kind: str) -> None:
    """One mask for each head does not show which tokens are padding, and cached tokens may have any position."""
    model, ids, cached = patched("llama_gqa", scheme, attn_implementation="sdpa"), tokens(2, LENGTH), LENGTH - 3
    real = torch.ones(2, LENGTH, dtype=torch.long)
    positions = torch.arange(LENGTH).expand(2, -1).clone()
    first: dict[str, Any] = {}
    hidden = (real.bool()[:, None, None] & EVERYTHING.tril()).expand(-1, 4, -1, -1).clone()
    later: dict[str, Any] = {"attention_mask": hidden[:, :, cached:]}
    if kind == "a gap behind the cache":
        positions[:, cached:] += 30
    elif kind == "a cache from 60 on":
        positions += 60
        first = {"position_ids": positions[:, :cached], "attention_mask": hidden[:, :, :cached, :cached]}
        later = {}
    else:
        real[1, cached - 4 : cached] = 0
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        first = {"attention_mask": real[:, :cached]}
        hidden &= real.bool()[:, None, None]
    expected = model(ids, position_ids=positions, attention_mask=hidden, use_cache=False).logits[:, cached:]
    cache = DynamicCache(config=model.config)
    model(ids[:, :cached], past_key_values=cache, **first)
    for stop in (cached + 1, cached + 2, LENGTH):
        some = slice(cached, stop)
        masks = {name: mask[:, :, : stop - cached, :stop] for name, mask in later.items()}
        found = model(ids[:, some], position_ids=positions[:, some], past_key_values=cache, **masks).logits
        assert distance(found, expected[:, : stop - cached]) <= CLOSE
        cache.crop(cached - stop)
