from __future__ import annotations

import pytest
import torch
from transformers.models.llama import modeling_llama

from benchmarks.bare import without_rotation
from benchmarks.levels import LEVELS
from benchmarks.lineup import REFERENCES, build_lineup
from benchmarks.peers import PEER_GROUPS
from benchmarks.subjects import ROOM, AttentionCall, LanguageModel
from hf_posenc import list_schemes
from tests.benchmarks.tiny import TINY

#: Sums over 32 tokens of numbers around 1, in float32.
_ROUNDING = {"rtol": 1e-4, "atol": 1e-5}


def named(level: str, *names: str, peers: tuple[str, ...] = (), length: int = 32) -> dict:
    subjects, _ = build_lineup(level, names, peers, length, TINY)
    return {subject.name: subject for subject in subjects}


def logits(subject: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    subject.model.eval()
    with subject.around(), torch.no_grad():
        return subject.model(input_ids=tokens).logits


def attended(subject: AttentionCall, length: int) -> torch.Tensor:
    """What the attention adds to its input."""
    states = TINY.random(1, length, TINY.sizes.hidden_size)
    with subject.around(), torch.no_grad():
        output = subject.build(length)(states)
    # A layer of a Llama adds it to its input; the peers return it.
    return output if subject.family == "peer" else output - states


def test_one_layer_of_a_bare_llama_sees_which_tokens_came_before_and_not_in_which_order():
    subjects = named("model", "bare", "stock")
    tokens = TINY.tokens(32)
    shuffled = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)
    last = {}
    for name, subject in subjects.items():
        # Two layers can infer the order from what the causal mask hides, without any positions.
        subject.model.config.num_hidden_layers = 1
        last[name] = [logits(subject, order)[:, -1] for order in (tokens, shuffled)]
    torch.testing.assert_close(*last["bare"], **_ROUNDING)
    assert not torch.allclose(*last["stock"], **_ROUNDING)


@pytest.mark.parametrize("level", ["model", "encoder"])
def test_a_bare_model_is_the_patched_model_of_no_scheme(level):
    tokens = TINY.tokens(32)
    found = {
        name: logits(subject, tokens) for name, subject in named(level, "bare", "bare again", "stock", "none").items()
    }
    torch.testing.assert_close(found["none"], found["bare"], **_ROUNDING)
    torch.testing.assert_close(found["bare again"], found["bare"], rtol=0, atol=0)
    assert not torch.allclose(found["stock"], found["bare"], **_ROUNDING)


def test_rotation_of_other_llamas_is_back_after_a_bare_call_and_after_an_error():
    stock, subject = modeling_llama.apply_rotary_pos_emb, named("model", "bare")["bare"]
    for phase in ("forward", "train", "decode"):
        with subject.ready(phase, 16) as call:
            assert modeling_llama.apply_rotary_pos_emb is not stock
            call.once()
        assert modeling_llama.apply_rotary_pos_emb is stock
    with pytest.raises(KeyError), without_rotation():
        raise KeyError
    assert modeling_llama.apply_rotary_pos_emb is stock


@pytest.mark.parametrize("level", ["attention", "model", "encoder"])
def test_models_share_weights_and_not_gradients(level):
    subjects = named(level, "bare", "rope")
    with subjects["rope"].ready("train", 16) as call:
        call.run()
        if level != "attention":
            assert any(parameter.grad is not None for parameter in subjects["rope"].model.parameters())
            mine, other = (dict(subjects[name].model.named_parameters()) for name in ("rope", "bare"))
            shared = [name for name in mine if name in other]
            assert len(shared) > 10
            assert all(mine[name].data_ptr() == other[name].data_ptr() for name in shared)
            assert all(parameter.grad is None for parameter in other.values())
        call.after()
    if level != "attention":
        assert all(parameter.grad is None for parameter in subjects["rope"].model.parameters())


@pytest.mark.parametrize("scheme", ["bare", "stock", "rope", "alibi", "pope", "forget_gate"])
def test_a_cache_grows_for_a_number_of_tokens_and_is_filled_again(scheme):
    subject = named("model", scheme)[scheme]
    caches = []
    original = subject.filled_cache
    subject.filled_cache = lambda *given: caches.append(original(*given)) or caches[-1]  # type: ignore[method-assign]
    with subject.ready("decode", 21) as call:
        call.run()
        call.after()
        assert [cache.get_seq_length() for cache in caches] == [22]
        for _ in range(ROOM):
            call.once()
    assert [cache.get_seq_length() for cache in caches] == [21 + ROOM, 22]


