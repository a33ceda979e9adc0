"""Properties of every scheme in the table."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc.errors import UnknownNameError
from hf_posenc.schemes import (
    AttentionPairs,
    BlendedConfig,
    BuildContext,
    DistanceBias,
    LearnedRopeConfig,
    PairwiseBias,
    Part,
    Positions,
    QueryKeyMap,
    RopeConfig,
    SchemeConfig,
    TisaConfig,
    XposConfig,
    get_scheme,
    list_schemes,
    scheme_from_dict,
)
from hf_posenc.schemes.bias.tisa import TisaBias
from hf_posenc.schemes.logits import positional_logits

from . import own_schemes
from .own_schemes import own_schemes_are_registered  # noqa: F401
from .table import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KEY_VALUE_HEADS,
    TABLE,
    LogitCase,
    Row,
    context_for,
    parts_for,
    positions_of,
    variants_of,
)

#: Also registered functions of the distance.
ROWS = TABLE | own_schemes.ROWS
VARIANTS = variants_of(ROWS)

EVERY_VARIANT = pytest.mark.parametrize(
    ("name", "config"), [pytest.param(name, config, id=label) for name, config, label in VARIANTS]
)

EVERY_SCHEME = pytest.mark.parametrize(
    ("name", "config"), [pytest.param(name, row.variants[0], id=name) for name, row in ROWS.items()]
)


def parts_of(config: SchemeConfig) -> list[Part]:
    return list(parts_for(config))


def heads_of(positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and hidden states that depend on a token's id and position only, for any batch of sequences."""
    generator = torch.Generator().manual_seed(11)
    bank = torch.randn(64, (HEADS + KEY_VALUE_HEADS) * HEAD_DIM + HIDDEN, generator=generator)
    rows = bank[positions.ids % 64]
    query, key, hidden = rows.split((HEADS * HEAD_DIM, KEY_VALUE_HEADS * HEAD_DIM, HIDDEN), dim=-1)
    return (
        query.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2),
        key.unflatten(-1, (KEY_VALUE_HEADS, HEAD_DIM)).transpose(1, 2),
        hidden,
    )


def pairs_of(part: PairwiseBias, positions: Positions, query: Tensor, key: Tensor, hidden: Tensor) -> AttentionPairs:
    features = part.key_features(hidden) if part.num_features else None
    return AttentionPairs(
        query, key, torch.arange(query.shape[2]), positions, HEAD_DIM**-0.5, hidden, key_features=features
    )


def outputs(parts: list[Part], positions: Positions, heads: Any = None) -> list[Tensor]:
    """Everything the parts compute for these positions; of biases on queries and keys, what a causal mask shows."""
    results: list[Tensor] = []
    query, key, hidden = heads_of(positions) if heads is None else heads
    for part in parts:
        if isinstance(part, QueryKeyMap):
            phases = part.phases(positions)
            results += phases
            dtype = next((parameter.dtype for parameter in part.parameters()), torch.float32)
            results.append(part.map_query(query.to(dtype), phases))
            results.append(part.map_key(key.to(dtype), phases))
        elif isinstance(part, DistanceBias):
            results.append(part(torch.arange(-30, 31)))
        elif isinstance(part, PairwiseBias):
            dtype = next((parameter.dtype for parameter in part.parameters()), torch.float32)
            pairs = pairs_of(part, positions, *(x.to(dtype) for x in (query, key, hidden)))
            real = positions.ids >= 0
            visible = (pairs.slot_distance <= 0) & real.unsqueeze(-2) & real.unsqueeze(-1)
            results.append(part(pairs).masked_fill(~visible.unsqueeze(1), 0.0))
        else:
            results.append(part(positions))
    return results


def test_the_table_has_a_row_for_every_registered_scheme():
    assert sorted(name for name, row in ROWS.items() if row.kind != "mixed") == list_schemes()
    for name, row in ROWS.items():
        assert {type(config) for config in row.variants} == {get_scheme(name)}


