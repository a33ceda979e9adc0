"""Attention of other code outside the attention interface: what its forward may look like, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)

from hf_posenc import AttentionPairs, BuildContext, Positions, get_scheme, patch_model
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.forwards import rebind
from tests.matrix.running import distance, drawn, tokens
from tests.models import tiny
from tests.thinning import in_turn

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
#: A bias, one that reads queries, a rotation by the input, a scale, and a rotation.
SCHEMES: list[Any] = ["alibi", "shaw", "repo", "ssmax", "rope"]


def weights(query: Tensor, key: Tensor, visible: Tensor | None = None, **names: Any) -> Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    visible = causal(query, key) if visible is None else visible
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)


def causal(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()


def of_names(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(input=query, other=key.transpose(-1, -2) * query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~causal(query, key), torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(input=scores, dim=-1), other=value)


def with_a_vector(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    gate = torch.matmul(query, torch.zeros(query.shape[-1]))
    return weights(query, key) @ value + gate.unsqueeze(-1)


def merged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = (one.flatten(0, 1) for one in (query, key, value))
    made = functional.scaled_dot_product_attention(*heads, attn_mask=causal(query, key))
    return made.unflatten(0, query.shape[:2])


def blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One for the short run of a patch."""
    visible = causal(query, key).split(16)
    parts = zip(query.split(16, dim=2), visible, strict=True)
    return torch.cat([weights(one, key, seen) @ value for one, seen in parts], dim=2)


