"""Rotations by a layer's input, in models: kernels get rotated heads, caches hold features, windows are kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer

from hf_posenc import UnsupportedError, accept_cache, patch_model
from hf_posenc.attention.key_channels import num_channels
from hf_posenc.patching.call import interface_attention, pairwise_site
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.forwards import forward_on_instance
from hf_posenc.patching.place.generation import page_width
from hf_posenc.recipes import swap_scheme
from hf_posenc.schemes.positions import Positions
from hf_posenc.schemes.rotary import contextual
from hf_posenc.schemes.rotary.rotation_kernel import apply_rotation
from tests.kits.decoding import decoded
from tests.matrix import running as matrix
from tests.matrix.running import gradients, tokens
from tests.models import tiny
from tests.thinning import in_turn

#: Each with weights that make its angles differ between tokens.
SCHEMES: dict[str, dict[str, Any]] = {
    "repo": {"initial_std": 0.5},
    "grape_m": {"gate_scale": 1.0},
    "selective_rope": {"initial_std": 0.5, "gate": True, "theta": 100.0},
}
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)
#: Sums over tokens in another order, in float32; logits reach 10.
CLOSE = {"rtol": 1e-5, "atol": 2e-4}
FEW_BITS = {"nbits": 4, "residual_length": 1, "q_group_size": 16, "axis_key": 1, "axis_value": 1}

IDS = tokens(1, 24)


def patched(scheme: Any, window: int | None = None, **options: Any) -> PreTrainedModel:
    """A model with heads of 16 numbers, and a scheme whose weights are drawn anew."""
    wide: dict[str, Any] = {"hidden_size": 64, "head_dim": 16}
    model: PreTrainedModel = (
        matrix.patched("llama_gqa", None, **wide)
        if window is None
        else matrix.patched("mistral_sliding", None, sliding_window=window, **wide)
    )
    patch_model(model, scheme, **options)
    with torch.no_grad():
        for name, parameter in model.position_encoding.named_parameters():
            if name.endswith("weight"):
                parameter.normal_()
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    result: Tensor = model(ids, **inputs).logits
    return result


def as_biases(model: PreTrainedModel) -> None:
    """Makes the layers add the bias form, which is the definition, instead of passing rotated heads to the kernels."""
    for layer in model.model.layers:
        site = forward_on_instance(layer.self_attn)
        assert isinstance(site, InterfaceAttention)
        site.encoding.rotates_by_input = site.encoding.only_rotates_by_input = False
        site.encoding.rotation_before_cache = None


@EVERY_SCHEME
def test_kernels_get_rotated_heads_and_no_bias(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias forms give the same logits."""
    model = patched(scheme, **SCHEMES[scheme])
    calls = []
    attend = interface_attention.attention_with
    monkeypatch.setattr(interface_attention, "attention_with", lambda *a: (calls.append(1), attend(*a))[1])
    fast = logits(model, IDS)
    assert not calls
    as_biases(model)
    slow = logits(model, IDS)
    assert calls
    torch.testing.assert_close(fast, slow, **CLOSE)
    without = logits(patched("none"), IDS)
    assert (fast - without).abs().max() > 1e-3


#: What acts beside `repo`, and the width of a cached key of 16 dimensions: other biases may need it as it was.
BESIDE: dict[str, tuple[list[Any], int]] = {
    "nothing": ([], 16),
    "a distance": (["alibi"], 16),
    "positions": (["fire"], 16),
    "keys": (["grape"], 16 + 1),
    "features": (["forget_gate"], 16 + 1 + 2),
    "a rotation": (["rope"], 16),
    "a rotation of whole heads": ([{"scheme": "string"}], 16),
}


@pytest.mark.parametrize(("beside", "dtype"), in_turn(BESIDE, [torch.float32, torch.bfloat16]))
@torch.no_grad()
def test_places_of_a_token_alone_need_no_channels(beside: str, dtype: torch.dtype) -> None:
    """The cache holds rotated keys, which give what rotating all keys in every call gives."""
    others, width = BESIDE[beside]
    scheme: Any = [*others, {"scheme": "repo", **SCHEMES["repo"]}]
    model = patched(scheme).to(dtype)
    found, caches = [], []
    for rotated in (True, False):
        for layer in model.model.layers:
            if not rotated:
                forward_on_instance(layer.self_attn).encoding.rotation_before_cache = None
        cache = DynamicCache(config=model.config)
        found.append(decoded(model, IDS, cache, [9, 4] + [1] * 11))
        caches.append(cache)
    numbers = num_channels(width - 16, dtype)
    assert [layer.keys.shape[-1] for layer in caches[0].layers] == [16 + numbers] * 2
    assert caches[1].layers[0].keys.shape[-1] > 16
    # Two rotations of one bfloat16 key round once more than one.
    close = CLOSE if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(*found, **close)


class OwnLayer(DynamicLayer):
    """A cache layer of which only the returned values are known."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Like that of its base class."""
        return super().update(*args, **kwargs)


