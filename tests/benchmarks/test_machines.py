"""The text of tables about processors and GPUs, with stand-ins for missing ones."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
import types

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import timing
from benchmarks.arguments import parse_options, subjects_of
from benchmarks.levels import SMOLLM2
from benchmarks.lineup import build_lineup
from benchmarks.machine import subnormal_line, subnormal_ratio
from benchmarks.peers import peer_subjects
from benchmarks.subjects import Call
from benchmarks.table import figure_tables
from benchmarks.targets import verdicts
from benchmarks.timing import Pace, time_subjects
from tests.benchmarks.tiny import TINY, Sleeper
from training.machine import _from_cpuinfo


def test_a_processor_that_is_slow_with_subnormal_numbers_is_warned_of():
    assert 0.1 < subnormal_ratio() < math.inf
    assert subnormal_line(1.02) == "Subnormal float32 numbers take 1.0 times as long as normal ones on this processor."
    assert "**Subnormal float32 numbers take 40.0 times as long" in subnormal_line(40.0)
    assert "Name the processor" in subnormal_line(3.1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model name\t: Intel(R) Xeon(R) Platinum 8481C\ncpu family\t: 6\n", "Intel(R) Xeon(R) Platinum 8481C"),
        (
            "cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n\ncpu family\t: 9\n",
            "AMD EPYC (family 25, model 1)",
        ),
        ("model name\t: AMD EPYC\n", "AMD EPYC"),
        ("CPU implementer\t: 0x41\n", None),
    ],
)
def test_a_hidden_model_is_told_by_its_number(text, name):
    assert _from_cpuinfo(text) == name


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A device whose memory rises by the milliseconds that a subject sleeps."""
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "reset_peak", lambda device: None)
    monkeypatch.setattr(timing, "resident_bytes", lambda device: 1000)
    held = iter([1500, 5002500])
    monkeypatch.setattr(timing, "peak_bytes", lambda device: next(held))


def test_a_gpu_tells_the_peak_of_every_call(on_a_gpu):
    subjects = [Sleeper("bare", 0.001, family="bare"), Sleeper("alibi", 0.001)]
    rows = time_subjects(subjects, "forward", 16, Pace(rounds=3, measurement_seconds=0.001), "cuda")["rows"]
    assert {row["subject"]: row["peak_bytes"] for row in rows} == {"bare": 500, "alibi": 5001500}
    cell = {"level": "smollm2", "phase": "forward", "length": 4096, "rounds": 3, "rows": rows, "left_out": {}}
    content = {"settings": {"device": "cuda"}, "cells": {"smollm2 forward 4096": cell}, "memory": {}}
    text = "\n\n".join(figure_tables(content))
    assert "peak of the GPU's memory above what was held before, in MB" in text
    assert "| alibi  |        5 |           10003.000 |" in text


def test_what_a_gpu_compiles_first_is_not_taken_for_slow(on_a_gpu):
    subjects = [Sleeper("bare", 0.001, family="bare"), _FirstSlow("flex", 0.001)]
    pace = Pace(rounds=3, subject_seconds=0.3, measurement_seconds=0.001)
    assert not time_subjects(subjects, "forward", 16, pace, "cuda")["left_out"]


class _FirstSlow(Sleeper):
    """As if its first call compiled a kernel."""

    @contextlib.contextmanager
    def ready(self, phase, length):
        seconds = [self.seconds if self.calls else 0.6]

        def run() -> None:
            self.calls.append((phase, length))
            time.sleep(seconds.pop() if seconds else self.seconds)

        yield Call(run)