def test_a_grown_cache_is_what_the_model_writes_for_repeated_tokens():
    subject = named("model", "bare")["bare"]
    tokens = TINY.tokens(16)
    with subject.around(), torch.no_grad():
        grown = subject.filled_cache(24)
        # Without positions the keys of the first layer depend on the tokens alone.
        whole = subject.model(input_ids=torch.cat([tokens, tokens[:, :8]], dim=1), use_cache=True).past_key_values
    torch.testing.assert_close(grown.layers[0].keys, whole.layers[0].keys, **_ROUNDING)


@pytest.mark.long
def test_every_scheme_is_measured_or_refused_with_the_reason():
    for level in ("attention", "model", "encoder"):
        subjects, left_out = build_lineup(level, [*REFERENCES, *list_schemes()], (), 32, TINY)
        families = {subject.name: subject.family for subject in subjects}
        assert families.keys() | left_out.keys() == {*REFERENCES, *list_schemes()}
        assert all(reason.startswith("refused: ") and len(reason) > 40 for reason in left_out.values())
        assert set(LEVELS["encoder"].usual) <= families.keys() if level == "encoder" else not left_out
        # The targets are about families.
        expected = {"alibi": "distance bias", "t5": "distance bias", "kerple": "distance bias", "rope": "rotation"}
        expected |= {"sinusoidal": "additive", "none": "none"}
        expected |= {} if level == "encoder" else {"p_rope": "rotation", "xpos": "rotation"}
        assert expected.items() <= families.items()


@pytest.fixture(scope="module")
def attention() -> dict:
    groups = tuple(group for group in PEER_GROUPS if group not in ("flex", "x_transformers"))
    return named("attention", "bare", "alibi", "none", "rope", "stock", peers=groups)


WITHOUT = ("none", "sdpa", "BLOOM without position", "MPT without position")
WITH_ALIBI = (
    "alibi, mask built in each call", "alibi, mask built once", "alibi, position_bias= of transformers", "BLOOM, alibi",
    "MPT, alibi",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [*((name, "bare") for name in WITHOUT), *((name, "alibi") for name in WITH_ALIBI), ("rope", "stock")],
)
def test_ways_to_the_same_positions_are_one_function(attention, name, expected):
    torch.testing.assert_close(attended(attention[name], 32), attended(attention[expected], 32), **_ROUNDING)


@pytest.mark.parametrize(
    ("name", "other"),
    [("alibi", "bare"), ("rope", "bare"), ("T5, bias computed in each call", "T5 without position")],
)
def test_positions_act(attention, name, other):
    assert not torch.allclose(attended(attention[name], 32), attended(attention[other], 32), **_ROUNDING)


def test_x_transformers_computes_the_same_attention():
    pytest.importorskip("x_transformers", reason="pip install -c constraints.txt -e '.[bench]'")
    subjects = named("attention", "bare", "alibi", peers=("x_transformers",))
    pairs = (
        ("x-transformers without position", "bare"),
        ("x-transformers, alibi (bias kept between calls)", "alibi"),
    )
    for name, ours in pairs:
        torch.testing.assert_close(attended(subjects[name], 32), attended(subjects[ours], 32), **_ROUNDING)
    for name in ("x-transformers, rotary", "x-transformers, T5 bias"):
        assert not torch.allclose(attended(subjects[name], 32), attended(subjects["bare"], 32), **_ROUNDING)


def test_missing_x_transformers_tells_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    subjects, left_out = build_lineup("attention", ["bare"], ["x_transformers"], 16, TINY)
    assert "pip install -c constraints.txt -e '.[bench]'" in left_out["x-transformers"]
    assert [subject.name for subject in subjects] == ["bare"]


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_every_peer_runs_forward_and_backward(attention, phase):
    for subject in attention.values():
        with subject.ready(phase, 16) as call:
            call.once()


def test_a_bare_vit_is_the_patched_model_of_no_scheme_and_does_not_see_places():
    subjects = named("vit", "bare", "stock", "none", "alibi:axes=2", length=16)
    pixels = TINY.random(1, 3, 64, 64)
    patches = pixels.unfold(2, 16, 16).unfold(3, 16, 16).flatten(2, 3)[:, :, torch.arange(15, -1, -1)]
    moved = torch.nn.functional.fold(patches.permute(0, 1, 3, 4, 2).flatten(1, 3), (64, 64), 16, stride=16)
    outputs = {}
    for name, subject in subjects.items():
        model = subject.model.eval()
        with torch.no_grad():
            outputs[name] = [model(pixel_values=pictures).logits for pictures in (pixels, moved)]
    torch.testing.assert_close(*outputs["bare"], **_ROUNDING)
    torch.testing.assert_close(outputs["bare"], outputs["none"], **_ROUNDING)
    assert not torch.allclose(*outputs["stock"], **_ROUNDING)
    for phase in ("forward", "train"):
        for subject in subjects.values():
            with subject.ready(phase, 16) as call:
                call.once()