#: Caches, whether they can hold rotated keys, and the window of the model.
CACHES: dict[str, tuple[Callable[[Any], Any], bool, int | None]] = {
    "dynamic": (lambda config: DynamicCache(config=config), True, None),
    "static": (lambda config: StaticCache(config, max_cache_len=26), True, None),
    "own": (lambda config: Cache(layer_class_to_replicate=OwnLayer), False, None),
    "sliding": (lambda config: DynamicCache(config=config), False, 8),
}
#: Sums over tokens.
SUMS: list[Any] = [
    {"scheme": "grape_m", "gate_scale": 1.0},
    {"scheme": "selective_rope", "initial_std": 0.5, "theta": 100.0},
    {"scheme": "selective_rope", "initial_std": 0.5, "theta": 100.0, "gate": True},
    {"scheme": "selective_rope", "initial_std": 0.5, "theta": 100.0, "kernel_size": 1, "layout": "interleaved"},
]
SHOWN = torch.ones(3, 24, dtype=torch.long)
LEFT, HOLES = SHOWN.clone(), SHOWN.clone()
LEFT[1, :3], LEFT[2, :9] = 0, 0
HOLES[1, 5:9], HOLES[2, 8:11], HOLES[2, 16:18] = 0, 0, 0
DOCUMENTS = torch.cat((torch.arange(10), torch.arange(14))).expand(3, -1)
INPUTS: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "left padding": {"attention_mask": LEFT},
    "holes": {"attention_mask": HOLES},
    "documents": {"position_ids": DOCUMENTS},
    "padded documents": {"position_ids": DOCUMENTS, "attention_mask": HOLES},
}


@pytest.mark.parametrize(("case", "kind"), in_turn(itertools.product(range(len(SUMS)), INPUTS), CACHES), ids=str)
@torch.no_grad()
def test_caches_hold_keys_that_are_rotated_by_sums(
    case: tuple[int, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoded token rotates its own key only."""
    scheme, given = SUMS[case[0]], case[1]
    make, holds, window = CACHES[kind]
    if window and case[0] in (1, 2):
        pytest.skip("the convolution refuses a window")
    model, ids, inputs = patched(scheme, window), tokens(3, 24), INPUTS[given]
    expected, real = logits(model, ids, **inputs, use_cache=True), inputs.get("attention_mask", SHOWN).bool()
    lengths = []
    for module in (pairwise_site, contextual):
        rotate = module.apply_rotation
        monkeypatch.setattr(module, "apply_rotation", lambda x, *a, f=rotate: (lengths.append(x.shape[2]), f(x, *a))[1])
    found = decoded(model, ids, make(model.config), [9, 4, *[1] * 11], **inputs)
    torch.testing.assert_close(found[real], expected[real], **CLOSE)
    assert (max(lengths[4 * 2 :]) == 1) == holds


@pytest.mark.parametrize("scheme", SUMS[:3], ids=str)
@torch.no_grad()
def test_tokens_that_are_hidden_later_have_moved_the_others(scheme: Any) -> None:
    """As when they were cached; a mask of pairs has the same effect in one call."""
    model, ids, positions = patched(scheme), tokens(3, 24), torch.arange(24).expand(3, -1)
    mask, seen = SHOWN.clone(), torch.ones(3, 1, 24, 24, dtype=torch.bool).tril()
    mask[:, 11:14], seen[..., 18:, 11:14] = 0, False
    pairs = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = logits(model, ids, attention_mask=pairs, position_ids=positions)
    cache = DynamicCache(config=model.config)
    decoded(model, ids, cache, [18], position_ids=positions)
    found = decoded(model, ids, cache, [1] * 6, start=18, position_ids=positions, attention_mask=mask)
    torch.testing.assert_close(found, expected[:, 18:], **CLOSE)


@pytest.mark.parametrize(("scheme", "kept"), in_turn(SUMS, [range(3, 12), [*range(4), *range(8, 12)]]), ids=str)
@torch.no_grad()
def test_sums_over_tokens_that_somebody_dropped(scheme: Any, kept: Any) -> None:
    model, ids, cache = patched(scheme), tokens(3, 24), DynamicCache()
    decoded(model, ids, cache, [12])
    given = {"position_ids": torch.arange(24)[None]}
    for rows, refused in ((range(12), False), (kept, True)):
        rebuilt = DynamicCache([(layer.keys[:, :, [*rows]], layer.values[:, :, [*rows]]) for layer in cache.layers])
        accept_cache(rebuilt, given["position_ids"][:, [*rows]])
        with pytest.raises(UnsupportedError, match="but some of them are gone") if refused else nullcontext():
            found = decoded(model, ids, rebuilt, [1] * 12, start=12, **given)
    torch.testing.assert_close(found, logits(model, ids)[:, 12:], **CLOSE)


@pytest.mark.parametrize("scheme", SUMS[:3], ids=str)
def test_gradients_reach_sums_through_a_cache(scheme: Any) -> None:
    model, cache, found = patched(scheme), DynamicCache(), []
    pieces = [model(part, past_key_values=cache).logits for part in IDS.split([9, 5, 1, 9], dim=1)]
    for output in (torch.cat(pieces, dim=1), model(IDS, use_cache=False).logits):
        found.append(gradients(model, output.square().mean()))
    for name, gradient in found[1].items():
        assert float((found[0][name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_keys_that_are_repeated_behind_the_cache(scheme: str) -> None:
    """JetMoe caches fewer heads than its attention function receives, so that even places of `repo` are features."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = patch_model(tiny("JetMoeForCausalLM", **sizes).eval(), scheme, **SCHEMES[scheme])
    config = model.config
    if find_spec("hqq") is not None:
        with pytest.raises(UnsupportedError, match="rounded to a few bits"):
            model(IDS, past_key_values=QuantizedCache("hqq", config, **FEW_BITS))
    cache = DynamicCache(config=config)
    steps = decoded(model, IDS, cache, [9] + [1] * 15)
    torch.testing.assert_close(steps, logits(model, IDS, use_cache=False), **CLOSE)
    width = cache.layers[0].keys.shape[-1]
    assert width > 16
    assert page_width(model.position_encoding.stacks["model"].layers[0], torch.float32) == width


@pytest.mark.parametrize("scheme", [["forget_gate", "repo", "alibi"], ["repo", "forget_gate"]])
def test_a_rotation_joins_other_biases(scheme: list[Any]) -> None:
    """Each summand reads its own features, in any order."""
    own = {"scheme": "repo", **SCHEMES["repo"]}
    model = patched([own if part == "repo" else part for part in scheme])
    given = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **given), model.generate(IDS, use_cache=False, **given))
    fast = logits(model, IDS)
    as_biases(model)
    torch.testing.assert_close(fast, logits(model, IDS), **CLOSE)
    without = patched([part for part in scheme if part != "repo"])
    assert (fast - logits(without, IDS)).abs().max() > 1e-3