def test_goals_on_a_gpu_compare_backends_by_name():
    def row(name, family, median):
        ratio = {"median": median, "low": median, "high": median, "of_minima": median}
        return {"subject": name, "family": family, "to_bare": ratio, "to_stock": ratio}

    rows = [
        row("alibi", "distance bias", 1.03),
        row("alibi@flex_attention", "flex_attention", 0.6),
        row("rope", "rotation", 0.99),
    ]
    cell = {"level": "attention", "phase": "forward", "length": 16384, "rows": rows}
    content = {"settings": {"device": "cuda"}, "cells": {"attention forward 16384": cell}, "memory": {}}
    assert {target.partition(" to ")[0]: met for target, _, met in verdicts(content)} == {
        "distance biases: at most 1.05": True,
        "rotations: at most 1.05": True,
        "alibi: at most 1": False,
        "alibi@flex_attention: at most 1": True,
        "rope: at most 1": True,
    }


def test_the_shape_of_smollm2_is_measured_where_it_is_named():
    options = parse_options(["--levels", "smollm2", "--phases", "forward", "decode_batch16"])
    assert options.levels == ["smollm2"]
    assert set(subjects_of(options, "smollm2")) >= {
        "none",
        "rope",
        "alibi",
        "t5",
        "forget_gate",
        "self_extend",
        "stock",
    }
    assert "smollm2" not in parse_options([]).levels
    setting = dataclasses.replace(TINY, smollm2=dataclasses.replace(TINY.sizes, num_key_value_heads=2, num_layers=3))
    ((subject,), _) = build_lineup("smollm2", ["alibi"], (), 16, setting)
    config = subject.model.config
    assert (config.num_key_value_heads, config.num_hidden_layers) == (2, 3)
    with subject.ready("decode_batch16", 16) as call:
        call.once()
    assert subject.filled_cache(9, 16).layers[0].keys.shape == (16, 2, 9, 8)
    # The config of HuggingFaceTB/SmolLM2-135M.
    assert (SMOLLM2.hidden_size // SMOLLM2.num_heads, SMOLLM2.vocab_size) == (64, 49152)


def test_a_scheme_may_name_its_backend():
    assert parse_options(["--schemes", "alibi@eager"]).schemes == ["alibi@eager"]
    (eager, default), _ = build_lineup("model", ["alibi@eager", "alibi"], (), 16, TINY)
    assert (eager.family, default.family) == ("eager", "distance bias")
    logits = []
    for subject in (eager, default):
        with torch.no_grad():
            logits.append(subject.model.eval()(input_ids=TINY.tokens(16)).logits)
    assert eager.model.config._attn_implementation == "eager"
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_flash_attention_is_given_the_slopes_of_alibi(monkeypatch):
    """A stand-in with the signature of flash-attn, written out plainly, computes what the scheme computes."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, alibi_slopes: Tensor | None) -> Tensor:
        assert causal
        query, key, value = (states.transpose(1, 2) for states in (q, k, v))
        positions = torch.arange(q.shape[1])
        distance = positions[None, :] - positions[:, None]
        slopes = torch.zeros(q.shape[2]) if alibi_slopes is None else alibi_slopes
        assert slopes.dtype == torch.float32
        mask = (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf).to(q.dtype)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    setting = dataclasses.replace(TINY, dtype="bfloat16")
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert "half precision" in peer_subjects(["flash"], TINY)[1]["FlashAttention"]
    subjects = {subject.name: subject for subject in peer_subjects(["flash", "mask"], setting)[0]}
    states = setting.random(1, 32, setting.sizes.hidden_size)
    slopes = subjects["alibi, FlashAttention slopes"].build(32)(states)
    torch.testing.assert_close(slopes, subjects["alibi, mask built once"].build(32)(states), atol=2e-2, rtol=2e-2)
    assert not torch.allclose(slopes, subjects["FlashAttention without position"].build(32)(states), atol=2e-2)


def test_missing_flash_attention_is_told():
    missing = peer_subjects(["flash"], dataclasses.replace(TINY, dtype="bfloat16"))[1]
    if torch.cuda.is_available():
        pytest.skip("it may be installed")
    assert missing == {"FlashAttention": "not installed: it needs a GPU and pip install flash-attn"}
