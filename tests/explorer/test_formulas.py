"""The formulas of the page give the numbers of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from docs.explorer import recorded
from hf_posenc.errors import SequenceLengthError
from hf_posenc.schemes.bias.alibi import AWAY_BIAS
from tests.explorer.library import attention_layer, build, data, dog_distance, positions
from tests.thinning import mostly_slow

HARNESS = (Path(__file__).parent / "harness.js").read_text(encoding="utf-8")
LENGTH = 24
ENTRIES = data("options")["schemes"]
#: Those with a formula in JavaScript; the library computes what is shown of the others (`test_recorded.py`).
SCHEMES = [name for name, entry in ENTRIES.items() if entry.get("formulas")]
CAUSAL_ONLY = [name for name, entry in ENTRIES.items() if entry.get("causal_only")]

#: Values inside the ranges, and combinations; the ends of every range and every choice are tried for each scheme.
CASES: list[dict[str, Any]] = [
    {"scheme": "alibi", "heads": 6},
    {"scheme": "alibi", "heads": 5, "options": {"variant": "asymmetric"}},
    {"scheme": "sandwich", "heads": 8, "options": {"width": 30, "base": 500}},
    {"scheme": "kerple", "heads": 8, "options": {"weights": "initial", "variant": "power", "minimum": 0.3}},
    {"scheme": "kerple", "options": {"weights": "initial", "variant": "power", "exponent": 0.7}},
    {"scheme": "t5", "length": 200, "heads": 1, "causal": True, "options": {"weights": "initial", "max_distance": 77}},
    {
        "scheme": "t5",
        "length": 150,
        "heads": 2,
        "options": {"weights": "initial", "num_buckets": 12, "max_distance": 40},
    },
    {"scheme": "fire", "causal": True, "options": {"weights": "initial", "initial_c": 2.0, "initial_threshold": 9.0}},
    {"scheme": "fire", "options": {"weights": "initial", "initial_threshold": 5.0}},
    {"scheme": "normalized_integer", "options": {"length": 9, "subtract_one": True, "direction": "random"}},
    {"scheme": "sinusoidal", "options": {"frequencies": "tensor2tensor", "layout": "concatenated", "offset": 2}},
    {"scheme": "learned", "length": 30, "options": {"num_positions": 7, "extension": "interpolate"}},
    {"scheme": "binary", "options": {"bits": 5, "scale": 0.3}},
    {"scheme": "rope", "length": 40, "options": {"scaling": "dynamic", "factor": 3, "original_max_positions": 16}},
    {"scheme": "rope", "length": 40, "options": {"scaling": "longrope", "factor": 8, "original_max_positions": 16}},
    {"scheme": "rope", "options": {"scaling": "yarn", "factor": 6, "original_max_positions": 512, "beta_fast": 20}},
    {"scheme": "rope", "options": {"scaling": "llama3", "factor": 8, "original_max_positions": 200, "theta": 500000}},
    {"scheme": "rope", "options": {"rotary_dim": 20, "layout": "interleaved", "theta": 777}},
    {"scheme": "p_rope", "options": {"rotary_dim": 30, "fraction": 0.4}},
    {"scheme": "hope", "options": {"theta": 300, "training_length": 30}},
    {"scheme": "xpos", "causal": True, "options": {"gamma": 0.2, "scale_base": 40, "rotary_dim": 32}},
    {"scheme": "self_extend", "causal": True, "length": 60, "options": {"inner": "t5", "group": 3, "window": 8}},
    {"scheme": "self_extend", "causal": True, "length": 40, "options": {"inner": "rope", "group": 5, "window": 7}},
    {"scheme": "rerope", "causal": True, "length": 40, "options": {"window": 9}},
    {"scheme": "rerope", "causal": True, "length": 40, "options": {"inner": "alibi", "window": 9, "factor": 3}},
    {"scheme": "dual_chunk", "causal": True, "length": 60, "options": {"chunk_size": 17, "local_size": 8}},
    {
        "scheme": "dual_chunk",
        "causal": True,
        "length": 60,
        "options": {"inner": "t5", "chunk_size": 24, "local_size": 4},
    },
    {"scheme": "position_scale", "options": {"inner": "kerple", "factor": 0.35}},
    {"scheme": "position_scale", "options": {"inner": "sinusoidal", "factor": 1.25}},
]


@pytest.fixture(scope="module")
def harness(chromium: Any, address: str) -> Any:
    page = chromium.new_page()
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.evaluate(HARNESS)
    yield page
    page.close()


@pytest.fixture(scope="module")
def weights(harness: Any) -> dict[str, torch.Tensor]:
    found = harness.evaluate("() => harness.weights(8)")
    return {kind: torch.tensor(matrices, dtype=torch.float64) for kind, matrices in found.items()}


def compute(harness: Any, case: dict[str, Any]) -> dict[str, Any]:
    return harness.evaluate(
        "(one) => harness.compute(one)", {"heads": 4, "causal": False, "length": LENGTH, "options": {}} | case
    )


def check(harness: Any, weights: dict[str, torch.Tensor], case: dict[str, Any]) -> None:
    """Compares vectors, logits, attention and outputs of one case, wherever a query sees a key."""
    found = compute(harness, case)
    causal = case.get("causal", False)
    parts = build(found["config"], found["heads"], causal, found["options"].get("weights"))
    inputs = torch.tensor(harness.evaluate("(n) => harness.words(n)", found["length"]), dtype=torch.float64)
    own = {kind: matrices[: found["heads"]] for kind, matrices in weights.items()}
    expected = attention_layer(parts, inputs, own, causal)
    if found["added"] is None:
        assert parts.additive is None
    else:
        # Some angles are computed in float32 by the library: 24 radians are off by 1e-6.
        torch.testing.assert_close(_tensor(found["added"]), expected["added"], rtol=1e-5, atol=3e-5, msg=str(case))
    mask = expected["mask"]
    # The library's parts compute in float32: 1e-7 of the products of vectors that are up to a few hundred long.
    for head, logits in enumerate(expected["logits"]):
        seen = mask & (logits > AWAY_BIAS / 2)
        page = _tensor(found["logits"][head])[seen]
        scale = max(1.0, float(logits[seen].abs().max()))
        assert float((page - logits[seen]).abs().max()) < 3e-5 * scale, case
        # Logits up to 1e3 with an error of 1e-5 of that make weights that differ by 1e-2 of themselves.
        if scale < 30:
            attention = _tensor([[value or 0.0 for value in row] for row in found["attention"][head]])
            torch.testing.assert_close(attention, expected["attention"][head], rtol=2e-3, atol=2e-4, msg=str(case))
    if float(expected["logits"][:, mask].abs().max()) < 30:
        torch.testing.assert_close(_tensor(found["outputs"]), expected["outputs"], rtol=2e-3, atol=2e-3, msg=str(case))
    if found["reach"] is not None and parts.additive is not None:
        with pytest.raises(SequenceLengthError):
            parts.additive(positions(found["reach"] + 1))


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(map(str, [case["scheme"], *case.get("options", {}).values()]))
)
def test_chosen_values(harness: Any, weights: dict[str, torch.Tensor], case: dict[str, Any]) -> None:
    check(harness, weights, case)


@pytest.mark.parametrize("name", mostly_slow(SCHEMES, lambda name: name in SCHEMES[1::3]))
def test_the_ends_of_all_ranges_and_all_choices(harness: Any, weights: dict[str, torch.Tensor], name: str) -> None:
    for causal in (False, True):
        if causal or name not in CAUSAL_ONLY:
            place = {"heads": 2, "causal": causal, "length": 12}
            for options in harness.evaluate("([name, place]) => harness.cases(name, place)", [name, place]):
                check(harness, weights, {"scheme": name, "options": options, **place})


def test_the_library_records_with_the_words_and_weights_of_the_page(
    harness: Any, weights: dict[str, torch.Tensor]
) -> None:
    words = torch.tensor(harness.evaluate("(text) => harness.vectors(text)", recorded.SENTENCE), dtype=torch.float64)
    own = torch.stack([recorded.word_vector(word.lower()) for word in recorded.SENTENCE.split()])
    torch.testing.assert_close(own, words, rtol=1e-12, atol=1e-12)
    for kind, matrices in recorded.layer_weights(8).items():
        torch.testing.assert_close(matrices, weights[kind], rtol=1e-12, atol=1e-12)


def test_every_scheme_with_a_formula_is_on_the_page(harness: Any) -> None:
    assert harness.evaluate("() => harness.schemes") == SCHEMES


def test_the_dog_test_is_that_of_one_layer_in_torch(
    harness: Any, weights: dict[str, torch.Tensor], open_page: Any
) -> None:
    sentence = "The dog chased another dog"
    page = open_page()
    inputs = torch.tensor(harness.evaluate("(text) => harness.vectors(text)", sentence), dtype=torch.float64)
    compared = 0
    for causal in (False, True):
        page.set_checked("#causal", causal)
        page.wait_for_function("(wanted) => document.querySelector('#causal').checked === wanted", arg=causal)
        page.wait_for_timeout(100)
        bars = page.eval_on_selector_all(
            "#dog .bar[data-scheme]", "rows => rows.map(row => [row.dataset.scheme, row.dataset.distance])"
        )
        assert [name for name, _ in bars] == list(ENTRIES)
        for name, distance in (bar for bar in bars if bar[0] in SCHEMES):
            if not causal and name in CAUSAL_ONLY:
                assert distance is None
                continue
            config = compute(harness, {"scheme": name, "causal": causal, "length": 5})
            parts = build(config["config"], 4, causal, config["options"].get("weights"))
            own = {kind: matrices[:4] for kind, matrices in weights.items()}
            expected = dog_distance(attention_layer(parts, inputs, own, causal)["outputs"], 1, 4)
            assert float(distance) == pytest.approx(expected, rel=2e-3, abs=1e-6), name
            compared += 1
            if name == "none" and not causal:
                assert float(distance) == 0.0
    assert compared == 2 * len(SCHEMES) - len(set(CAUSAL_ONLY) & set(SCHEMES))
