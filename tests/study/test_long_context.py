"""The study of longer texts: hidden facts are where they should be, and its tables say what its measurements say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from docs.study.long_context import material, run
from docs.study.long_context.figures import draw_all
from docs.study.long_context.material import BEFORE, METHODS, TARGETS
from docs.study.long_context.report import PAGES, tables_of
from docs.study.long_context.verdicts import check_other_parts, losses_of, recommended, verdicts
from docs.study.significance import holm, p_equivalent, p_less
from docs.study.table_numbers import filled
from hf_posenc import patch_model
from hf_posenc.patching.extending import _RECOMMENDED
from training.errors import SettingsError
from training.files import read_json

PROTOCOL = (Path(run.HERE) / "protocol.md").read_text(encoding="utf-8")
TEXTS = list(material.text_files())


def measured(shifts: dict[str, float]) -> list[dict[str, Any]]:
    """Losses of every cell that has to be run: noise per text and length, and a shift per method."""
    drawn = np.random.default_rng(0)
    noise = {(text, before): drawn.normal(3, 0.3) for text in TEXTS for before in BEFORE}
    return [
        {"part": "losses", "method": method, "text": text, "before": before,
         "loss": noise[text, before] + shifts.get(method, 0.0) + drawn.normal(0, 0.001)}
        for method, how in METHODS.items() for text in TEXTS for before in BEFORE
        if how.same_up_to < before + TARGETS
    ]  # fmt: skip


def facts_and_price(method: str, right: int, seconds: float) -> list[dict[str, Any]]:
    """Facts found at the end of the first long text and at the start of all others, passkeys, and what a text took."""
    found = [place >= 5 - right for place in range(5)]
    needles = [
        {"part": "needles", "text": str(seed), "before": length, "depths": material.DEPTHS,
         "right": found if (seed, length) == (0, 32768) else [not one for one in found]}
        for seed in material.HAYSTACKS for length in material.NEEDLE_LENGTHS
    ]  # fmt: skip
    passkeys = [
        {"part": "passkey", "text": str(depth), "before": 16384, "right": found[-1:]}
        for depth in material.PASSKEY_DEPTHS
    ]
    price = {"part": "price", "text": TEXTS[0], "before": 12288, "on_clock": seconds, "peak_mib": 1000.0}
    return [{"method": method} | row for row in (*needles, *passkeys, price)]


def test_every_method_is_in_the_protocol() -> None:
    assert all(f"`{method}`" in PROTOCOL for method in METHODS)
    assert all(f"{number:,}" in PROTOCOL for number in (*BEFORE, *material.NEEDLE_LENGTHS, material.PASSKEY_LENGTH))


def test_every_method_patches_a_llama() -> None:
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=material.TRAINED,
        rope_parameters={"rope_type": "default", "rope_theta": material.THETA},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(1100) % 256
    native = run.last_logits(model, METHODS["native"], ids, 600)
    for name, method in METHODS.items():
        patch_model(model, method.scheme)
        with torch.no_grad():
            logits = run.last_logits(model, method, ids, 600)
        same = torch.allclose(logits, native, atol=1e-5)
        assert logits.shape == native.shape
        assert same == (name == "native" or method.same_up_to >= len(ids)), name


def test_needles_are_at_their_depths_and_the_answers_are_digits() -> None:
    tokenizer = ByT5Tokenizer()
    ids, answers = material.needles(tokenizer, 6000, 0)
    text = tokenizer.decode(ids)
    assert len(ids) == 6000
    assert sorted(answer.depth for answer in answers) == list(material.DEPTHS)
    for answer in answers:
        number = tokenizer.decode(answer.digits)
        asked = tokenizer.decode(ids[: answer.first + 5]).splitlines()[-1]
        assert re.fullmatch(r"The secret number of \w+ is \d{5}", asked)
        assert asked.endswith(number)
        # The tokens of this tokenizer are bytes, nearly all of which are characters.
        assert text.index(asked) == pytest.approx(answer.depth * 6000, abs=300)
    assert not torch.equal(ids, material.needles(tokenizer, 6000, 1)[0])


def test_the_passkey_is_at_its_depth() -> None:
    tokenizer = ByT5Tokenizer()
    ids, (answer,) = material.passkey(tokenizer, 3000, 0.25, 0)
    text, number = tokenizer.decode(ids), tokenizer.decode(answer.digits)
    assert text.endswith(f"The pass key is {number}")
    assert answer.first == len(ids) - 5
    assert text.index(number) == pytest.approx(750, abs=200)
    assert 2900 < len(ids) <= 3000


def test_an_answer_is_right_if_each_digit_is_the_most_probable_one() -> None:
    class Oracle(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **_: Any) -> Any:
            logits = torch.nn.functional.one_hot(input_ids[:, 1:], 300).float().mul(9)
            logits = torch.cat((logits, torch.zeros(1, 1, 300)), dim=1)
            logits[0, wrong - 1, 7] = 99.0
            return type("Output", (), {"logits": logits[:, -_["logits_to_keep"] :]})

    config = LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    ids, answers = material.needles(ByT5Tokenizer(), 3000, 0)
    wrong = next(answer for answer in answers if answer.depth == 0.5).first + 3
    found = run.measure(Oracle(config), METHODS["native"], ids, answers)
    assert found["right"] == [True, True, False, True, True]
    assert found["depths"] == list(material.DEPTHS)


def test_tables_need_every_loss() -> None:
    rows = measured({})
    with pytest.raises(SettingsError, match="1 losses are missing"):
        losses_of(rows[1:])


def test_verdicts_are_the_registered_tests_with_one_correction() -> None:
    losses = losses_of(measured({"yarn_4": -0.1, "p_rope": 0.05}))
    found = verdicts(losses)
    assert len(found) == 33
    tested = [name for name, verdict in found.items() if verdict.p_value is not None]
    assert {name for name in found if name not in tested} == {
        ("A", name) for name in ("dynamic_ntk", "dynamic_yarn", "rerope", "dual_chunk", "sinks")
    }
    values = []
    for claim, method in tested:
        own, length = {"A": (1024, 1024), "B": (12288, 12288), "C": (12288, 4096)}[claim]
        difference = losses[method, own] - losses["native", length]
        values.append(p_equivalent(difference, 0.02) if claim == "A" else p_less(difference))
    assert [found[name].p_value for name in tested] == holm(values)
    assert found["B", "yarn_4"].passed
    assert not found["A", "yarn_4"].passed
    assert not found["B", "p_rope"].passed
    assert found["A", "clipped"].passed


def test_figures_of_all_parts() -> None:
    rows = measured({"yarn_4": -0.1})
    for method in METHODS:
        rows += facts_and_price(method, 2 * (method == "self_extend"), 60.0)
    figures = draw_all(losses_of(rows), rows)
    assert {name.removesuffix(".png").removesuffix("_dark") for name in figures} == {
        "losses", "claim_a", "claim_b", "claim_c", "needles"
    }  # fmt: skip
    assert len(set(figures.values())) == len(figures) == 10


@pytest.mark.parametrize(
    ("part", "method", "before", "text"),
    [
        ("needles", "p_rope", 32768, "0"),
        ("needles", "native", 8192, "2"),
        ("needles", "dual_chunk", 16384, "1"),
        ("passkey", "sinks", 16384, "0.75"),
        ("price", "native", 12288, TEXTS[0]),
    ],
)
def test_no_table_is_made_without_every_fact_passkey_and_price(part: str, method: str, before: int, text: str) -> None:
    rows = measured({"dual_chunk": -1.0})
    for name in METHODS:
        rows += facts_and_price(name, 0, 60.0)
    losses = losses_of(rows)
    check_other_parts(losses, rows)
    place = {"part": part, "method": method, "before": before, "text": text}
    rows = [row for row in rows if any(row[key] != value for key, value in place.items())]
    with pytest.raises(SettingsError, match=f"1 facts, passkeys or prices are missing, such as .'{part}', '{method}'"):
        check_other_parts(losses, rows)


def recommendation(shifts: dict[str, float], far: dict[str, float], facts: dict[str, tuple[int, float]]) -> str | None:
    """What is recommended if all losses of a method are shifted, and, with 12,288 tokens, by `far` instead."""
    rows = measured({})
    for row in rows:
        by = far if row["before"] == 12288 else shifts
        row["loss"] += by.get(row["method"], 0.0)
    for method in METHODS:
        rows += facts_and_price(method, *facts.get(method, (0, 60.0)))
    return next(iter(recommended(losses_of(rows), rows)), None)


@pytest.mark.parametrize(
    ("shifts", "far", "facts", "expected"),
    [
        ({}, {}, {}, None),
        ({}, {"p_rope": -1.5, "sinks": -1.5}, {}, None),  # not offered
        ({}, {"rerope": -1.0, "p_rope": -1.5}, {}, "rerope"),
        ({"self_extend": -1.5}, {"self_extend": -1.5, "rerope": -1.0}, {}, "rerope"),  # A fails: changes short texts
        ({"native": -2.0}, {"rerope": -1.0}, {}, None),  # C fails: cutting is better
        ({"native": 2.0}, {"native": -1.5, "rerope": -1.0}, {}, None),  # B fails: nothing is better
        ({}, {"rerope": -1.0, "dual_chunk": -1.01}, {"rerope": (5, 1.0)}, "dual_chunk"),  # small, but sure
        ({}, {"rerope": -1.0, "dual_chunk": -1.0}, {"dual_chunk": (2, 90.0), "rerope": (1, 1.0)}, "dual_chunk"),
        ({}, {"rerope": -1.0, "dual_chunk": -1.0}, {"dual_chunk": (2, 90.0), "rerope": (2, 80.0)}, "rerope"),
    ],
)
def test_the_rule_of_the_recommendation(
    shifts: dict[str, float], far: dict[str, float], facts: dict[str, tuple[int, float]], expected: str | None
) -> None:
    """Claims, then the loss, then the facts in the first long text, then the time."""
    assert recommendation(shifts, far, facts) == expected


def test_the_page_and_the_library_say_what_was_measured() -> None:
    rows = parquet.read_table(run.HERE / "runs.parquet").to_pylist()
    losses = losses_of(rows)
    check_other_parts(losses, rows)
    for page in (file.read_text(encoding="utf-8") for file in PAGES):
        assert filled(page, tables_of(losses, rows)) == page
    assert recommended(losses, rows, "AB")[: len(_RECOMMENDED)] == list(_RECOMMENDED)


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    cell = ("losses-a-1-native", {"part": "losses", "text": "a", "before": 1}, "native", torch.arange(5), [])
    monkeypatch.setattr(run, "_measurements", lambda *_: iter([cell]))
    monkeypatch.setattr(run, "measure", lambda *_: calls.append(1) or {"loss": 1.0, "losses": [1.0]})
    monkeypatch.setattr(run.AutoTokenizer, "from_pretrained", lambda _: None)
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    monkeypatch.setattr(run.AutoModelForCausalLM, "from_pretrained", lambda _: LlamaForCausalLM(config))
    for _ in range(2):
        assert run.main(["model", "losses", "--output_dir", str(tmp_path)]) == 0
    assert calls == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["losses-a-1-native.json"]
    monkeypatch.setattr(run, "HERE", tmp_path)
    assert run.main(["model", "pack", "--output_dir", str(tmp_path)]) == 0
    (row,) = parquet.read_table(tmp_path / "runs.parquet").to_pylist()
    assert (row["loss"], row["method"], row["before"]) == (1.0, "native", 1)
    other = tmp_path / "other"
    assert run.main(["model", "unpack", "--output_dir", str(other)]) == 0
    (path,) = other.iterdir()
    assert read_json(path) == read_json(tmp_path / path.name)