@EVERY_VARIANT
def test_json_round_trip(name, config):
    entry = json.loads(json.dumps(config.to_dict()))
    again = scheme_from_dict(entry)
    assert again == config
    assert hash(again) == hash(config)
    assert entry["scheme"] == name
    assert type(config).from_options({key: value for key, value in entry.items() if key != "scheme"}) == config


@EVERY_SCHEME
def test_misspelt_options_are_refused_with_a_hint(name, config):
    fields = [field for field in config.to_dict() if field != "scheme"]
    misspelt = (fields[0] + "s") if fields else "scale"
    with pytest.raises(UnknownNameError, match="Did you mean" if fields else "Known: none"):
        type(config).from_options({misspelt: 1})


@EVERY_VARIANT
def test_parts_survive_casts_copies_and_pickles(name, config):
    positions = positions_of(40, 12)
    for part in parts_of(config):
        expected = outputs([part], positions)
        for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            assert all(map(torch.equal, expected, outputs([other], positions)))
        learned = any(True for _ in part.parameters())
        for dtype in (torch.bfloat16, torch.float16):
            for value, cast in zip(expected, outputs([copy.deepcopy(part).to(dtype)], positions), strict=True):
                if learned:
                    # A learned table is cast with the model; what it is multiplied with is not.
                    torch.testing.assert_close(cast.float(), value, rtol=2e-2, atol=2e-2)
                else:
                    assert cast.dtype == torch.float32
                    assert torch.equal(value, cast)


@EVERY_VARIANT
def test_building_under_a_meta_device_and_a_low_default_dtype_changes_no_constant(name, config):
    expected = outputs(parts_of(config), positions_of(20))
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            parts = parts_of(config)
    finally:
        torch.set_default_dtype(default)
    if any(True for part in parts for _ in part.parameters()):
        assert all(parameter.is_meta for part in parts for parameter in part.parameters())
        torch.manual_seed(0)
        parts = [part.to_empty(device="cpu").float() for part in parts]
        for module in (module for part in parts for module in part.modules()):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for value, other in zip(expected, outputs(parts, positions_of(20)), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


@EVERY_VARIANT
def test_a_sequence_is_encoded_the_same_in_any_batch_and_padding_is_finite(name, config):
    parts = parts_of(config)
    alone = outputs(parts, positions_of(30))
    batched = outputs(parts, positions_of(48, 30, 7))
    for value, other in zip(alone, batched, strict=True):
        if value.shape == other.shape:
            assert torch.equal(value, other)
        else:
            # The token axis is the one of 30, twice for pairs.
            row = other[1]
            for axis, size in enumerate(row.shape):
                if size == 48:
                    row = row.narrow(axis, 18, 30)
            torch.testing.assert_close(row, value[0], rtol=1e-5, atol=1e-6)
    for value in outputs(parts, positions_of(5, 12, padded_to=16)):
        assert torch.isfinite(value).all()


EVERY_BIAS_OF_PAIRS = pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(name, config, id=label)
        for name, config, label in VARIANTS
        if isinstance(parts_for(config).logit_bias, PairwiseBias)
    ],
)


@EVERY_BIAS_OF_PAIRS
def test_queries_over_a_cache_that_may_have_free_slots_have_the_bias_of_all_in_float32(name, config):
    part: Any = parts_for(config).logit_bias
    positions = positions_of(14)
    every = pairs_of(part, positions, *heads_of(positions))
    for slots in ([13], [4, 5, 6], [9, 2]):
        of_slots = {"query": every.query[:, :, slots], "hidden_states": every.hidden_states[:, slots]}
        some = dataclasses.replace(every, query_slots=torch.tensor(slots), **of_slots)
        torch.testing.assert_close(part(some), part(every)[:, :, slots], rtol=1e-5, atol=1e-5)
    free = dataclasses.replace(
        every,
        key=torch.nn.functional.pad(every.key, (0, 0, 0, 5)),
        keys=positions_of(19),
        key_features=None if every.key_features is None else torch.nn.functional.pad(every.key_features, (0, 0, 0, 5)),
    )
    torch.testing.assert_close(part(free)[..., :14], part(every), rtol=1e-5, atol=1e-5)
    half = pairs_of(part.bfloat16(), positions, *(x.bfloat16() for x in heads_of(positions)))
    assert part(half).dtype == torch.float32
    assert half.key_features is None or half.key_features.dtype == torch.float32


