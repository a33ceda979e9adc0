"""Exports to GGUF, run by llama.cpp: the same numbers, or a refusal with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import (
    AlibiConfig,
    DynamicScaling,
    InterleavedConfig,
    LearnedRopeConfig,
    LinearScaling,
    Llama3Scaling,
    NoneConfig,
    NtkScaling,
    PositionScaleConfig,
    PRopeConfig,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    UnsupportedError,
    YarnScaling,
)
from hf_posenc.export.export_model import export_model
from hf_posenc.export.gguf import llama, write
from hf_posenc.export.gguf.form import GgufForm
from tests.architectures.population import Pair
from tests.architectures.tiny import tiny_model
from tests.export.gguf_cases import byte_tokenizer, tiny_llama

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.filterwarnings("ignore:Scheme .* encodes a token differently:UserWarning")

#: In float32, llama.cpp gives the logits of these models to about 1e-6 of the largest.
TOLERANCE = 1e-5


def exported(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    return export_model(model, folder, to="gguf", **({"tokenizer": byte_tokenizer()} | options))


def fields(folder: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(folder / "model.gguf")
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors(folder: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}


SCHEMES: list[tuple[SchemeConfig | str | None, str, int]] = [
    (None, "'llama'", 2),
    ("none", "'llama' and rope_freqs", 2),
    ("p_rope", "'llama' and rope_freqs", 2),
    (RopeConfig(layout="interleaved", rotary_dim=4), "'llama' and rope_freqs", 2),
    (RopeConfig(layout="half_reversed", attention_scaling=1.5), "'llama' and rope_freqs", 2),
    (RopeConfig(scaling=LinearScaling(4.0)), "rope.scaling.type 'linear'", 2),
    (
        RopeConfig(scaling=YarnScaling(8.0, original_max_positions=32, attention_factor=1.3, beta_fast=16.0)),
        "rope.scaling.type 'yarn'",
        2,
    ),
    (RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64, truncate=False)), "'llama' and rope_freqs", 2),
    (InterleavedConfig(), "'smollm3'", 5),
    (ScheduleConfig((RopeConfig(), PRopeConfig(theta=100.0), NoneConfig())), "heads 3 times as wide", 3),
    ("alibi", "'refact'", 2),
]
#: Like one of these, with other numbers.
MORE_SCHEMES: list[tuple[SchemeConfig | str | None, str, int]] = [
    ("hope", "'llama' and rope_freqs", 2),
    ("resonance", "'llama' and rope_freqs", 2),
    (RopeConfig(theta=500.0), "'llama'", 2),
    (RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64)), "rope.scaling.type 'yarn'", 2),
    (RopeConfig(scaling=NtkScaling(4.0)), "'llama' and rope_freqs", 2),
    (RopeConfig(scaling=Llama3Scaling(4.0, original_max_positions=64)), "'llama' and rope_freqs", 2),
    (ScheduleConfig((RopeConfig(), NoneConfig())), "heads 2 times as wide", 2),
    (PositionScaleConfig(RopeConfig(), factor=0.5), "'llama' and rope_freqs", 2),
]


@pytest.mark.parametrize(
    ("scheme", "carrier", "layers"),
    [*SCHEMES, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE_SCHEMES)],
    ids=lambda value: str(value)[:60],
)
def test_llama_cpp_gives_the_same_logits(
    scheme: SchemeConfig | str | None, carrier: str, layers: int, tmp_path: Path
) -> None:
    model = tiny_llama(num_hidden_layers=layers)
    if scheme is not None:
        hf_posenc.patch_model(model, scheme)
    report = exported(model, tmp_path / "out")
    assert carrier in report.carrier
    assert {(check.mode, check.quantity) for check in report.checks} == {
        (mode, quantity) for mode in ("prefill", "decode") for quantity in ("logits", "probabilities")
    }
    assert max(check.difference for check in report.checks) < TOLERANCE
    assert {"model.gguf", "README.md", "export.json", "tokenizer.json"} <= set(report.files)


def with_trained_parts(scheme: SchemeConfig | str) -> PreTrainedModel:
    model = tiny_llama()
    hf_posenc.patch_model(model, scheme)
    with torch.no_grad():
        for name, parameter in model.position_encoding.named_parameters():
            # STRING has frequencies for each head, which llama.cpp has not.
            if not (scheme == "string" and name.endswith("log_offsets")):
                parameter.uniform_(-1, 1)
    return model


@pytest.mark.parametrize(("scheme", "factors"), [("learned_rope", True), ("string", False)])
def test_trained_rotations_are_in_the_file(scheme: str, factors: bool, tmp_path: Path) -> None:
    report = exported(with_trained_parts(scheme), tmp_path / "out")
    assert max(check.difference for check in report.checks) < TOLERANCE
    assert ("rope_freqs.weight" in tensors(tmp_path / "out")) == factors


def test_heads_with_different_frequencies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="differ between heads"):
        exported(with_trained_parts(LearnedRopeConfig(sharing="head")), tmp_path / "out")


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param("p_rope", marks=pytest.mark.slow),
        "alibi",
        pytest.param(ScheduleConfig((RopeConfig(), NoneConfig())), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 0.1}),
        ("LlamaForCausalLM", {"hidden_size": 48, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 1}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Qwen2ForCausalLM", {}),
    ],
    ids=["tied", "wide-heads", "mistral", "qwen2"],
)
def test_other_sizes_and_classes(name: str, options: dict[str, Any], scheme: Any, tmp_path: Path) -> None:
    model = tiny_llama(name, **options)
    hf_posenc.patch_model(model, scheme)
    report = exported(model, tmp_path / "out")
    assert max(check.difference for check in report.checks) < TOLERANCE
    assert ("output.weight" in tensors(tmp_path / "out")) != model.config.tie_word_embeddings


def test_biases_of_all_projections(tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True, mlp_bias=True)
    hf_posenc.patch_model(model, "p_rope")
    assert max(check.difference for check in exported(model, tmp_path / "out").checks) < TOLERANCE
    hf_posenc.patch_model(model, "alibi")
    with pytest.raises(UnsupportedError, match=r"'refact' of llama\.cpp has no bias like blk\.0\.attn_output\.bias"):
        exported(model, tmp_path / "alibi")


@pytest.mark.parametrize(("dtype", "difference"), [pytest.param("f16", 0.01, marks=pytest.mark.slow), ("q8_0", 0.1)])
def test_rounded_weights(dtype: str, difference: float, tmp_path: Path) -> None:
    model = tiny_llama()
    hf_posenc.patch_model(model, "none")
    report = exported(model, tmp_path / "out", dtype=dtype)
    exact, rounded = report.checks[:4], report.checks[4:]
    assert all(check.runtime.endswith("f32") and check.difference < TOLERANCE for check in exact)
    assert all(check.runtime.endswith(dtype) and TOLERANCE / 100 < check.difference < difference for check in rounded)
    stored = {name: tensor.tensor_type.name.lower() for name, tensor in tensors(tmp_path / "out").items()}
    assert stored["blk.0.attn_q.weight"] == dtype
    # 48 numbers per row do not divide into blocks of 32.
    assert stored["blk.0.ffn_down.weight"] == "f16"
    assert stored["rope_freqs.weight"] == stored["output_norm.weight"] == "f32"


def without_reordering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "reorder_heads", lambda form, rotations: None)


def with_metadata(**wrong: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        def write_wrong(path: Path, form: GgufForm, *rest: Any) -> None:
            metadata = {**form.metadata, **{key.replace("__", "."): value for key, value in wrong.items()}}
            real(path, GgufForm(form.architecture, metadata, form.tensors, form.carrier), *rest)

        real = write.write_file
        monkeypatch.setattr(write, "write_file", write_wrong)

    return change


def without_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_wrong(path: Path, form: GgufForm, *rest: Any) -> None:
        kept = {name: tensor for name, tensor in form.tensors.items() if name != "rope_freqs.weight"}
        real(path, GgufForm(form.architecture, form.metadata, kept, form.carrier), *rest)

    real = write.write_file
    monkeypatch.setattr(write, "write_file", write_wrong)


@pytest.mark.parametrize(
    ("scheme", "fault", "deviation"),
    [
        (None, without_reordering, 0.02),
        ("none", without_factors, 0.02),
        ("p_rope", without_factors, 0.1),
        pytest.param(None, with_metadata(rope__freq_base=20000.0), 0.1, marks=pytest.mark.slow),
        (
            RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64)),
            with_metadata(rope__scaling__factor=5.0),
            0.1,
        ),
        pytest.param("alibi", with_metadata(attention__layer_norm_rms_epsilon=1e-3), 0.02, marks=pytest.mark.slow),
    ],
    ids=["permutation", "stock-rope-for-none", "stock-rope-for-p_rope", "theta", "factor", "epsilon"],
)
def test_a_wrong_file_is_found(
    scheme: Any, fault: Callable[[pytest.MonkeyPatch], None], deviation: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A deviation of 0.02 is that of a new model, whose logits hardly depend on positions."""
    model = tiny_llama(initializer_range=deviation)
    if scheme is not None:
        hf_posenc.patch_model(model, scheme)
    monkeypatch.setattr(write, "CARRIERS", [row for row in write.CARRIERS if row.name != "llama with wide heads"])
    fault(monkeypatch)
    with pytest.raises(
        UnsupportedError, match=r"(?s)llama.cpp gives other numbers. The logits differ by.*export it to 'stock'"
    ):
        exported(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_approximate_writes_what_differs_with_the_measured_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    hf_posenc.patch_model(model, "none")
    without_factors(monkeypatch)
    report = exported(model, tmp_path / "out", approximate=True)
    assert all(check.allowed is None for check in report.checks)
    assert max(check.difference for check in report.checks) > 0.01


def test_a_file_that_llama_cpp_cannot_read_is_refused_with_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_metadata(embedding_length=64)(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"(?s)cannot run the file. Its last messages:.*token_embd.weight"):
        exported(tiny_llama(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_slopes_that_were_trained_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    hf_posenc.patch_model(model, AlibiConfig(learnable=True))
    assert "refact" in exported(model, tmp_path / "fixed").carrier
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.add_(0.01)
    with pytest.raises(UnsupportedError, match=r"computes ALiBi's slopes from the number of heads.*learnable=False"):
        exported(model, tmp_path / "trained")


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("t5", "no bias but ALiBi in these blocks; a layer has T5Bias"),
        ("xpos", "XposMap is more than a rotation"),
        ("sinusoidal", r"adds vectors to the embeddings \(Sinusoidal"),
        (RopeConfig(scaling=DynamicScaling(2.0, original_max_positions=32)), "depend on the length of the sequence"),
        (["alibi", "rope"], "and llama.cpp does not here"),
        (ScheduleConfig((AlibiConfig(), NoneConfig())), "a layer has no bias"),
    ],
    ids=str,
)
def test_schemes_that_llama_cpp_lacks(scheme: Any, reason: str, tmp_path: Path) -> None:
    model = tiny_llama()
    hf_posenc.patch_model(model, scheme)
    with pytest.raises(UnsupportedError, match=rf"(?s){reason}.*What can be done:.*run the checkpoint where"):
        exported(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("MistralForCausalLM", {"sliding_window": 32}, "has a sliding window of 32 tokens"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "has the activation 'gelu'"),
        (
            "Qwen3ForCausalLM",
            {"head_dim": 8},
            r"no weight like model.layers.0.self_attn.q_norm|other numbers|cannot run",
        ),
        ("GraniteForCausalLM", {"logits_scaling": 2.0}, "gives other numbers"),
        ("CohereForCausalLM", {}, "has other blocks than those that are written: Llama's"),
    ],
    ids=["window", "activation", "norms-of-heads", "multipliers", "other-blocks"],
)
def test_models_with_other_blocks(name: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        exported(tiny_llama(name, **options), tmp_path / "out")


def test_unknown_precision(tmp_path: Path) -> None:
    with pytest.raises(hf_posenc.UnknownNameError, match="q8_0"):
        exported(tiny_llama(), tmp_path / "out", dtype="q8")


#: Queries of Ministral 3 get a factor at positions beyond the original length, which is longer than any prompt here.
FACTOR = {
    "max_position_embeddings": 16384,
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "llama_4_scaling_beta": 2.0,
    },
}


@pytest.mark.parametrize("scheme", [None, "alibi", "none"])
def test_a_factor_of_distant_queries_is_refused(scheme: str | None, tmp_path: Path) -> None:
    model = tiny_llama("Ministral3ForCausalLM", **FACTOR)
    if scheme is not None:
        hf_posenc.patch_model(model, scheme)
    with pytest.raises(UnsupportedError, match="a factor that grows with the position"):
        exported(model, tmp_path / "out")


def test_layers_with_heads_of_different_widths_are_refused(tmp_path: Path) -> None:
    model = hf_posenc.patch_model(tiny_model(Pair("causal", "gemma4_text")), "rope")
    with pytest.raises(UnsupportedError, match="all but every fourth layer; layer 1 differs"):
        exported(model, tmp_path / "out")
