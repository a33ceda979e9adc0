"""Exports of GPT-2, BLOOM, MPT and GPT-NeoX to GGUF, run by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import (
    AlibiConfig,
    IntegerConfig,
    LinearScaling,
    NoneConfig,
    NtkScaling,
    PositionScaleConfig,
    RopeConfig,
    ScheduleConfig,
    SinusoidalConfig,
    UnsupportedError,
    YarnScaling,
)
from hf_posenc.export.export_model import export_model
from hf_posenc.export.gguf import write
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.vocabulary import vocabulary
from hf_posenc.export.refusal import ExportError
from tests.export.gguf_cases import VOCABULARY, byte_tokenizer, tiny_llama
from tests.export.test_gguf import fields, tensors

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.filterwarnings("ignore:Scheme .* encodes a token differently:UserWarning")

#: llama.cpp's GELU is a table of float16. With the same table in the model, what remains are numbers that a different
#: order of sums rounds to the next entry.
SAME_GELU = 1e-3
#: These classes have other names for their length.
_UNNAMED = {"max_position_embeddings": None}
_SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {},
    "BloomForCausalLM": {"seq_length": 256, **_UNNAMED},
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, **_UNNAMED},
    "GPTBigCodeForCausalLM": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "GPTNeoXForCausalLM": {
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    },
}


def tiny(name: str, scheme: Any = None, **options: Any) -> PreTrainedModel:
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    model = tiny_llama(name, **(tokens | _SIZES[name] | options))
    if scheme is not None:
        hf_posenc.patch_model(model, scheme)
    return model


@pytest.fixture(scope="module")
def words() -> dict[str, Any]:
    return vocabulary(byte_tokenizer(), VOCABULARY)


@pytest.fixture(autouse=True)
def vocabulary_once(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is the same in all tests, and test_gguf_vocabulary.py is about it."""
    monkeypatch.setattr(write, "vocabulary", lambda tokenizer, size: words)


def exported(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    return export_model(model, folder, to="gguf", tokenizer=byte_tokenizer(), **options)


def strict(report: Any) -> float:
    """The largest difference that is not due to GELU."""
    return max(check.difference for check in report.checks if check.quantity.endswith("GELU"))


GPT2, BLOOM, MPT, NEOX, BIGCODE = (
    "GPT2LMHeadModel",
    "BloomForCausalLM",
    "MptForCausalLM",
    "GPTNeoXForCausalLM",
    "GPTBigCodeForCausalLM",
)
SEQUENTIAL = {"use_parallel_residual": False}
INTEGER = IntegerConfig(direction="random")
YARN = RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64))
TABLE, ALIBI, NOTHING = "'gpt2' with a table of positions", "'mpt' with ALiBi", "'mpt' with no positions"


