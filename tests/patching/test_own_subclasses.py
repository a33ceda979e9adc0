"""Subclasses of the library's parts and configs: overridden methods are called, also in faster code paths.

Every override here does nothing, so the model has to be that of a scheme without the part, mostly of 'none'.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, DynamicCache

from hf_posenc import (
    DistanceBias,
    RopeConfig,
    SchemeConfig,
    SchemeParts,
    as_scheme,
    get_scheme,
    load_position_adapter,
    option,
    patch_model,
    save_position_adapter,
)
from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import DynamicScaling, registry
from hf_posenc.schemes.arrangement.schedule import nested_scheme
from hf_posenc.schemes.bias.cope import CopeBias
from hf_posenc.schemes.config import BuildContext, OuterConfig
from hf_posenc.schemes.parts import PairwiseBias, SeparableBias
from hf_posenc.schemes.position_maps.affine import AffineMap
from hf_posenc.schemes.position_maps.pairwise import FarRotation, HiddenPairs
from hf_posenc.schemes.rotary.contextual import ContextualRotation
from hf_posenc.schemes.rotary.rope import RotaryMap
from hf_posenc.schemes.rotary.string import CayleyMap
from hf_posenc.schemes.scale.constant import ConstantScale
from hf_posenc.schemes.weights import KeptValues
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, patched, tokens
from tests.models import tiny


def nothing(kind: type, method: str) -> dict[str, Callable[..., Any]]:
    """A `method` that does nothing, by name; "maps" are those of queries and of keys."""
    does: dict[str, Callable[..., Any]] = {
        "maps": lambda self, heads, phases: heads,
        "rotated": lambda self, pairs: (pairs.query, pairs.key),
    }
    override = does.get(method, lambda self, *given: 0 * getattr(kind, method)(self, *given))
    return dict.fromkeys(("map_query", "map_key") if method == "maps" else (method,), override)


def without(kind: type, method: str, inherited: bool = False) -> type:
    """A subclass whose `method` does nothing, as its own or as that of another base class."""
    override = nothing(kind, method)
    return type("Own", (type("Mixin", (), override), kind), {}) if inherited else type("Own", (kind,), override)


class OwnConfig(OuterConfig):
    """A scheme in whose part a method does nothing."""

    name: ClassVar[str] = "own"

    inner: SchemeConfig = option(RopeConfig, nested_scheme)
    method: str = "forward"
    place: str = "class"

    def build(self, context: BuildContext) -> SchemeParts:
        (part,) = parts = self.inner.build(context)
        kind: Any = type(part)
        if self.place in ("class", "mixin"):
            part.__class__ = without(kind, self.method, self.place == "mixin")
        elif self.place == "part":
            part.forward = MethodType(nothing(kind, "forward")["forward"], part)
        else:
            part.__class__ = made = type("Own", (kind,), {})
            made.forward = nothing(kind, "forward")["forward"]  # type: ignore[attr-defined]
        return parts


def own(name: str, method: str, does: Callable[..., Any]) -> Any:
    """The config of a scheme with another method."""
    changed = {"name": f"own_{name}", method: does, "__module__": __name__}
    return dataclass(frozen=True)(type("Own", (get_scheme(name),), changed))


def frequencies(config: Any, context: BuildContext) -> torch.Tensor:
    # The constants of a `DynamicScaling` are exponents.
    return torch.full((context.head_dim // 2,), 0.0 if config.scaling is None else 9.0)


OwnShift = own("position_shift", "position_map", lambda config: without(AffineMap, "forward")())
OwnSum = own("composed", "build", lambda config, context: SchemeParts())
OwnXpos = own("xpos", "rotation", lambda config, context: RotaryMap(torch.zeros(context.head_dim // 2), "half"))
OwnResonance = own("resonance", "frequencies", frequencies)
OWN = {one.name: one for one in (dataclass(frozen=True)(OwnConfig), OwnShift, OwnSum, OwnXpos, OwnResonance)}
GATES = {"scheme": "forget_gate", "gate": "bias_only"}
#: A custom scheme, and the scheme that computes the same.
ROWS: list[tuple[Any, Any]] = [
    *((OwnConfig(inner), "none") for inner in ("alibi", "t5", "fire", "forget_gate", GATES, "repo", "grape_m")),
    (as_scheme([OwnConfig("alibi"), "forget_gate"]), "forget_gate"),
    (as_scheme([OwnConfig(GATES), "forget_gate"]), "forget_gate"),
    (as_scheme([OwnConfig("repo"), "alibi"]), "alibi"),
    *((OwnConfig("forget_gate", place=place), "none") for place in ("mixin", "made class")),
    *((OwnConfig(inner, "rotated"), "none") for inner in ("repo", "grape_m", "selective_rope")),
    *((OwnConfig("repo", method), "none") for method in ("places", "angles")),
    *((OwnConfig(inner, "inverse_frequencies"), "none") for inner in ("rope", "learned_rope", "mrope")),
    *((OwnConfig("rope", method), "none") for method in ("angles", "maps")),
    (OwnConfig("fire", "normalized_distance"), "none"),
    (OwnShift("alibi"), "none"),
    (OwnSum(("alibi", "rope")), "none"),
    (OwnXpos(), "none"),
    (OwnResonance(), "none"),
    (OwnResonance(scaling=DynamicScaling(2.0, 64)), "none"),
]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEMES", registry._SCHEMES | OWN)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Those of a text with four generated tokens, whose logits in `generate` are the same."""
    made = model.generate(
        tokens(), min_new_tokens=4, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    whole: torch.Tensor = model(made.sequences[:, :-1], use_cache=False).logits
    assert distance(torch.stack(made.logits, dim=1), whole[:, -4:]) < 1e-5
    return whole


@pytest.mark.parametrize(("own", "same"), ROWS, ids=lambda scheme: getattr(scheme, "label", str(scheme)))
def test_an_override_is_computed(own: Any, same: Any, tmp_path: Path) -> None:
    model = patched("llama_gqa", own)
    expected = logits(patched("llama_gqa", same))
    assert distance(logits(model), expected) < 1e-5
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.position_encoding.config == own
    assert distance(logits(loaded), expected) < 1e-5


def test_statements_are_about_the_method_they_were_made_for() -> None:
    assert not without(SeparableBias, "forward").separable
    assert without(SeparableBias, "key_terms").separable
    assert without(ContextualRotation, "own_features").rotates_heads
    for kind in (FarRotation, HiddenPairs):
        assert without(kind, "forward").zero_below == 0
        assert without(kind, "forward").other_heads is PairwiseBias.other_heads
    assert without(ConstantScale, "forward")(2.0).factor_of_all is None
    assert without(AffineMap, "renumber")().last_position(3) is None
    assert not without(CopeBias, "key_features").whole_heads
    assert without(CopeBias, "forward").whole_heads
    assert without(RotaryMap, "maps").symmetric
    assert not without(RotaryMap, "map_key").symmetric
    assert not without(RotaryMap, "map_key", inherited=True).symmetric


#: A number that a callback of a trainer might change.
SCHEDULE = {0: 1.0}


class Steps(DistanceBias):
    """A penalty on distance whose slopes are a buffer that is saved, and one that is not."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__()
        self.strength = 1.0
        self.options = {"factor": 1.0}
        self.constant = torch.ones(())
        self.register_buffer("saved", torch.zeros(context.num_heads))
        self.register_buffer("computed", torch.arange(1.0, 1 + context.num_heads), persistent=False)

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        factor = self.strength * self.options["factor"] * self.constant * SCHEDULE[0]
        slopes = factor * (self.saved + self.computed).float()
        return -torch.einsum("h,...->h...", slopes, distance.abs().float())


OwnBuffers = own("alibi", "part_class", Steps)
OWN[OwnBuffers.name] = OwnBuffers


def write(part: Any) -> None:
    part.saved.fill_(2.0)


def set_attribute(part: Any) -> None:
    part.strength = 3.0


def change_option(part: Any) -> None:
    part.options["factor"] = 3.0


def write_constant(part: Any) -> None:
    part.constant.fill_(3.0)


def set_global(part: Any) -> None:
    SCHEDULE[0] = 3.0


def hook(part: Any) -> None:
    part.register_forward_hook(lambda part, given, result: 3.0 * result)


def unhook(part: Any) -> None:
    part._forward_hooks.clear()


CHANGES = [(None, change) for change in (write, set_attribute, change_option, write_constant, set_global, hook)]


@pytest.mark.parametrize(("before", "after"), [*CHANGES, (hook, unhook)])
@torch.no_grad()
def test_a_part_may_change_between_tokens(before: Any, after: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that decoding keeps are those of the part as it is now."""

    def last_token(after: Any) -> torch.Tensor:
        monkeypatch.setitem(SCHEDULE, 0, 1.0)
        model, cache = patched("llama_gqa", OwnBuffers()), DynamicCache()
        given = zip((before, None, after), tokens(1, 8).split([6, 1, 1], dim=1), strict=True)
        for change, ids in given:
            for part in model.position_encoding.parts():
                _ = change and change(part)
            logits: torch.Tensor = model(ids, past_key_values=cache).logits
        return logits

    found = last_token(after)
    assert distance(found, last_token(None)) > 1e-3
    monkeypatch.setattr(KeptValues, "of", lambda kept, part, name, compute, fits=None: compute())
    assert distance(found, last_token(after)) <= 1e-5


@pytest.mark.parametrize("way", ["folder", "meta device", "scheme alone", "name", "other order"])
def test_buffers_of_an_own_part_are_kept(way: str, tmp_path: Path) -> None:
    patched("llama_gqa", None).save_pretrained(tmp_path / "stock")
    stock = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "stock")
    model = patch_model(stock(), OwnBuffers())
    layers = model.position_encoding.stacks["model"].layers
    layers[0].logit_bias.saved.fill_(2.0)
    expected = logits(model)
    assert distance(logits(patch_model(stock(), OwnBuffers())), expected) > 1e-2
    if way == "folder":
        model.save_pretrained(tmp_path / "patched")
        made = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    elif way == "meta device":
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(model.config)
        made.load_state_dict(model.state_dict(), assign=True)
        made.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq
    elif way == "scheme alone":
        save_position_adapter(model, tmp_path / "scheme")
        made = load_position_adapter(stock(), tmp_path / "scheme")
    elif way == "name":
        made = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
    else:
        model.model.layers = made_layers = torch.nn.ModuleList(reversed(model.model.layers))
        made = patch_model(model, OwnBuffers())
        made.model.layers = torch.nn.ModuleList(reversed(made_layers))
    torch.testing.assert_close(logits(made.eval()), expected)