@EVERY_VARIANT
def test_gradient_reaches_every_parameter_and_nothing_else_is_state(name, config):
    parts = parts_of(config)
    for part in parts:
        assert not list(part.buffers())
        assert set(part.state_dict()) == {key for key, _ in part.named_parameters()}
    parameters = [parameter for part in parts for parameter in part.parameters()]
    values = [value for value in outputs(parts, positions_of(16)) if value.requires_grad]
    assert bool(parameters) == bool(values)
    if parameters:
        # Weighted, because a sum of squares is blind to what a learned rotation changes.
        sum((value.flatten() * torch.linspace(-1.0, 2.0, value.numel())).sum() for value in values).backward()
        assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in parameters)


@pytest.mark.parametrize(
    ("scheme", "options", "name", "mean", "deviation"),
    [
        ("forget_gate", {"initial_bias": 2.0}, "bias", 2.0, 0.0),
        ("forget_gate", {"gate": "bias_only", "initial_bias": 2.0}, "bias", 2.0, 0.0),
        ("grape", {"initial_rate": 0.2}, "rate", math.log(math.expm1(0.2)), 0.0),
        ("fire", {"initial_c": 3.0}, "c", 3.0, 0.0),
        ("grape_m", {"initial_bias": 0.5}, "bias", 0.5, 0.0),
        ("cope", {}, "weight", 0.0, 0.0),
        ("cope", {"initial_std": 0.5}, "weight", 0.0, 0.5),
        ("repo", {"initial_std": 0.5, "width": 40}, "gate", 0.0, 0.5),
        ("selective_rope", {"initial_std": 0.5}, "down", 0.0, 0.5),
        ("t5", {"num_buckets": 200}, "weight", 0.0, 0.02),
        ("t5", {"num_buckets": 200, "initialization": "t5"}, "weight", 0.0, HIDDEN**-0.5),
        ("ssmax", {"initial_scale": 0.43}, "scale", 0.43, 0.0),
        # The factor is 1 on average over the training length.
        ("ssmax", {"training_length": 16}, "scale", 16 / math.lgamma(17), 0.0),
    ],
)
def test_learned_numbers_start_where_their_option_says(scheme, options, name, mean, deviation):
    (part,) = parts_of(get_scheme(scheme)(**options))
    weight = getattr(part, name).detach()
    # Of a thousand normal numbers: five standard errors.
    assert weight.mean().item() == pytest.approx(mean, abs=1e-6 + 0.16 * deviation)
    if deviation:
        assert weight.std().item() == pytest.approx(deviation, rel=0.12)


@pytest.mark.parametrize(
    ("scheme", "options", "names"),
    [
        ("learned_rope", {}, {"log_offsets"}),
        ("forget_gate", {}, {"bias"}),
        ("forget_gate", {"gate": "bias_only"}, {"bias"}),
        ("alibi", {"learnable": True}, {"log_slopes"}),
        ("rope_nd", {"assignment": "mixed"}, {"frequencies"}),
    ],
)
def test_what_weight_decay_would_pull_to_another_scheme_is_not_decayed(scheme, options, names):
    (part,) = parts_of(get_scheme(scheme)(**options))
    assert part.no_weight_decay == names
    assert names <= {name for name, _ in part.named_parameters()}


#: Schemes that are traced for any length by default, one for each kind of part.
ANY_LENGTH = ("learned", "rope", "pope", "t5", "shaw", "forget_gate", "llama4_scale")


