"""Work that a patched model avoids: operations are counted, not timed."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posenc import UnsupportedError, patch_model, unpatch_model
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.schemes import get_scheme
from hf_posenc.schemes.bias.t5 import T5Bias
from hf_posenc.schemes.bias.tupe import UntiedPositionBias
from hf_posenc.schemes.position_maps.affine import PositionScaleConfig
from hf_posenc.schemes.position_maps.self_extend import SelfExtendConfig
from tests.kits.decoding import decoded, left_padding
from tests.thinning import in_turn

from ..matrix.running import drawn, gradients, patched, tokens
from ..models import tiny


def model_of(family: str, scheme: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = tiny(family, pad_token_id=0, **settings).eval()
    return model if scheme is None else patch_model(model, scheme)


Counted = Callable[..., list[Any]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Watches a method of a class: what `measure` makes of the arguments of each call."""

    def count(owner: type, measure: Callable[..., Any], method: str = "forward") -> list[Any]:
        seen: list[Any] = []
        own = getattr(owner, method)

        @functools.wraps(own)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(measure(*args, **kwargs))
            return own(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, watched)
        return seen

    return count


@torch.no_grad()
def prefilled(model: Any, ids: Tensor, length: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids[:, :length], past_key_values=cache)
    return cache


@pytest.mark.parametrize("scheme", ["none", "rope", "alibi", "pope"])
@torch.no_grad()
def test_the_stock_rotary_module_computes_nothing_that_nobody_reads(scheme: str, counted: Counted) -> None:
    shapes = counted(LlamaRotaryEmbedding, lambda x, position_ids: position_ids.shape)
    model, ids = model_of("LlamaForCausalLM", scheme), tokens(1, 12)
    shapes.clear()  # patch_model has asked the module how wide it rotates
    expected = model(ids, use_cache=False).logits
    steps = decoded(model, ids, DynamicCache(config=model.config), [1] * 12)
    model(ids, use_cache=False)
    # Once for each shape, to learn what the phases look like.
    assert shapes == [(1, 12), (1, 1)]
    torch.testing.assert_close(steps, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_stands_in_for_the_phases_looks_like_them_and_shows_if_somebody_reads_it():
    model, position_ids = model_of("LlamaModel", "none"), torch.arange(5).unsqueeze(0)
    hidden = torch.zeros(1, 5, 32, dtype=torch.bfloat16)
    phases, stand_ins = (model.rotary_emb(hidden, position_ids=position_ids) for _ in range(2))
    for phase, stand_in in zip(phases, stand_ins, strict=True):
        assert phase.isfinite().all()
        assert stand_in.isnan().all()
        assert (stand_in.shape, stand_in.dtype) == (phase.shape, phase.dtype)
        assert stand_in.untyped_storage().nbytes() == stand_in.element_size()
    # Other shapes are looked at on their own.
    other = model.rotary_emb(hidden[:, :3], position_ids=position_ids[:, :3])
    assert other[0].shape == (1, 3, 8)
    assert other[0].isfinite().all()
    unpatch_model(model)
    torch.testing.assert_close(model.rotary_emb(hidden, position_ids=position_ids), phases)


@torch.no_grad()
def test_a_rotary_function_that_is_switched_off_later_is_refused():
    """Keys are no longer met on their way into the cache by then, so they would stay unrotated."""
    model, ids = model_of("SmolLM3Model", "rope", num_key_value_heads=4), tokens(1, 8)
    expected = model(ids).last_hidden_state
    attention = model.layers[0].self_attn
    assert attention.use_rope
    attention.use_rope = False
    with pytest.raises(UnsupportedError, match="Call patch_model again"):
        model(ids)
    attention.use_rope = True
    torch.testing.assert_close(model(ids).last_hidden_state, expected)


@pytest.mark.parametrize("scheme", ["none", "rope", "alibi"])
def test_no_weight_is_copied(scheme):
    model = model_of("LlamaForCausalLM")
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    patch_model(model, scheme)
    model(tokens(), labels=tokens()).loss.backward()
    after = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    assert after == before
    assert not [name for name, _ in model.named_buffers() if "position_encoding" in name]


def test_a_model_on_the_meta_device_stays_there():
    with torch.device("meta"):
        model = model_of("LlamaForCausalLM", hidden_size=2048, num_attention_heads=32, intermediate_size=8192)
    for scheme in ("rope", "learned", "none"):
        patch_model(model, scheme)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


# Biases over the steps of a decoding loop


def test_a_bias_is_evaluated_when_the_length_has_doubled_or_a_weight_was_written_to(counted: Counted) -> None:
    model, ids = patched("llama_gqa", "t5", attn_implementation="sdpa"), tokens()
    expected = model(ids).logits.detach()
    cache = prefilled(model, ids, 3)
    distances = counted(T5Bias, lambda distance: distance.numel())
    found = decoded(model, ids, cache, [1] * 11, 3)
    assert distances == [8, 18]
    torch.testing.assert_close(found, expected[:, 3:], atol=1e-4, rtol=1e-4)
    cache.crop(-6)
    twin = copy.deepcopy(cache)
    assert torch.equal(decoded(model, ids, cache, [1] * 2, 8), decoded(model, ids, twin, [1] * 2, 8))
    distances.clear()
    with torch.no_grad():
        next(model.position_encoding.parameters()).mul_(-1)
    decoded(model, ids, cache, [1], 10)
    assert distances
    # What was remembered without gradients is not used with them.
    model(ids[:, 11:12], past_key_values=cache).logits.square().sum().backward()
    (table,) = model.position_encoding.parameters()
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


def test_layers_share_a_bias_that_reads_no_content_and_its_rows(counted: Counted) -> None:
    """Decoding projects rows of its table when the length has doubled."""
    model, ids = patched("llama_gqa", "tupe", attn_implementation="sdpa"), tokens()
    expected = model(ids).logits.detach()
    cache = prefilled(model, ids, 3)
    rows = counted(UntiedPositionBias, lambda ids: ids.numel(), "_rows")
    torch.testing.assert_close(decoded(model, ids, cache, [1] * 11, 3), expected[:, 3:], atol=1e-4, rtol=1e-4)
    assert [count for count in rows if count > 1] == [9, 19]
    queries = counted(UntiedPositionBias, lambda pairs: pairs.query.shape[-2])

    model.train()(ids, use_cache=False)
    assert queries == [ids.shape[1]]
    model.gradient_checkpointing_enable()
    model(ids, use_cache=False).logits.sum().backward()
    assert len(queries) > 2
    model.eval()
    queries.clear()
    cache = prefilled(model, ids, 6)
    before = copy.deepcopy(cache)
    first = decoded(model, ids, cache, [1], 6)
    assert queries == [6, 1]
    with torch.no_grad():
        next(model.position_encoding.parameters()).mul_(-2)
    assert not torch.equal(decoded(model, ids, before, [1], 6), first)


WINDOW = 6
SELF_EXTEND = SelfExtendConfig(group=2, window=WINDOW)


@pytest.mark.parametrize("scheme", ["rerope", "self_extend", "dual_chunk", "attention_sinks"])
def test_a_call_without_far_pairs_only_rotates(scheme: str, counted: Counted) -> None:
    options = {"dual_chunk": {"chunk_size": 6, "local_size": 2}, "attention_sinks": {"sinks": 2, "window": 4}}
    config = get_scheme(scheme)(**options.get(scheme, {"window": WINDOW}))
    model, ids = model_of("LlamaForCausalLM", config), tokens(1, 12)
    attended = counted(InterfaceAttention, lambda *args, **kwargs: 1, "attend")

    def attends(*args: Any, **kwargs: Any) -> bool:
        attended.clear()
        model(*args, **kwargs)
        return bool(attended)

    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert attends(ids[:, :4])  # The first call shows that nothing but the rotation is needed.
        assert not attends(ids[:, :4])
        attended.clear()
        found = decoded(model, ids, DynamicCache(config=model.config), [1] * 12)
        assert len(attended) == 2 * (12 - config.first_query)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        model.set_attn_implementation("eager")
        assert attends(ids[:, :4])
        assert not attends(ids[:, :4])
        assert attends(ids[:, :4], position_ids=torch.tensor([[0, 1, 2, config.first_query]]))
    assert attends(ids[:, :4])
    # Mapped positions are not taken for those of the tokens.
    patch_model(model, PositionScaleConfig(inner=config, factor=0.5))
    with torch.no_grad():
        assert all(attends(ids[:, :4]) for _ in range(2))


@torch.no_grad()
def test_calls_that_only_rotate_record_positions_and_refuse_what_others_refuse() -> None:
    model, ids = model_of("LlamaForCausalLM", SELF_EXTEND), tokens(1, 12)
    model(ids[:, :4])
    with pytest.raises(UnsupportedError, match="is_causal is False"):
        model(ids[:, :4], is_causal=False)
    places, real = torch.tensor([[0, 1, 2, 4, 5, *range(6, 13)]]), torch.ones_like(ids)
    expected = model(ids, position_ids=places, attention_mask=real, use_cache=False).logits
    for first in (5, 9):  # The second has far pairs.

        def begun(length: int = first) -> Any:
            """A cache that the model makes itself."""
            given = {"position_ids": places[:, :length], "attention_mask": real[:, :length], "use_cache": True}
            return model(ids[:, :length], **given).past_key_values

        rest: dict[str, Any] = {"input_ids": ids[:, first:], "attention_mask": real}
        found = model(**rest, position_ids=places[:, first:], past_key_values=begun()).logits
        torch.testing.assert_close(found, expected[:, first:], rtol=0, atol=1e-5)
        with pytest.raises(UnsupportedError, match="positions of the cached tokens"):
            model(**rest, past_key_values=begun())


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_who_has_no_gaps_pays_for_none(backend: str, counted: Counted) -> None:
    """A bias of given positions is evaluated for pairs, and that of slots for distances."""
    model, ids = patched("llama_gqa", "t5", attn_implementation=backend), tokens(2, 20)
    axes = counted(T5Bias, lambda distance: distance.dim())
    left, slots = left_padding(20, 6), torch.arange(20)
    for mask in (None, left, left.flip(-1), torch.ones_like(left)):
        model(ids, attention_mask=mask)
    model(ids, position_ids=torch.stack((slots + 7, slots + 40)))
    model(ids, position_ids=torch.cat((slots[:8], slots[:12])).expand(2, -1), use_cache=False)
    model(ids, position_ids=(left.cumsum(-1) - 1).clamp(min=0), attention_mask=left)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for mask in (left, torch.ones_like(left)):
        model.generate(ids, attention_mask=mask, **settings)
    assert {*axes} == {1}
    model(ids, position_ids=slots.expand(2, -1) * 3)
    assert {*axes} == {1, 3}


class IntegerOperators(TorchDispatchMode):
    """Counts the operators, and those that compute integers and truth values from nothing else, as of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.total += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.counts[str(function)] += not any(tensor.is_floating_point() for tensor in tensors)
        return result


@pytest.mark.parametrize(
    ("scheme", "masked"), in_turn(["alibi", "forget_gate", "grape", "pope", "rope", "ssmax", "t5"], [False, True])
)
@torch.no_grad()
def test_layers_share_what_a_decoding_step_finds_out_about_positions(scheme, masked):
    counts = []
    for layers in (2, 4):
        model, ids = model_of("LlamaModel", scheme, num_hidden_layers=layers), tokens(1, 12)
        masks = [torch.ones(1, length, dtype=torch.int64) if masked else None for length in (11, 12)]
        cache = DynamicCache(config=model.config)
        model(ids[:, :11], attention_mask=masks[0], past_key_values=cache)
        with IntegerOperators() as operators:
            model(ids[:, 11:], attention_mask=masks[1], past_key_values=cache)
        counts.append(operators.counts)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("scheme", "attention"),
    in_turn(["fire", "log_cpb", "string", "tisa"], ["llama_gqa eager", "llama_gqa sdpa", "bloom eager"]),
)
def test_layers_of_a_kind_are_computed_together(attention: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the gradients that each layer computes on its own, by fewer operators."""
    architecture, backend = attention.split()
    model = drawn(patched(architecture, scheme, num_hidden_layers=4, attn_implementation=backend), std=0.3)
    ids = tokens(2, 20)
    slots = torch.arange(20).expand(2, -1)
    inputs: list[dict[str, Tensor]] = [{}, {"attention_mask": left_padding(20, 6)}]
    if architecture == "llama_gqa":
        inputs += [{"position_ids": slots}, {"position_ids": 3 * slots}]

    def trained() -> list[tuple[int, dict[str, Tensor]]]:
        steps = []
        for given in inputs:
            with IntegerOperators() as operators:
                found = gradients(model, model(ids, labels=ids, use_cache=False, **given).loss)
            steps.append((operators.total, found))
        return steps

    together = trained()
    monkeypatch.setattr(ForwardState, "together", lambda *_, **__: None)
    alone = trained()
    assert together[0][0] < {"eager": 0.95, "sdpa": 0.92}[backend] * alone[0][0]
    for (_, found), (_, expected) in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
