"""Layers that reuse the checks of the first layer of their kind compute the same as without this reuse."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from transformers import DynamicCache

from hf_posenc.patching.call.cache import first_cache
from hf_posenc.patching.call.checked_layer import CheckedLayer
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.schemes import ScheduleConfig, ShawConfig, TisaConfig
from hf_posenc.schemes.bias.log_cpb import LogCpbNetwork
from hf_posenc.schemes.rotary.learned_frequencies import LearnedFrequenciesMap
from hf_posenc.schemes.weights import AlikeParts, KeptValues
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.kits.decoding import decoded
from tests.matrix.running import drawn, patched, placed, tokens
from tests.models import tiny
from tests.thinning import in_turn

LAYERS = 4
#: A scheme for each way in which a bias, or a rotation by the layer's input, is computed.
SCHEMES = [
    "alibi", "tisa", "shaw", "fire", "tupe", "disentangled", "forget_gate", "grape_ap", "swin", "low_rank_relative",
    "transformer_xl", "grape", "repo", "grape_m",
]  # fmt: skip
Change = Callable[[Any], None]


def other_scaling(model: Any) -> None:
    model.model.layers[2].self_attn.scaling *= 3.0


def narrower_mask(model: Any) -> None:
    def narrow(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        queries, cache = kwargs["hidden_states"].shape[1], first_cache(kwargs.values())
        keys = queries + (0 if cache is None else cache.get_seq_length(2))
        near = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries - 2)
        return args, kwargs | {"attention_mask": near[None, None]}

    model.model.layers[2].self_attn.register_forward_pre_hook(narrow, with_kwargs=True)


def other_options(model: Any) -> None:
    """The first two layers and the last two call the attention function with different tensors as an option."""
    for index, layer in enumerate(model.model.layers):
        option = {"hint": torch.full((2,), float(index // 2))}
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, option=option: (args, kwargs | option), with_kwargs=True
        )


def frozen_layers(model: Any) -> None:
    """The first layers run without gradients."""
    for layer in model.model.layers[:2]:
        forward = layer.self_attn.forward
        layer.self_attn.forward = torch.no_grad()(forward)


CHANGES: list[Change] = [lambda model: None, other_scaling, narrower_mask, other_options, frozen_layers]


def built(scheme: Any, change: Change) -> Any:
    model = drawn(patched("llama_gqa", scheme, num_hidden_layers=LAYERS, attn_implementation="sdpa"), std=0.3)
    change(model)
    return model


def results(model: Any) -> list[Tensor]:
    """Logits of a short text and of each token after it, and the gradients of a training step."""
    ids = tokens(length=9)
    found = [decoded(model, ids, DynamicCache(config=model.config), [6, 1, 1, 1])]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    weights = (*model.parameters(), *model.position_encoding.parameters())
    return found + [weight.grad for weight in weights if weight.grad is not None]


@pytest.fixture
def assert_equal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Compares the results of what is built with those where every layer checks everything."""

    def compare(build: Callable[[], Any]) -> None:
        found = results(build())
        monkeypatch.setattr(CheckedLayer, "attend", lambda *_: None)
        torch.testing.assert_close(found, results(build()), atol=2e-5, rtol=1e-4)

    return compare


@pytest.mark.parametrize(("scheme", "change"), in_turn(SCHEMES, CHANGES))
def test_results_are_those_of_layers_that_check_everything(scheme: str, change: Change, assert_equal: Any) -> None:
    assert_equal(lambda: built(scheme, change))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_under_autocast_differ_from_those_outside(scheme: str, assert_equal: Any) -> None:
    """The norms of Qwen 3 return float32 queries and keys under autocast too."""

    def build() -> Any:
        options = {"num_hidden_layers": LAYERS, "head_dim": 8, "attn_implementation": "sdpa"}
        torch.manual_seed(0)
        model = drawn(placed(tiny("Qwen3ForCausalLM", **options), scheme), std=0.3)
        for layer in model.model.layers[1:3]:
            layer.self_attn.forward = torch.autocast("cpu", dtype=torch.bfloat16)(layer.self_attn.forward)
        return model

    assert_equal(build)