@pytest.mark.parametrize(
    ("name", "config", "lengths"),
    [
        # Compiling takes long, above all the second time, when a length becomes any length.
        pytest.param(name, config, lengths, id=f"{label}-{len(lengths)}", marks=[] if quick else [pytest.mark.slow])
        for name, config, label in VARIANTS
        for lengths in ((12,), (12, 30))
        for quick in [ROWS[name].everywhere and label.endswith("-0") and (len(lengths) == 2) == (name in ANY_LENGTH)]
    ],
)
def test_parts_trace_without_a_graph_break(name, config, lengths):
    parts = parts_of(config)
    if not parts:
        assert name == "none"
        return
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: outputs(parts, *given), backend="eager", fullgraph=True)
    for length in lengths:
        positions = positions_of(length)
        heads = heads_of(positions)
        for value, other in zip(outputs(parts, positions), compiled(positions, heads), strict=True):
            # A graph computes logarithms of sigmoids by another operator, and they are summed over all tokens.
            torch.testing.assert_close(value, other, rtol=5e-6, atol=1e-6)


def kind(*kinds: str) -> Any:
    """The variants of these kinds with new weights, and with trained ones where a reference reads them."""
    cases = [
        pytest.param(ROWS[name], config, trained, id=f"{label}{'-trained' * trained}")
        for name, config, label in VARIANTS
        if ROWS[name].kind in kinds
        for trained in (False, True)
        if not trained
        or (not ROWS[name].of_start and any(True for part in parts_for(config) for _ in part.parameters()))
    ]
    return pytest.mark.parametrize(("row", "config", "trained"), cases)


@kind("none")
def test_none_builds_nothing(row: Row, config: SchemeConfig, trained: bool):
    assert parts_of(config) == []


@kind("additive")
def test_additive_schemes_equal_their_reference(row: Row, config: SchemeConfig, trained: bool):
    parts = parts_for(config, trained)
    assert parts.additive is not None
    assert list(parts) == [parts.additive]
    length = 40
    vectors = parts.additive(positions_of(length))
    assert vectors.shape == (1, length, HIDDEN)
    assert vectors.dtype == torch.float32
    expected = [row.reference(config, parts.additive, HIDDEN, position, length) for position in range(length)]
    torch.testing.assert_close(vectors[0].double(), torch.tensor(expected).double(), rtol=1e-5, atol=2e-6)