def blocks_of_kernels(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = zip(query.split(16, dim=2), causal(query, key).split(16), strict=True)
    call = functional.scaled_dot_product_attention
    return torch.cat([call(one, key, value, attn_mask=seen) for one, seen in parts], dim=2)


def rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.stack([weights(*pair) @ own for *pair, own in zip(query, key, value, strict=True)])


def heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    given = (one.unbind(1) for one in (query, key, value))
    return torch.stack([weights(*pair) @ own for *pair, own in zip(*given, strict=True)], dim=1)


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two query heads are in one axis, and their pairs in another."""
    made = [one.unflatten(1, (2, -1)) for one in (query, key, value)]
    return (weights(*made[:2]) @ made[2]).flatten(1, 2)


def half_of_the_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    call, given = functional.scaled_dot_product_attention, (one.chunk(2, dim=1) for one in (query, key, value))
    return torch.cat([call(*heads, is_causal=True) for heads in zip(*given, strict=True)], dim=1)


def rows_in_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The rows of a batch follow each other, and see only their own tokens."""
    heads = [one.transpose(0, 1).flatten(1, 2).unsqueeze(0) for one in (query, key, value)]
    visible = torch.block_diag(*[causal(query, key)] * len(query)).bool()
    made = functional.scaled_dot_product_attention(*heads, attn_mask=visible)[0]
    return made.unflatten(1, (len(query), -1)).transpose(0, 1)


def with_a_key_of_no_token(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (functional.pad(one, (0, 0, 1, 0), value=0.5) for one in (key, value))
    return weights(query, key, functional.pad(causal(query, query), (1, 0), value=True)) @ value


def twice_as_wide(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weights(torch.cat([query, query], -1) * 2**-0.5, torch.cat([key, key], -1)) @ value


def keys_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(key, query.transpose(-1, -2)).transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~causal(query, key), torch.finfo(scores.dtype).min).softmax(-1) @ value


def over_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (key @ query.transpose(-1, -2)).masked_fill(~causal(query, key).T, -1e9)
    return scores.softmax(dim=-2).transpose(-1, -2) @ value


def largest(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).masked_fill(~causal(query, key), -1e9)
    return scores.masked_fill(scores < scores.topk(min(3, len(key))).values[..., -1:], -1e9).softmax(-1) @ value


def blocks_of_the_interface(module: Any, attend: Any, heads: list[Tensor], mask: Tensor) -> Tensor:
    query, key, value = heads
    parts = zip(query.split(16, dim=2), mask.split(16, dim=2), strict=True)
    return torch.cat([attend(module, one, key, value, seen, scaling=0.3)[0] for one, seen in parts], dim=1)


def prefixes_of_the_interface(module: Any, attend: Any, heads: list[Tensor], mask: Tensor) -> Tensor:
    found = []
    for stop in (16, 32, 40):
        query, key, value = (one[:, :, :stop] for one in heads)
        start = len(found) * 16
        seen = mask[:, :, start:stop, :stop]
        found.append(attend(module, query[:, :, start:], key, value, seen, scaling=0.3)[0])
    return torch.cat(found, dim=1)


def windows_of_the_interface(module: Any, attend: Any, heads: list[Tensor], mask: Tensor) -> Tensor:
    parts = zip(*(one.split(20, dim=2) for one in heads), strict=True)
    return torch.cat([attend(module, *part, mask[:, :, :20, :20], scaling=0.3)[0] for part in parts], dim=1)


def scaled_before(module: Any, attend: Any, heads: list[Tensor], mask: Tensor) -> Tensor:
    query, key, value = heads
    return attend(module, query * module.scaling, key, value, mask, scaling=1.0)[0]


def in_a_view(module: Any, attend: Any, heads: list[Tensor], mask: Tensor) -> Tensor:
    found = attend(module, *heads, mask, scaling=module.scaling)[0]
    return found.view(*found.shape[:2], -1)


def recomputed(module: Any, attend: Any, heads: list[Tensor], mask: Tensor) -> Tensor:
    return checkpoint(lambda *given: attend(module, *given, mask, scaling=0.3)[0], *heads, use_reentrant=False)


#: Read inside a function of `OwnInterface.forward`, and assigned in `counted`.
FACTOR, CALLS = 0.3, 0


def counted() -> None:
    global CALLS
    CALLS = CALLS + 1


class OwnInterface(LlamaAttention):
    """Attention that calls the function of the interface in its own way for a long text."""

    way: Any

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (one(hidden_states).view(shape).transpose(1, 2) for one in projections)
        heads = [*apply_rotary_pos_emb(query, key, *position_embeddings), value]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if self.way is in_a_view:
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mask = causal(*heads[:2])[None, None]
        way = self.way if mask.shape[2] > 16 else lambda *given: attend(self, *heads, mask, scaling=FACTOR)[0]
        return self.o_proj(way(self, attend, heads, mask).reshape(*hidden_states.shape[:-1], -1)), None


def with_attention(way: Any = None, kind: type | None = OwnInterface) -> Any:
    """A Llama with attention of a custom class."""
    model = tiny("LlamaForCausalLM", attn_implementation="sdpa").eval()
    for layer in model.model.layers if kind else ():
        layer.self_attn.__class__, layer.self_attn.way = kind, way
    return model


WAYS = [blocks_of_the_interface, prefixes_of_the_interface, windows_of_the_interface]


@pytest.mark.parametrize(("scheme", "way"), in_turn(SCHEMES, WAYS))
@torch.no_grad()
def test_parts_of_the_interface_have_the_rotation_and_nothing_else(way: Any, scheme: Any) -> None:
    model, ids = with_attention(way), tokens(2, 40)
    expected = model(ids).logits
    patch_model(model, scheme)
    if scheme == "rope":
        assert distance(model(ids).logits, expected) <= 1e-4
        return
    with pytest.raises(UnsupportedError, match=r"^OwnInterface computes its attention in several parts"):
        model(ids, use_cache=False)


@torch.no_grad()
def test_globals_of_a_forward_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs with a copy of its globals."""
    model = patch_model(with_attention(), "alibi")
    model(tokens())
    monkeypatch.setattr(f"{__name__}.FACTOR", 0.5)
    with pytest.raises(UnsupportedError, match=r"\.FACTOR was replaced after patch_model"):
        model(tokens())
    with pytest.raises(UnsupportedError, match="counted assigns the global name CALLS"):
        rebind(counted, {})


READING = ["shaw", "cope", "transformer_xl", "disentangled"]
OTHERS = ["alibi", "repo", "ssmax", "rope", "fire"]


def test_factors_of_queries_that_other_code_multiplies_are_unknown() -> None:
    for scheme in [*READING, "pope"]:
        with pytest.raises(UnsupportedError, match="not known what they were multiplied with"):
            patch_model(with_attention(scaled_before), scheme)(tokens(2, 20))


@pytest.mark.parametrize("scheme", READING)
def test_a_bias_of_queries_that_have_their_factor_is_the_same(scheme: str) -> None:
    """As in OPT and Whisper. The factor is that of the layer, or one for each head."""
    context = BuildContext(32, 4, 8, num_key_value_heads=2)
    bias = cast("Any", get_scheme(scheme)().build(context).logit_bias)
    query, key, slots = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.arange(9)
    keys = Positions(slots.unsqueeze(0), slots.new_full((1, 1), 9))
    for weight in bias.parameters():
        torch.nn.init.normal_(weight)
    expected = bias(AttentionPairs(query, key, slots, keys, 0.3))
    for factor in (0.3, torch.full((4, 1, 1), 0.3)):
        found = bias(AttentionPairs(query * factor, key, slots, keys, 0.3 / factor, query_factor=factor))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("way", "scheme"),
    [*product([scaled_before], OTHERS), *product([in_a_view], [*OTHERS, *READING, "pope", "self_extend"])],
)
def test_the_function_of_the_interface_is_called_in_another_way(way: Any, scheme: Any) -> None:
    """Queries may have their factor before, and the result may be read without a copy, with or without gradients."""
    models = []
    for kind in (None, OwnInterface):
        torch.manual_seed(0)
        models.append(drawn(patch_model(with_attention(way, kind), scheme), std=0.3))
    for length in (20, 150):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                expected, found = (model(tokens(2, length), use_cache=False).logits for model in models)
            assert distance(found, expected) <= 1e-4, (length, grad)


def test_a_module_that_recomputes_its_core_is_named() -> None:
    loss = patch_model(with_attention(recomputed), "alibi")(tokens(2, 20), labels=tokens(2, 20)).loss
    with pytest.raises(UnsupportedError, match="OwnInterface was called outside of its forward"):
        loss.backward()


class OwnAttention(LlamaAttention):
    """Attention that its `way` computes from queries, keys and values."""

    way: Core
    #: Whether it caches keys before it rotates them, as code for endless texts does.
    caches_first = False

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (one(hidden_states).view(shape).transpose(1, 2) for one in projections)
        cache = options.get("cache", options.get("past_key_values"))
        if self.caches_first and cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = (repeat_kv(one, self.num_key_value_groups) for one in (key, value))
        return self.o_proj(self.way(query, key, value).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


class CachesFirst(OwnAttention):
    caches_first = True


class Mixer(OwnAttention):
    """Only its base classes say what it is."""


def built(core: Core | None, scheme: Any, kind: type = OwnAttention, width: int = 1) -> Any:
    """A Llama, with attention that `core` computes."""
    torch.manual_seed(0)
    model = with_attention(core, kind if core else None)
    for layer in model.model.layers:
        layer.self_attn.q_head_dim = width * layer.self_attn.head_dim
    return drawn(patch_model(model, scheme), std=0.3)


FOLLOWED = [of_names, with_a_vector, merged]
IN_PARTS = [blocks, blocks_of_kernels, rows, heads, half_of_the_heads, rows_in_one]


@pytest.mark.parametrize(("core", "scheme"), in_turn([*FOLLOWED, *IN_PARTS, grouped, keys_first], SCHEMES))
@torch.no_grad()
def test_a_forward_whose_parts_would_lack_the_scheme_is_refused(core: Core, scheme: Any) -> None:
    """The rotary function is replaced before, so a rotation is complete in every part."""
    ids = tokens(2, 40)
    if scheme == "rope" or core in FOLLOWED or (core is grouped and scheme in ("repo", "ssmax")):
        expected = built(None, scheme)(ids, use_cache=False).logits
        assert distance(built(core, scheme)(ids, use_cache=False).logits, expected) <= 1e-4
        return
    refusals = r"^OwnAttention (computes (its attention in several|scores of the shape)|multiplies keys by|compares)"
    with pytest.raises(UnsupportedError, match=refusals):
        built(core, scheme)(ids, use_cache=False)


@pytest.mark.parametrize(
    ("core", "scheme", "message"),
    [
        *(
            (with_a_key_of_no_token, scheme, r"compares \d queries with \d keys.* they are learned")
            for scheme in SCHEMES
        ),
        (rows_in_one, "alibi", "compares 10 queries with 10 keys in a call with 5 tokens in a row.* merges rows"),
    ],
)
@torch.no_grad()
def test_queries_and_keys_of_unknown_positions_are_refused(core: Core, scheme: Any, message: str) -> None:
    """With a cache too: a bias took the first key for the first token, and queries for the last ones."""
    with pytest.raises(UnsupportedError, match=message):
        built(core, scheme)(tokens(2, 5), use_cache=True)


@torch.no_grad()
def test_keys_that_are_rotated_behind_the_cache_are_refused() -> None:
    """A rotation would act before the cache and behind it. A bias does not depend on where keys are cached."""
    for scheme in ("native", "rope", "xpos"):
        model = built(merged, scheme, CachesFirst)
        expected = built(None, scheme)(tokens(2, 5), use_cache=False).logits
        assert distance(model(tokens(2, 5), use_cache=False).logits, expected) <= 1e-4
        with pytest.raises(UnsupportedError, match="CachesFirst rotates keys after it has cached them"):
            model(tokens(2, 1), past_key_values=model(tokens(2, 5), use_cache=True).past_key_values)
    expected = built(None, "alibi")(tokens(2, 5)).logits
    assert distance(built(merged, "alibi", CachesFirst)(tokens(2, 5), use_cache=True).logits, expected) <= 1e-4


@pytest.mark.parametrize("scheme", ["alibi", "shaw"])
@pytest.mark.parametrize(("core", "message"), [(over_queries, "over another axis"), (largest, r"selects .* \(topk\)")])
@torch.no_grad()
def test_scores_that_a_bias_would_not_fit_are_refused(core: Core, message: str, scheme: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        built(core, scheme)(tokens(2, 5), use_cache=False)


@pytest.mark.parametrize("scheme", ["native", *SCHEMES])
@torch.no_grad()
def test_attention_is_known_by_the_class_that_it_extends(scheme: Any) -> None:
    expected = built(None, scheme)(tokens(2, 9), use_cache=False).logits
    assert distance(built(merged, scheme, Mixer)(tokens(2, 9), use_cache=False).logits, expected) <= 1e-4


class InnerAttention(torch.nn.Module):
    """The innermost module with parameters gets heads, or the module around it."""

    def __init__(self, heads_first: bool) -> None:
        super().__init__()
        self.gate, self.heads_first = torch.nn.Parameter(torch.ones(())), heads_first

    def forward(self, *given: Any) -> Tensor:
        query, key, value = (one for one in given if isinstance(one, Tensor))
        return weights(query, key) @ value * self.gate


@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_that_gets_no_hidden_states_is_named(heads_first: bool) -> None:
    model = with_attention(kind=OwnAttention)
    for layer in model.model.layers:
        inner = layer.self_attn.inner = InnerAttention(heads_first)
        layer.self_attn.way = inner if heads_first else lambda *heads, inner=inner: inner(None, *heads)
    given = "Tensor of 4 axes" if heads_first else "NoneType"
    with pytest.raises(UnsupportedError, match=f"InnerAttention gets a {given} as its first argument"):
        patch_model(model, "alibi")


@torch.no_grad()
def test_heads_may_be_wider_where_they_are_multiplied() -> None:
    expected = built(None, "alibi")(tokens(2, 9), use_cache=False).logits
    assert distance(built(twice_as_wide, "alibi", width=2)(tokens(2, 9), use_cache=False).logits, expected) <= 1e-4
