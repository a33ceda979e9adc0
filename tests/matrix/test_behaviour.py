"""Every scheme in every build of architecture: what a patch promises."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_posenc import ComposedConfig, LearnedConfig, SchemeConfig, native_scheme, patch_model, unpatch_model
from hf_posenc.errors import UnsupportedError
from tests.kits.decoding import decoded
from tests.schemes import own_schemes
from tests.schemes.own_schemes import own_schemes_are_registered  # noqa: F401
from tests.schemes.table import TABLE
from tests.schemes.table.row import Row
from tests.thinning import mostly_slow

from .architectures import ARCHITECTURES
from .running import LENGTH, distance, gradients, outputs, patched, tokens

pytestmark = pytest.mark.usefixtures("without_gradients")
#: fp32 with two tiny layers: sums of some hundred terms in another order.
CLOSE = 2e-5
#: what a position must change to count as an effect; three orders above rounding.
VISIBLE = 1e-3


def _sized(config: SchemeConfig) -> SchemeConfig:
    """A table gets a length, for architectures that have none of their own."""
    if isinstance(config, ComposedConfig):
        return ComposedConfig(parts=tuple(_sized(part) for part in config.parts))
    if isinstance(config, LearnedConfig) and config.num_positions is None:
        return dataclasses.replace(config, num_positions=64)
    return config


SCHEMES = {name: _sized(row.variants[0]) for name, row in TABLE.items()}
#: Also those that are functions of the distance, which somebody has registered.
ROWS = TABLE | own_schemes.ROWS
ALL_SCHEMES = {name: _sized(row.variants[0]) for name, row in ROWS.items()}
CAUSAL = [name for name, row in ARCHITECTURES.items() if row.causal]
ENCODERS = [name for name, row in ARCHITECTURES.items() if not row.causal]

#: One decoder and one encoder see every scheme; the other builds see one scheme for each mechanism of the engine.
CORE = ("llama_gqa", "bert")
#: Another decoder, for the schemes that no encoder can take: without grouped heads, and with a table of its own.
SECOND_DECODER = "gpt2"


def cells(architectures: Iterable[str], turn: int) -> Any:
    """Every pair of a build and a scheme that it can take.

    The default run takes a part of them, and `pytest -m slow` the others. Every scheme meets every behaviour in the
    decoder of `CORE`. Of the other pairs each behaviour takes one in four, and other ones than the next behaviour
    does. So by default each scheme still runs in each build, and each behaviour is seen with each scheme and in each
    build.

    Args:
        turn: number of the behaviour, which decides where it begins to count to four.
    """
    pairs = [
        (architecture, scheme)
        for architecture in architectures
        for scheme, row in ROWS.items()
        if _meets(architecture, row) and not (row.causal_only and architecture in ENCODERS)
    ]
    builds, schemes = list(ARCHITECTURES), list(ROWS)

    def in_turn(pair: tuple[str, str]) -> bool:
        architecture, scheme = pair
        return architecture == CORE[0] or (builds.index(architecture) + schemes.index(scheme) + turn) % 4 == 0

    cases = mostly_slow(pairs, in_turn)
    return pytest.mark.parametrize(("architecture", "scheme"), cases, ids=["-".join(pair) for pair in pairs])


def _meets(architecture: str, row: Row) -> bool:
    return row.everywhere or architecture in CORE or (row.causal_only and architecture == SECOND_DECODER)


every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def _length_dependent(model: Any) -> bool:
    return any(getattr(module, "length_dependent", False) for module in model.position_encoding.modules())


@every_architecture
def test_native_round_trip(architecture: str) -> None:
    model = patched(architecture, None)
    stock, placed = outputs(model, tokens()), _placed_in(model)
    native = native_scheme(model)
    assert _placed_in(model) == placed
    patch_model(model, native)
    assert distance(outputs(model, tokens()), stock) <= CLOSE


@functools.cache
def _native_type(architecture: str) -> type[SchemeConfig]:
    return type(native_scheme(patched(architecture, None)))


@cells(ARCHITECTURES, turn=0)
def test_effect_and_undo(architecture: str, scheme: str) -> None:
    model = patched(architecture, None)
    stock, before = outputs(model, tokens()), {key: value.clone() for key, value in model.state_dict().items()}
    placed = _placed_in(model)
    patch_model(model, ALL_SCHEMES[scheme])
    changed = distance(outputs(model, tokens()), stock)
    # Outside training randomised positions are the tokens' own.
    acting = getattr(ALL_SCHEMES[scheme], "inner", None) if scheme == "randomized" else ALL_SCHEMES[scheme]
    if _native_type(architecture) is not type(acting):
        assert changed > VISIBLE
    unpatch_model(model)
    assert torch.equal(outputs(model, tokens()), stock)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert _placed_in(model) == placed
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "embed_positions" not in name)


def _placed_in(model: Any) -> list[Any]:
    """The forwards and hooks that were set on the modules of a model; of a stock model on one device there are none."""
    hooks = [[*one._forward_pre_hooks, *one._forward_hooks] for one in model.modules()]
    return [hooks, *(one.__dict__.get("forward") for one in model.modules())]


@pytest.mark.parametrize("scheme", [name for name, row in TABLE.items() if row.causal_only])
def test_an_encoder_refuses_a_causal_scheme_and_stays_as_it_was(scheme: str) -> None:
    model = patched("bert", None)
    stock = outputs(model, tokens())
    with pytest.raises(UnsupportedError, match="bidirectional"):
        patch_model(model, ALL_SCHEMES[scheme])
    assert torch.equal(outputs(model, tokens()), stock)
    assert not hasattr(model, "position_encoding")


@every_architecture
def test_order_is_invisible_without_positions(architecture: str) -> None:
    """Encoders commute with permutations; the last token of one causal layer does not see the order of the others."""
    causal = ARCHITECTURES[architecture].causal
    if causal:
        layers = {"n_layer": 1} if architecture in ("gpt2", "gptj", "bloom") else {"num_hidden_layers": 1}
        if "gemma3" in architecture or "cohere2" in architecture:
            layers |= {"layer_types": ["full_attention"]}
        if "mistral" in architecture:
            layers |= {"sliding_window": None}
        model = patched(architecture, "none", **layers)
    else:
        wide = {"local_attention": 128} if architecture == "modernbert" else {}
        model = patched(architecture, "none", **wide)
    ids = tokens()
    order = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(5))
    order = torch.cat((order, torch.tensor([LENGTH - 1])))
    plain, permuted = outputs(model, ids), outputs(model, ids[:, order])
    if model.config.is_encoder_decoder:
        pytest.skip("the decoder's causal mask sees order after its first layer")
    if causal:
        assert distance(permuted[:, -1], plain[:, -1]) <= CLOSE
        unpatch_model(model)
        if architecture != "cohere2_interleaved":  # its full-attention layers have no positions natively
            stock = outputs(model, ids), outputs(model, ids[:, order])
            assert distance(stock[1][:, -1], stock[0][:, -1]) > VISIBLE
    else:
        assert distance(permuted, plain[:, order]) <= CLOSE
        unpatch_model(model)
        assert distance(outputs(model, ids[:, order]), outputs(model, ids)[:, order]) > VISIBLE


@cells(CAUSAL, turn=1)
def test_decoding_equals_the_full_forward(architecture: str, scheme: str) -> None:
    """Behind a cache that grows, and a static one if the stock model decodes with it in this version."""
    model, ids = patched(architecture, ALL_SCHEMES[scheme]), tokens()
    full = outputs(model, ids, use_cache=False)
    caches: list[Any] = [DynamicCache(config=model.config)]
    if ARCHITECTURES[architecture].static_cache:
        caches.append(StaticCache(config=model.config, max_cache_len=LENGTH + 4))
    for past in caches:
        if _length_dependent(model):
            decoded(model, ids, past, [5])
            with pytest.raises(UnsupportedError, match="use_cache=False"):
                decoded(model, ids, past, [1], start=5)
        else:
            assert distance(decoded(model, ids, past, [5, 4] + [1] * (LENGTH - 9)), full) <= 1e-4, type(past)


@cells(ARCHITECTURES, turn=2)
def test_left_padding_changes_nothing(architecture: str, scheme: str) -> None:
    model = patched(architecture, ALL_SCHEMES[scheme])
    ids, pads = tokens(), 3
    padding = torch.full((2, pads), model.config.pad_token_id or 0)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(ids)), dim=1)
    arguments: dict[str, Any] = {"attention_mask": mask}
    if ARCHITECTURES[architecture].position_ids:
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    padded = outputs(model, torch.cat((padding, ids), dim=1), **arguments)
    assert distance(padded[:, -LENGTH:], outputs(model, ids, attention_mask=torch.ones_like(ids))) <= 1e-4


@cells((name for name in CAUSAL if ARCHITECTURES[name].position_ids), turn=3)
def test_packed_documents_equal_separate_ones(architecture: str, scheme: str) -> None:
    if not ARCHITECTURES[architecture].packs:
        pytest.skip("stock attends across packed documents here, whatever the positions")
    model = patched(architecture, ALL_SCHEMES[scheme])
    first, second = tokens(1, 6, seed=2), tokens(1, 8, seed=3)
    position_ids = torch.cat((torch.arange(6), torch.arange(8))).unsqueeze(0)
    if _length_dependent(model):
        with pytest.raises(UnsupportedError, match="separate rows"):
            outputs(model, torch.cat((first, second), dim=1), position_ids=position_ids, use_cache=False)
        return
    packed = outputs(
        model, torch.cat((first, second), dim=1), position_ids=position_ids, attention_mask=None, use_cache=False
    )
    separate = torch.cat((outputs(model, first), outputs(model, second)), dim=1)
    assert distance(packed, separate) <= 1e-4


@cells(ARCHITECTURES, turn=4)
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.enable_grad()
def test_gradient_checkpointing_changes_nothing(architecture: str, scheme: str, reentrant: bool) -> None:
    """Two forwards before one backward, of different lengths: each layer is recomputed under its own positions."""
    model = patched(architecture, ALL_SCHEMES[scheme]).train()
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(7)  # of schemes that draw positions
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        arguments = {"use_cache": False} if ARCHITECTURES[architecture].causal else {}
        long, short = outputs(model, tokens(2, 12), **arguments), outputs(model, tokens(2, 5), **arguments)
        found.append(gradients(model, long.float().pow(2).mean() + short.float().pow(2).mean()))
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    learned = [name for name in plain if "position_encoding" in name]
    assert len(learned) == len(list(model.position_encoding.parameters()))
    assert all(distance(recomputed[name], plain[name]) <= CLOSE for name in plain)
    assert all(plain[name].abs().sum() > 0 for name in learned)


@cells(ARCHITECTURES, turn=5)
def test_eager_equals_sdpa(architecture: str, scheme: str) -> None:
    if not ARCHITECTURES[architecture].sdpa:
        pytest.skip("the class has eager attention only")
    model = patched(architecture, ALL_SCHEMES[scheme])
    mask = torch.ones_like(tokens())
    mask[0, -3:] = 0
    eager, eager_free = outputs(model, tokens(), attention_mask=mask), outputs(model, tokens())
    model.set_attn_implementation("sdpa")
    keep = slice(0, LENGTH - 3)
    assert distance(outputs(model, tokens(), attention_mask=mask)[:, keep], eager[:, keep]) <= 1e-4
    assert distance(outputs(model, tokens()), eager_free) <= 1e-4


@cells(CORE, turn=6)
def test_float64(architecture: str, scheme: str) -> None:
    """Below and above 16 queries, where torch's fused kernel begins; decoders behind a cache too.

    Eager attention in Llama takes its softmax in float32, and phases and biases are float32 in any model.
    """
    model, ids, close = patched(architecture, ALL_SCHEMES[scheme]).double(), tokens(2, 20), 1e-5
    eager = outputs(model, ids)
    model.set_attn_implementation("sdpa")
    assert eager.dtype == torch.float64
    assert distance(outputs(model, ids), eager) <= close
    if _length_dependent(model):
        return
    if not ARCHITECTURES[architecture].causal:
        short = outputs(model, ids[:, :9])
        model.set_attn_implementation("eager")
        assert distance(short, outputs(model, ids[:, :9])) <= close
        return
    assert distance(decoded(model, ids, DynamicCache(config=model.config), [17, 1, 1, 1]), eager) <= close


@functools.cache
def _rounding(architecture: str) -> float:
    """How much a cast changes the outputs of a model without positions, in their standard deviation."""
    plain = patched(architecture, "none")
    full = outputs(plain, tokens())
    return float((outputs(plain.to(torch.bfloat16), tokens()).float() - full).abs().mean() / full.std())


@cells(ARCHITECTURES, turn=7)
def test_bfloat16_changes_no_more_than_rounding_does(architecture: str, scheme: str) -> None:
    """A cast model differs from the fp32 one by rounding only: as much as the same model without positions does."""
    model = patched(architecture, ALL_SCHEMES[scheme])
    full = outputs(model, tokens())
    half = outputs(model.to(torch.bfloat16), tokens()).float()
    assert (half - full).abs().mean() / full.std() <= 6 * _rounding(architecture) + 0.05


@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt_neox_partial"])
@pytest.mark.parametrize("scheme", ["rope", "xpos", "learned_rope", "pope"])
def test_bfloat16_keeps_exact_phases(architecture: str, scheme: str) -> None:
    """Only distances count for these, so far from the start nothing changes. bfloat16 counts by 32 there."""
    model = patched(architecture, scheme)
    far = torch.arange(LENGTH).unsqueeze(0) + 4096
    full = outputs(model, tokens())
    model.to(torch.bfloat16)
    rounding = (outputs(model, tokens()).float() - full).abs().mean()
    # Phases of other sizes round otherwise.
    assert (outputs(model, tokens(), position_ids=far).float() - full).abs().mean() <= 1.5 * rounding