@pytest.mark.parametrize(
    ("name", "scheme", "options", "carrier"),
    [
        (GPT2, None, {}, TABLE),
        (GPT2, "sinusoidal", {"n_head": 2, "n_inner": 48, "tie_word_embeddings": False}, TABLE),
        (GPT2, INTEGER, {"scale_attn_by_inverse_layer_idx": True}, TABLE),
        (GPT2, "none", {}, NOTHING),
        (GPT2, "alibi", {"n_embd": 48, "n_head": 6}, ALIBI),
        (GPT2, ["sinusoidal", "alibi"], {}, "'mpt' with ALiBi and a table of positions"),
        (GPT2, "rope", {}, "'gptneox'"),
        (GPT2, "p_rope", {}, "'gptneox'"),
        (GPT2, YARN, {}, "'gptneox' with rope.scaling.type 'yarn'"),
        (GPT2, RopeConfig(layout="half_reversed", attention_scaling=1.5), {}, "'gptneox'"),
        (BLOOM, None, {"hidden_size": 48, "n_head": 6}, "'bloom', which has ALiBi"),
        (BLOOM, "none", {}, NOTHING),
        (BLOOM, "sinusoidal", {}, TABLE),
        (BLOOM, RopeConfig(scaling=LinearScaling(4.0)), {}, "'gptneox' with rope.scaling.type 'linear'"),
        (MPT, None, {"d_model": 48, "n_heads": 6}, ALIBI),
        (MPT, None, {"attn_config": {"clip_qkv": 0.5}}, ALIBI),
        (MPT, "none", {"attn_config": {"softmax_scale": 0.5}}, NOTHING),
        (NEOX, None, {}, "'gptneox'"),
        (NEOX, "none", {}, "'gptneox' with stopped positions"),
        (
            NEOX,
            RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64)),
            SEQUENTIAL,
            "'gptneox' with rope.scaling",
        ),
        (NEOX, "alibi", {**SEQUENTIAL, "attention_bias": False, "hidden_act": "gelu_fast"}, ALIBI),
        (BIGCODE, None, {}, TABLE),
        (BIGCODE, "alibi", {"multi_query": False}, ALIBI),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (GPT2, "binary", {}, TABLE),
                (GPT2, "learned", {}, TABLE),
                (GPT2, "hope", {}, "'gptneox'"),
                (GPT2, RopeConfig(theta=500.0), {}, "'gptneox'"),
                (GPT2, RopeConfig(scaling=NtkScaling(4.0)), {}, "'gptneox'"),
                (GPT2, RopeConfig(layout="interleaved", rotary_dim=4), {}, "'gptneox'"),
                (GPT2, PositionScaleConfig(RopeConfig(), factor=0.5), {}, "'gptneox'"),
                (MPT, "sinusoidal", {}, TABLE),
                (MPT, "rope", {}, "'gptneox'"),
                (BIGCODE, "rope", {}, "'gptneox'"),
            )
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_llama_cpp_gives_the_same_logits(
    name: str, scheme: Any, options: dict[str, Any], carrier: str, tmp_path: Path
) -> None:
    report = exported(tiny(name, scheme, **options), tmp_path / "out")
    assert carrier in report.carrier
    assert strict(report) < SAME_GELU
    # llama.cpp's GELU is off by up to 5e-4, and so are the logits.
    assert max(check.difference for check in report.checks) < 2e-3
    compared = [(check.mode, check.quantity) for check in report.checks]
    quantities = ("logits", "probabilities", "logits with llama.cpp's GELU", "probabilities with llama.cpp's GELU")
    assert sorted(compared) == sorted((mode, what) for mode in ("prefill", "decode") for what in quantities)


def test_trained_positions_are_in_the_file(tmp_path: Path) -> None:
    model = tiny(GPT2, "learned")
    with torch.no_grad():
        for weight in model.position_encoding.parameters():
            weight.normal_(std=0.5)
    assert strict(exported(model, tmp_path / "out")) < SAME_GELU
    rows = torch.tensor(tensors(tmp_path / "out")["position_embd.weight"].data)
    assert torch.equal(rows, next(model.position_encoding.parameters()).detach())


def test_the_table_has_the_current_length(tmp_path: Path) -> None:
    model = tiny(GPT2, "sinusoidal")
    hf_posenc.extend_context(model, length=400)
    exported(model, tmp_path / "out")
    assert tensors(tmp_path / "out")["position_embd.weight"].data.shape == (400, 32)
    assert fields(tmp_path / "out")["gpt2.context_length"] == 400


def test_normalised_embeddings_leave_the_output_as_it_is(tmp_path: Path) -> None:
    model = tiny(BLOOM, "none")
    exported(model, tmp_path / "out")
    found, embeddings = tensors(tmp_path / "out"), model.get_input_embeddings().weight.detach()
    norm = model.transformer.word_embeddings_layernorm
    assert torch.equal(torch.tensor(found["output.weight"].data), embeddings)
    assert torch.allclose(torch.tensor(found["token_embd.weight"].data), norm(embeddings).detach(), atol=1e-6)