@kind("bias")
def test_biases_equal_their_reference(row: Row, config: SchemeConfig, trained: bool):
    context = context_for(config)
    parts = parts_for(config, trained)
    assert parts.logit_bias is not None
    assert list(parts) == [parts.logit_bias]
    distance = torch.arange(-150, 151).view(7, 43)
    bias = parts.logit_bias(distance)
    assert bias.shape == (HEADS, 7, 43)
    assert bias.dtype == torch.float32
    expected = [
        [
            [row.reference(config, parts.logit_bias, HEADS, context.causal, head, int(item)) for item in line]
            for line in distance
        ]
        for head in range(HEADS)
    ]
    torch.testing.assert_close(bias, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@kind("map")
def test_maps_equal_their_reference(row: Row, config: SchemeConfig, trained: bool):
    parts = parts_for(config, trained)
    assert parts.query_key_map is not None
    assert list(parts) == [parts.query_key_map]
    length = 40
    phases = parts.query_key_map.phases(positions_of(length))
    assert all(phase.dtype == torch.float32 and phase.shape[:2] == (1, length) for phase in phases)
    query, key = torch.randn(2, 3, length, HEAD_DIM), torch.randn(2, 1, length, HEAD_DIM)
    for mapped, x in (
        (parts.query_key_map.map_query(query, phases), query),
        (parts.query_key_map.map_key(key, phases), key),
    ):
        assert mapped.shape == x.shape
        for position in (0, 1, 19, 39):
            expected = row.reference(config, HEAD_DIM, x[1, -1, position].tolist(), position, length)
            torch.testing.assert_close(mapped[1, -1, position], torch.tensor(expected), rtol=1e-4, atol=2e-5)


#: Chains of maps do what any of the maps does. Pairs of heads, as in `rope_pp`, have a test of their own.
MAPS = [
    *(config for name, config, _ in VARIANTS if name != "rope_pp" and parts_for(config).query_key_map is not None),
    BlendedConfig(RopeConfig(rotary_dim=4), XposConfig(), 0.5),
    BlendedConfig(RopeConfig(), LearnedRopeConfig(sharing="head"), 0.5),
]


@pytest.mark.parametrize("config", MAPS, ids=repr)
def test_maps_do_what_they_say(config: SchemeConfig) -> None:
    part: Any = parts_for(config, trained=True).query_key_map
    width = getattr(config, "rotary_dim", None) or part.rotary_dim
    x = torch.randn(1, KEY_VALUE_HEADS, 12, HEAD_DIM).bfloat16()
    phases = part.phases(positions_of(12))
    query, key = part.map_query(x, phases), part.map_key(x, phases)
    assert query.shape == key.shape == (1, KEY_VALUE_HEADS, 12, part.width_factor * HEAD_DIM)
    assert query.dtype == key.dtype == torch.bfloat16
    assert torch.equal(query, key) == part.symmetric
    assert part.rotary_dim == width
    if part.width_factor == 1:
        assert torch.equal(query[..., width:], x[..., width:])
    # The axes of heads and tokens, in either order, of phases that have an axis of heads.
    assert part.whole_heads == any(one.ndim == 4 and one.shape[1] * one.shape[2] > 12 for one in phases)


@kind("logits")
def test_logits_equal_their_reference(row: Row, config: SchemeConfig, trained: bool):
    """The whole formula, for tokens at positions with gaps, under grouped heads."""
    parts = parts_for(config, trained)
    positions = Positions(torch.tensor([[0, 1, 2, 3, 5, 8, 13, 21, 34, 55]]), torch.tensor([[56]]))
    query, key, hidden = heads_of(positions)
    logits = positional_logits(parts, query, key, positions, hidden)[0]
    case = LogitCase(
        query[0].tolist(),
        key[0].repeat_interleave(HEADS // KEY_VALUE_HEADS, dim=0).tolist(),
        hidden[0].tolist(),
        positions.ids[0].tolist(),
        HEAD_DIM**-0.5,
        context_for(config).causal,
    )
    expected = torch.tensor(row.reference(config, parts, case))
    visible = positions.ids[0] <= positions.ids[0].unsqueeze(-1) if row.causal_only else torch.tensor(True)
    torch.testing.assert_close(logits.where(visible, 0.0), expected.where(visible, 0.0), rtol=1e-4, atol=1e-4)
    plain = query @ key.repeat_interleave(HEADS // KEY_VALUE_HEADS, dim=1).transpose(-1, -2) * HEAD_DIM**-0.5
    assert (logits - plain[0]).where(visible, 0.0).abs().max() > 1e-3


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views of expanded tensors take no memory.
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@EVERY_BIAS_OF_PAIRS
def test_no_vector_per_pair_is_ever_held(name, config):
    if ROWS[name].reach:
        pytest.skip("it encodes fewer tokens")
    part: Any = parts_for(config).logit_bias
    length = 512
    pairs = pairs_of(part, positions_of(length), *heads_of(positions_of(length)))
    with LargestTensor() as largest:
        part(pairs)
    # One number per pair, per head and pair, or per head, query and row of a table, of which the longest has 1800.
    assert length * length <= largest.elements < HEADS * length * 2000


def test_a_subclass_cannot_start_weights_in_a_method_that_nothing_calls() -> None:
    own = type("Own", (TisaBias,), {"reset_parameters": lambda part: None})
    with pytest.raises(TypeError, match="Own overrides reset_parameters, which would be ignored"):
        own(TisaConfig(), BuildContext(8, 2, 4))