@pytest.mark.parametrize("elsewhere", ["rope", "forget_gate", "grape"])
def test_windows_are_refused_whatever_other_layers_have(elsewhere: str) -> None:
    scheme = {"scheme": "selective_rope", **SCHEMES["selective_rope"]}
    model = patched(scheme, window=8, layers=[1], elsewhere=elsewhere)
    with pytest.raises(UnsupportedError, match="has dropped the tokens before its first key"):
        model.generate(tokens(1, 40), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("XGLMForCausalLM", {}),
        ("GPTNeoForCausalLM", {"attention_types": [[["global"], 2]]}),
        ("MobileBertForMaskedLM", {"embedding_size": 32, "intra_bottleneck_size": 32}),
    ],
)
def test_other_layers_get_rotated_heads(name: str, options: dict[str, Any]) -> None:
    """XGLM scales its queries before the product, GPT-Neo does not scale, and MobileBERT narrows its layers' input."""

    def built(scheme: str, **given: Any) -> Tensor:
        torch.manual_seed(0)
        model = tiny(name, hidden_size=64, **options).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15)
        return logits(patch_model(model, scheme, **given), IDS)

    # Their logits reach 8.
    torch.testing.assert_close(built("grape_m", initial_bias=16 * 30.0), built("rope"), rtol=1e-4, atol=1e-4)


@EVERY_SCHEME
def test_a_bias_is_fitted_to_what_a_rotation_did(scheme: str) -> None:
    model = patched(scheme, **SCHEMES[scheme])
    swap_scheme(model, "t5", sample=IDS)
    assert model.position_encoding.config.name == "t5"
    assert logits(model, IDS).isfinite().all()


@pytest.mark.parametrize("slot", [0, 5, 11])
@pytest.mark.parametrize("scheme", SUMS, ids=str)
@torch.no_grad()
def test_a_single_token_does_not_need_the_angles_of_all_slots(scheme: Any, slot: int) -> None:
    """As in a compiled graph, where later slots of a static cache hold anything. Rows: plain, padded, packed."""
    model = matrix.drawn(patch_model(tiny("LlamaForCausalLM"), scheme))
    rotation = next(one for one in model.modules() if isinstance(one, contextual.ContextualRotation))
    padded, packed = [-1] * 3 + list(range(9)), [*range(4), *range(8)]
    keys = Positions(torch.tensor([[*range(12)], padded, packed]), torch.full((3, 1), 12))
    features = rotation.key_features(torch.randn(3, 12, 32)).clone(memory_format=torch.contiguous_format)
    features[:, :, slot + 1 :] = 7.0
    given, key = (features, keys, torch.tensor([slot]), torch.float32), torch.randn(3, 2, 1, 8)
    single, all_slots = rotation.factors_in_slots, contextual.ContextualRotation.factors_in_slots
    found = apply_rotation(key, single(*given), rotation.layout)
    wanted = apply_rotation(key, all_slots(rotation, *given), rotation.layout)
    real = keys.ids[:, slot] >= 0
    torch.testing.assert_close(found[real], wanted[real], atol=1e-5, rtol=1e-4)