@pytest.mark.parametrize("scheme", ["grape", "grape_m", "transformer_xl", "disentangled", "pope"])
def test_layers_compute_what_follows_from_their_weights_together(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results equal those of layers that compute it separately."""

    found, joined = results(built(scheme, CHANGES[0])), []
    monkeypatch.setattr(AlikeParts, "of", lambda self, part: joined.append(part) or [part])
    monkeypatch.setattr(ForwardState, "together", lambda *_, **__: None)
    torch.testing.assert_close(found, results(built(scheme, CHANGES[0])), atol=2e-5, rtol=1e-4)
    assert joined or scheme == "pope"


def skipped(model: Any, ids: Tensor) -> None:
    """As by LayerDrop. Hooks on weights of a layer that is skipped are not called."""
    model.model.layers[1].forward = lambda hidden_states, *_, **__: hidden_states
    for part in model.position_encoding.stacks["model"].layers[1].parts:
        for weight in part.parameters():
            weight.register_hook(lambda gradient: pytest.fail("nobody computed this gradient"))
    model(ids, labels=ids, use_cache=False).loss.backward()


def left_early(model: Any, ids: Tensor) -> None:
    model(ids, use_cache=False, output_hidden_states=True).hidden_states[2].square().mean().backward()


def frozen(model: Any, ids: Tensor) -> None:
    for part in model.position_encoding.stacks["model"].layers[0].parts:
        part.requires_grad_(False)
    model(ids, labels=ids, use_cache=False).loss.backward()


def trained_apart(model: Any, ids: Tensor) -> None:
    """Each layer has a loss, and a backward pass before the next layer runs, or after all layers have run."""
    outputs: list[Tensor] = []
    for number, layer in enumerate(model.model.layers):

        def detached(
            hidden: Tensor, *args: Any, last: bool = number > 1, own: Any = layer.forward, **kwargs: Any
        ) -> Any:
            output = own(hidden.detach(), *args, **kwargs)
            if last:
                outputs.append(output)
            else:
                output.square().mean().backward()
            return output.detach()

        layer.forward = detached
    model(ids, use_cache=False)
    for output in outputs:
        output.square().mean().backward()


def differentiated_twice(model: Any, ids: Tensor) -> None:
    loss = model(ids, labels=ids, use_cache=False).loss
    weights = [weight for layer in model.model.layers for weight in layer.self_attn.parameters()]
    sum(gradient.square().sum() for gradient in torch.autograd.grad(loss, weights, create_graph=True)).backward()


def changed_before_the_backward_pass(model: Any, ids: Tensor) -> None:
    """Weights are frozen, and hooks are set on them, after the forward."""
    loss = model(ids, labels=ids, use_cache=False).loss
    first, second, third, _ = (
        [weight for part in layer.parts for weight in part.parameters()]
        for layer in model.position_encoding.stacks["model"].layers
    )
    for weight in first:
        weight.requires_grad_(False)
    for weight in second:
        weight.register_hook(lambda gradient: 2 * gradient)
    torch.autograd.graph.register_multi_grad_hook(third, lambda gradients: None)
    loss.backward()


def computed_weights(model: Any, ids: Tensor) -> None:
    """The weights of the call follow from others, and keep their gradients."""
    weights = {name: 1.5 * weight for name, weight in model.named_parameters()}
    for weight in weights.values():
        weight.retain_grad()
    torch.func.functional_call(model, weights, (ids,), {"labels": ids, "use_cache": False}).loss.backward()
    for name, weight in weights.items():
        model.get_parameter(name).grad = weight.grad


def differentiated_forwards(model: Any, ids: Tensor) -> None:
    model.set_attn_implementation("eager")
    with forward_ad.dual_level():
        weights = {name: forward_ad.make_dual(weight, weight.sin()) for name, weight in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (ids,), {"use_cache": False}).logits
        tangent = forward_ad.unpack_dual(logits).tangent.detach().sum((0, 1))
        model.lm_head.weight.grad = tangent.unsqueeze(-1).expand_as(model.lm_head.weight)


def tied(model: Any, ids: Tensor) -> None:
    """Two layers have the same weights."""
    first, *_, last = model.position_encoding.stacks["model"].layers
    for part, other in zip(first.parts, last.parts, strict=True):
        for module, same in zip(part.modules(), other.modules(), strict=True):
            same._parameters.update(module._parameters)
    model.model.layers[1].forward = lambda hidden_states, *_, **__: hidden_states
    model(ids, labels=ids, use_cache=False).loss.backward()


JOINED = ["disentangled", "fire", "grape", "log_cpb", "pope", "selective_rope", "string", "tisa", "transformer_xl"]
STEPS = [
    skipped, left_early, frozen, trained_apart, differentiated_twice, changed_before_the_backward_pass,
    computed_weights, differentiated_forwards, tied,
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "step"), in_turn(JOINED, STEPS))
def test_what_layers_compute_together_has_the_gradients_of_layers_that_compute_alone(
    scheme: str, step: Callable[[Any, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer without a gradient has none, and not zeros."""

    def gradients() -> dict[str, Tensor]:
        model, ids = drawn(patched("llama_gqa", scheme, num_hidden_layers=LAYERS), std=0.1), tokens(2, 9)
        for parameter in model.position_encoding.parameters():
            parameter.data.sub_(0.5 if scheme == "pope" else 0)  # Nothing is beyond its limits.
        step(model.train(), ids)
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    found = gradients()
    monkeypatch.setattr(AlikeParts, "of", lambda self, part: [part])
    monkeypatch.setattr(ForwardState, "together", lambda *_, **__: None)
    torch.testing.assert_close(found, gradients(), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("scheme", ["fire", "pope", "string"])
def test_positions_have_the_gradient_of_layers_that_compute_alone(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = drawn(patched("llama_gqa", scheme, num_hidden_layers=LAYERS), std=0.1).train(), tokens(2, 9)

    def gradient() -> Tensor:
        positions = torch.arange(9.0).unsqueeze(0).requires_grad_()
        loss = model(ids, labels=ids, position_ids=positions, use_cache=False).loss
        return torch.autograd.grad(loss, positions)[0]

    found = gradient()
    monkeypatch.setattr(ForwardState, "together", lambda *_, **__: None)
    torch.testing.assert_close(found, gradient(), atol=2e-5, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["log_cpb", "string", "t5", "tupe"])
def test_values_that_a_cache_keeps_do_not_depend_on_autocast(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = built(scheme, lambda model: None), tokens(length=9)

    def decode() -> Tensor:
        cache, logits = DynamicCache(config=model.config), []
        for start, stop, casts in ((0, 6, False), (6, 7, True), (7, 8, False), (8, 9, False)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
                logits.append(model(ids[:, start:stop], past_key_values=cache).logits.float())
        return torch.cat(logits, dim=1)

    found = decode()
    monkeypatch.setattr(KeptValues, "of", lambda kept, part, name, compute, fits=None: compute())
    torch.testing.assert_close(found, decode(), atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "fire"])
def test_layers_that_are_compiled_alone_decode(scheme: str) -> None:
    model, ids = built(scheme, lambda model: None), tokens(length=9)
    expected = model(ids).logits
    model.model.layers[1].compile(backend="aot_eager")
    steps = decoded(model, ids, DynamicCache(config=model.config), [7, 1, 1])
    torch.testing.assert_close(steps, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_mask_may_be_changed_in_place_between_layers(scheme: str) -> None:
    """As by a tool that hides keys from single layers."""
    ids = tokens(length=9)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]

    def run(in_place: bool) -> Tensor:
        def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            mask = kwargs["attention_mask"] if in_place else kwargs["attention_mask"].clone()
            mask[..., 2:, 1] = False
            return args, kwargs | {"attention_mask": mask}

        model, mask = built(scheme, lambda model: None), causal.clone()
        for layer in model.model.layers[2:]:
            layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True)
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
        return logits

    torch.testing.assert_close(run(in_place=True), run(in_place=False), atol=2e-5, rtol=1e-4)


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_is_freed_with_its_last_reference(scheme: str) -> None:
    model, ids = built(scheme, lambda model: None), tokens(length=9)
    cache = DynamicCache(config=model.config)
    decoded(model, ids, cache, [7, 1, 1])
    freed = weakref.ref(cache)
    del cache
    assert freed() is None


@pytest.mark.parametrize(("scheme", "reentrant"), in_turn(SCHEMES, [True, False]))
def test_activations_of_recomputed_layers_are_freed_without_a_backward_pass(scheme: str, reentrant: bool) -> None:
    model = built(scheme, lambda model: None).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found: list[weakref.ref[Tensor]] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(weakref.ref(kwargs["hidden_states"])), with_kwargs=True
    )
    model(inputs_embeds=torch.randn(2, 9, 32, requires_grad=True), use_cache=False)
    gc.collect()
    assert len(found) == 1
    assert found[0]() is None


@pytest.mark.parametrize("scheme", ["log_cpb", "fire", "tisa", "t5"])
def test_tokens_that_a_model_prepends_see_each_other_with_gradients_too(scheme: str) -> None:
    """CPM-Ant computes its scores, and its prompt is seen in both directions."""
    model, ids = drawn(placed(tiny_model(pair_named("causal-cpmant")).eval(), scheme), std=0.3), tokens(2, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)


class Raised(nn.Module):
    """A parametrization that adds a number."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.3


class Faster(LearnedFrequenciesMap):
    """The frequencies with offsets to which that number is added."""

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        return super().inverse_frequencies(lengths) * math.exp(0.3)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("parametrized", [True, False])
@torch.no_grad()
def test_layers_whose_parts_have_other_modules_are_not_computed_together(layer: int, parametrized: bool) -> None:
    model, ids = drawn(patched("llama_gqa", "string", num_hidden_layers=LAYERS), std=0.3), tokens(2, 9)
    expected = copy.deepcopy(model)
    own, other = (
        [part for part in one.position_encoding.modules() if type(part) is LearnedFrequenciesMap][layer]
        for one in (model, expected)
    )
    other.log_offsets += 0.3
    if parametrized:
        parametrize.register_parametrization(own, "log_offsets", Raised())
    else:
        own.__class__ = Faster
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("scheme", [*JOINED, "grape_m"])
def test_weights_with_parametrizations_count_where_layers_share_what_follows_from_weights(
    scheme: str, every: bool
) -> None:
    model, ids = drawn(patched("llama_gqa", scheme, num_hidden_layers=LAYERS), std=0.3), tokens(2, 9)
    expected = copy.deepcopy(model)
    layers = (model.position_encoding.modules(), expected.position_encoding.modules())
    weighted = [(one, other) for one, other in zip(*layers, strict=True) if one._parameters]
    for part, other in weighted if every else weighted[-1:]:
        for name in list(part._parameters):
            with torch.no_grad():
                other.get_parameter(name).add_(0.3)
            parametrize.register_parametrization(part, name, Raised())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["disentangled", "fire", "grape", "transformer_xl"])
def test_weights_that_a_hook_computes_are_read_after_it(scheme: str) -> None:
    """The hooks of pruning run before the forward of a part."""
    model, ids = drawn(patched("llama_gqa", scheme), std=0.3), tokens(2, 9)
    expected = copy.deepcopy(model)
    for part, other in zip(model.position_encoding.modules(), expected.position_encoding.modules(), strict=True):
        for name in list(part._parameters):
            prune.identity(part, name)
            with torch.no_grad():
                part.get_parameter(f"{name}_orig").add_(0.3)
                other.get_parameter(name).add_(0.3)
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("scheme", "option", "value"), [("log_cpb", "limit", 3.0), ("grape", "normalize", False)])
def test_a_layer_may_have_another_option(scheme: str, option: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = drawn(patched("llama_gqa", scheme, num_hidden_layers=LAYERS), std=0.3), tokens(2, 9)
    setattr(model.position_encoding.stacks["model"].layers[2].logit_bias, option, value)
    found = model(ids).logits
    monkeypatch.setattr(AlikeParts, "of", lambda self, part: [part])
    monkeypatch.setattr(ForwardState, "together", lambda *_, **__: None)
    torch.testing.assert_close(found, model(ids).logits, atol=1e-5, rtol=1e-4)


def test_a_layer_may_have_another_number_of_weights() -> None:
    """As after pruning of units. Here, units are repeated at half their weight."""
    model, ids = drawn(patched("llama_gqa", "log_cpb", num_hidden_layers=LAYERS), std=0.3), tokens(2, 9)
    expected = model(ids).logits
    bias = model.position_encoding.stacks["model"].layers[2].logit_bias
    bias.hidden_weight, bias.hidden_bias = (
        nn.Parameter(weight.detach().repeat_interleave(2, dim=0)) for weight in (bias.hidden_weight, bias.hidden_bias)
    )
    bias.output_weight = nn.Parameter(bias.output_weight.detach().repeat_interleave(2, dim=1) / 2)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_layers_of_a_copy_compute_together_too(copied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = copied(patched("llama_gqa", "log_cpb", num_hidden_layers=LAYERS)), []
    network = LogCpbNetwork.network
    monkeypatch.setattr(LogCpbNetwork, "network", lambda self, *args: calls.append(self) or network(self, *args))
    model(tokens(2, 9))
    assert len(calls) == 1


@pytest.mark.parametrize("scheme", SCHEMES[:-2])
def test_most_layers_check_nothing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[int] = []
    original = CheckedLayer.attend

    def attend(checked: CheckedLayer, site: Any, call: Any, arguments: Any, query: Tensor, *heads: Tensor) -> Any:
        output = original(checked, site, call, arguments, query, *heads)
        attended.extend([query.shape[2]] * (output is not None))
        return output

    monkeypatch.setattr(CheckedLayer, "attend", attend)
    results(built(scheme, lambda model: None))
    assert attended == [6] * (LAYERS - 1) + [1] * 3 * (LAYERS - 1) + [9] * (LAYERS - 1)


@pytest.mark.parametrize(
    "configs",
    [(ShawConfig(max_distance=2), ShawConfig(max_distance=4)), (TisaConfig(), TisaConfig(num_kernels=2))],
    ids=["shaw", "tisa"],
)
def test_layers_with_other_options_are_of_another_kind(configs: Any, assert_equal: Any) -> None:
    assert_equal(lambda: built(ScheduleConfig(configs * (LAYERS // 2)), lambda model: None))