@pytest.mark.parametrize("name", ["alibi", "log_cpb", "sinusoidal", "t5", "shaw", "tupe"])
def test_a_part_class_is_built_or_refused(name: str) -> None:
    class Zero(DistanceBias):
        def __init__(self, config: Any, context: BuildContext) -> None:
            super().__init__()

        def forward(self, distance: torch.Tensor) -> torch.Tensor:
            return torch.zeros(4, *distance.shape)

    scheme = own(name, "part_class", Zero)()
    if name in ("shaw", "tupe"):
        with pytest.raises(TypeError, match=r"part_class is Zero, but Own.build .* Define `build` as well"):
            patched("llama_gqa", scheme)
    else:
        assert isinstance(patched("llama_gqa", scheme).position_encoding.stacks["model"].layers[0].logit_bias, Zero)


def with_bias(does: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A scheme that is one bias of distance."""
    bias = type("OwnBias", (DistanceBias,), {"forward": lambda self, distance: does(distance)})
    return own("none", "build", lambda self, context: SchemeParts(logit_bias=bias()))()


def test_a_bias_that_reads_its_distances_is_placed_in_a_model_without_weights() -> None:
    scheme = with_bias(lambda distance: -(distance.abs() / max(int(distance.abs().max()), 1)).expand(2, -1))
    with torch.device("meta"):
        model = patch_model(tiny("LlamaForCausalLM"), scheme)
    assert next(model.parameters()).is_meta
    assert model.position_encoding.config == scheme


@pytest.mark.parametrize(
    ("option_", "message"),
    [
        *((value, "which could not be saved") for value in ([1.0], {"a": 1}, {1.0}, math.inf, torch.float32)),
        *((value, "which could not be saved") for value in (np.float32(2), np.int64(2), (torch.ones(()),))),
        (1.0, "expected an integer"),
    ],
    ids=str,
)
def test_an_option_that_could_not_be_saved_is_refused_by_a_patch(option_: Any, message: str) -> None:
    @dataclass(frozen=True)
    class Plain(RopeConfig):
        name: ClassVar[str] = "plain"
        own: int = 1

    for scheme in (Plain(own=option_), [Plain(own=option_), "alibi"]):
        with pytest.raises(ValueError, match=rf"^Plain\.own is .*{message}"):
            patch_model(ARCHITECTURES["llama_gqa"].build(), scheme)


@pytest.mark.parametrize(
    ("part", "shape"),
    [("ssmax", "(batch or 1, heads or 1, length)"), ("fire", "(batch or 1, 4 heads, query_len, key_len)")],
)
def test_values_with_too_few_axes_are_refused(part: str, shape: str) -> None:
    model = patched("llama_gqa", ["rope", part])
    layer = model.position_encoding.stacks["model"].layers[0]
    one = layer.logit_scale if part == "ssmax" else layer.logit_bias
    kind = type(one)
    one.__class__ = type("Own", (kind,), {"forward": lambda self, given: kind.forward(self, given)[0]})
    # As many rows and tokens as heads, which torch would broadcast.
    with pytest.raises(ValueError, match=rf"^Own returned the shape \(.*; expected {re.escape(shape)}\.$"):
        model(tokens(4, 4))


def test_a_bias_of_pairs_with_one_head_is_refused_and_a_config_that_builds_nothing() -> None:
    model = patched("llama_gqa", "fire")
    bias = model.position_encoding.stacks["model"].layers[0].logit_bias
    kind = type(bias)
    bias.__class__ = type("Own", (kind,), {"forward": lambda self, pairs: kind.forward(self, pairs)[:, :1]})
    with pytest.raises(ValueError, match=r"^Own returned the shape \(1, 1, .*; expected \(batch or 1, 4 heads, "):
        model(tokens(4, 4))
    with pytest.raises(NotImplementedError, match="Empty has neither `part_class` nor a method `build`"):
        type("Empty", (SchemeConfig,), {"name": "empty"})().build(BuildContext(16, 2, 8))


def test_a_method_that_is_set_on_a_part_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has its own 'forward', set on the object.*Define the method in a subclass"):
        patch_model(ARCHITECTURES["llama_gqa"].build(), OwnConfig("forget_gate", place="part"))


@pytest.mark.parametrize(("scheme", "method"), [("forget_gate", "forward"), ("rope", "phases"), ("t5", "forward")])
def test_a_method_that_is_set_on_a_placed_part_is_refused(scheme: str, method: str, tmp_path: Path) -> None:
    model = patched("llama_gqa", scheme)
    expected = logits(model)
    part = next(part for part in model.position_encoding.parts())
    setattr(part, method, lambda *given: None)
    with pytest.raises(UnsupportedError, match=rf"has its own '{method}', .*Define the method in a subclass of"):
        model(tokens())
    with pytest.raises(UnsupportedError, match=rf"has its own '{method}'"):
        model.save_pretrained(tmp_path)
    delattr(part, method)
    assert torch.equal(logits(model), expected)
    add_hook_to_module(part, AlignDevicesHook("cpu"))
    assert torch.equal(logits(model), expected)
    remove_hook_from_module(part)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("scheme", "weight"), [("forget_gate", "weight"), ("grape_ap", "projection"), ("pope", "delta")]
)
def test_hooks_that_a_part_does_not_run_are_named(scheme: str, weight: str) -> None:
    """A weight that a hook computes would stay as it is when the hook was registered."""
    model = patched("llama_gqa", scheme)
    part = next(part for part in model.position_encoding.parts())
    prune.random_unstructured(part, weight, amount=0.5)
    with pytest.raises(UnsupportedError, match=r"RandomUnstructured computes a weight of a \w+ in a hook.*parametrize"):
        model(tokens())
    prune.remove(part, weight)
    expected = logits(model)
    part.register_forward_hook(lambda *given: None)
    with pytest.warns(UserWarning, match=r"A hook of a \w+ is not always called.*define the methods in a subclass"):
        assert torch.equal(logits(model), expected)


def test_a_pruned_weight_of_a_part_that_runs_its_hooks_follows_the_weight() -> None:
    model, other = patched("llama_gqa", "t5"), patched("llama_gqa", "t5")
    (part,), (own,) = ({*one.position_encoding.parts()} for one in (model, other))
    prune.random_unstructured(part, "weight", amount=0.5)
    with torch.no_grad():
        part.weight_orig.add_(1.0)
        own.weight.copy_(part.weight_orig * part.weight_mask)
    assert distance(logits(model), logits(other)) < 1e-5


AT_POSITIONS = [("rope", "phases"), ("log_cpb", "forward"), ("log_n_scale", "forward"), ("sinusoidal", "forward")]


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "method"), AT_POSITIONS)
def test_autocast_rounds_no_positions(scheme: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of matrices in half precision are off by whole radians at position 600."""
    model, casts = patched("llama_gqa", scheme), []
    kind = type(model.position_encoding.parts()[0])
    before = getattr(kind, method)

    def observed(*given: Any) -> Any:
        casts.append(torch.is_autocast_enabled("cpu"))
        return before(*given)

    monkeypatch.setattr(kind, method, observed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens())
    assert {*casts} == {False}


def test_a_subclass_needs_its_own_name() -> None:
    class Unnamed(RopeConfig):
        pass

    for scheme in (Unnamed(), Unnamed, ["alibi", Unnamed()]):
        with pytest.raises(ValueError, match=r"'rope' already belongs to .*\.RopeConfig\. Give Unnamed another name"):
            as_scheme(scheme)


def test_a_rotation_in_a_basis_takes_frequencies_only() -> None:
    for rotation in (without(RotaryMap, "angles")(torch.ones(4), "half"), RotaryMap(torch.ones(4), "half", 2.0)):
        with pytest.raises(ValueError, match="CayleyMap reads only the frequencies of its rotation"):
            CayleyMap(rotation, None)