def test_the_export_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    model, ids = tiny(BLOOM, "alibi"), torch.arange(20).unsqueeze(0)
    before = model(ids).logits
    exported(model, tmp_path / "out")
    assert torch.equal(model(ids).logits, before)


def test_rounded_weights(tmp_path: Path) -> None:
    report = exported(tiny(GPT2, "alibi"), tmp_path / "out", dtype="q8_0")
    rounded = [check for check in report.checks if check.runtime.endswith("q8_0")]
    assert [check.mode for check in rounded] == ["prefill", "prefill", "decode", "decode"]
    assert 1e-3 < max(check.difference for check in rounded if check.quantity == "logits") < 0.1


def with_other(change: Callable[[GgufForm], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def write_wrong(path: Path, form: GgufForm, *rest: Any) -> None:
            wrong = GgufForm(form.architecture, {**form.metadata}, {**form.tensors}, form.carrier)
            change(wrong)
            real(path, wrong, *rest)

        real = write.write_file
        monkeypatch.setattr(write, "write_file", write_wrong)

    return patch


def other_metadata(key: str, value: float) -> Callable[[GgufForm], None]:
    return lambda form: form.metadata.update({key: value})


def parallel_as_sequential(form: GgufForm) -> None:
    form.metadata["use_parallel_residual"] = False


def shifted_table(form: GgufForm) -> None:
    rows = form.tensors["position_embd.weight"]
    form.tensors["position_embd.weight"] = torch.cat([rows[1:], rows[-1:]])


def zero_table(form: GgufForm) -> None:
    form.tensors["position_embd.weight"] = torch.zeros_like(form.tensors["position_embd.weight"])


def queries_as_keys(form: GgufForm) -> None:
    for name, rows in form.tensors.items():
        if ".attn_qkv." in name:
            query, key, value = rows.chunk(3)
            form.tensors[name] = torch.cat([key, value, query])


@pytest.mark.parametrize(
    ("name", "scheme", "fault", "deviation"),
    [
        (GPT2, None, shifted_table, 0.02),
        (GPT2, "sinusoidal", zero_table, 0.02),
        (GPT2, "alibi", other_metadata("attention.max_alibi_bias", 0.0), 0.02),
        (MPT, None, other_metadata("attention.max_alibi_bias", 0.0), 0.02),
        (MPT, None, other_metadata("attention.max_alibi_bias", 7.8), 0.1),
        (BLOOM, None, queries_as_keys, 0.02),
        (NEOX, None, other_metadata("rope.freq_base", 20000.0), 0.1),
        (NEOX, None, parallel_as_sequential, 0.1),
        (GPT2, "p_rope", other_metadata("rope.dimension_count", 8), 0.1),
        (GPT2, YARN, other_metadata("rope.scaling.factor", 5.0), 0.1),
    ],
    ids=["shifted", "zero", "lost-alibi", "lost-native-alibi", "slopes", "order", "theta", "residual", "width", "yarn"],
)
def test_a_wrong_file_is_found(
    name: str, scheme: Any, fault: Callable[[GgufForm], None], deviation: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A deviation of 0.02 is that of a new model, whose logits hardly depend on positions."""
    model = tiny(name, scheme, initializer_range=deviation)
    monkeypatch.setattr(write, "CARRIERS", [row for row in write.CARRIERS if row.blocks.fits(model)][-5:])
    with_other(lambda form: fault(form) if _has(form, fault) else None)(monkeypatch)
    with pytest.raises(UnsupportedError, match="gives other numbers"):
        exported(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _has(form: GgufForm, fault: Callable[[GgufForm], None]) -> bool:
    return fault not in (shifted_table, zero_table) or "position_embd.weight" in form.tensors


class OtherGelu(nn.Module):
    """A GELU that is wrong by 0.05 in an interval."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(values) + 0.05 * ((values > 0.5) & (values < 1.5))


@pytest.mark.parametrize(
    ("name", "scheme", "options", "reason"),
    [
        (GPT2, "t5", {}, "mpt: llama.cpp has no bias but ALiBi in these blocks; a layer has T5Bias"),
        (GPT2, "xpos", {}, "XposMap is more than a rotation"),
        (GPT2, "resonance", {}, "gptneox: the frequencies do not decrease by a constant factor"),
        (GPT2, ["alibi", "rope"], {}, "and llama.cpp does not here"),
        (GPT2, ["sinusoidal", "rope"], {}, "and llama.cpp does not here"),
        (GPT2, ScheduleConfig((RopeConfig(), NoneConfig())), {}, "gptneox: the layers have different frequencies"),
        (GPT2, ScheduleConfig((AlibiConfig(), NoneConfig())), {}, "a layer has no bias"),
        (GPT2, None, {"activation_function": "relu"}, "the activation ReLU, which differs from GELU by up to 0.17"),
        (GPT2, None, {"activation_function": "quick_gelu"}, "the activation QuickGELUActivation, which differs"),
        (GPT2, None, {"add_cross_attention": True}, "no weight like transformer.h.0.crossattention"),
        (BLOOM, None, {"apply_residual_connection_post_layernorm": True}, "adds its residuals after the norms"),
        (BLOOM, "rope", {"apply_residual_connection_post_layernorm": True}, "adds its residuals after the norms"),
        (MPT, "rope", {"attn_config": {"clip_qkv": 0.5}}, "clips queries, keys and values, which 'gptneox' does not"),
        (MPT, None, {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.5}}, "clips queries and scales its logits"),
        (NEOX, "alibi", {}, "gpt2, mpt|mpt: the model adds attention and feed-forward to the same residual"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_llama_cpp_lacks(name: str, scheme: Any, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=rf"(?s){reason}.*What can be done:.*run the checkpoint where") as refused:
        exported(tiny(name, scheme, **options), tmp_path / "out")
    # Neither Llama's carriers nor a reason twice.
    assert "smollm3" not in str(refused.value)
    reasons = [reason.partition(": ")[2] for reason in refused.value.reasons]
    assert len(reasons) == len(set(reasons))


def test_a_wrong_feed_forward_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bias(form: GgufForm) -> None:
        form.tensors["blk.1.ffn_up.bias"] = torch.zeros_like(form.tensors["blk.1.ffn_up.bias"])

    with_other(without_bias)(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"gives other numbers\. The logits.*GELU.*allowed: 0\.002"):
        exported(tiny(GPT2), tmp_path / "out")


def test_slopes_that_were_trained_are_refused(tmp_path: Path) -> None:
    model = tiny(GPT2, AlibiConfig(learnable=True))
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.add_(0.01)
    with pytest.raises(UnsupportedError, match=r"computes ALiBi's slopes from the number of heads.*learnable=False"):
        exported(model, tmp_path / "out")


@pytest.mark.parametrize("name", ["GPT2Model", "LlamaModel"])
def test_a_model_without_a_head_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"{name} has no language model head.*causal language modelling"):
        exported(tiny_llama(name), tmp_path / "out")


def test_other_blocks_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"GPTJForCausalLM \(gptj\) has other blocks than those .*GPT-2's"
    ) as refused:
        exported(tiny_llama("GPTJForCausalLM", rotary_dim=4), tmp_path / "out")
    assert "\n- " not in str(refused.value)


def test_an_activation_that_is_almost_gelu_is_refused(tmp_path: Path) -> None:
    model = tiny(GPT2)
    model.transformer.h[1].mlp.act = OtherGelu()
    with pytest.raises(UnsupportedError, match=r"the activation OtherGelu, which differs from GELU by up to 0\.05"):
        exported(model, tmp_path / "out")


def test_no_length_in_the_config(tmp_path: Path) -> None:
    exported(tiny(BLOOM, SinusoidalConfig(), seq_length=None), tmp_path / "out")
    assert fields(tmp_path / "out")["gpt2.context_length"] == 2048
