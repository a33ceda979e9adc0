"""Exports to GGUF, run by llama.cpp: the same numbers, or a refusal with the reason. The cases are in `gguf_cases`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import hf_posenc
from hf_posenc import UnsupportedError
from hf_posenc.errors import MeasurementError, UsageError
from hf_posenc.export.carriers import ExportError
from hf_posenc.export.export_model import export_model
from hf_posenc.export.gguf import target
from hf_posenc.export.gguf.file import GgufForm
from hf_posenc.export.gguf.in_llama_cpp import Library, Opaque
from hf_posenc.export.gguf.llama import is_llama
from hf_posenc.export.gguf.run import decode
from hf_posenc.export.gguf.t5 import llama_cpp_bucket
from hf_posenc.export.gguf.verify import has_gelu
from hf_posenc.export.gguf.vocabulary import vocabulary
from hf_posenc.export.layers import ModelParts
from hf_posenc.schemes.bias.t5 import relative_position_bucket
from tests.export.gguf_cases import (
    QWEN3_MOE,
    REFUSED,
    SAME,
    VOCABULARY,
    YARN,
    bert,
    bloom,
    byte_tokenizer,
    gpt2,
    label,
    llama,
    mpt,
    neox,
    t5,
    tiny_encoder,
    tiny_llama,
    tokenizer_of,
)
from tests.versions import since

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.filterwarnings("ignore:Scheme .* encodes a token differently:UserWarning")

#: In float32, llama.cpp gives the outputs of these models to about 1e-6 of the largest, and those of T5 to about 1e-5.
TOLERANCE, TOLERANCE_OF_T5 = 1e-5, 5e-5
#: llama.cpp's GELU is a table of float16. With the same table in the model, what remains are numbers that a different
#: order of sums rounds to the next entry.
SAME_GELU = 1e-3
#: llama.cpp's GELU is off by up to 5e-4, and so are the logits.
OTHER_GELU = 2e-3
END = " with llama.cpp's GELU"
_words: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers of a kind are the same in all tests, and test_gguf_vocabulary.py is about them."""

    def known(tokenizer: Any, size: int) -> dict[str, Any]:
        name = type(tokenizer).__name__
        if name not in _words:
            _words[name] = vocabulary(tokenizer, VOCABULARY)
        return _words[name] if size == VOCABULARY else vocabulary(tokenizer, size)

    monkeypatch.setattr(target, "vocabulary", known)


def exported(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    return export_model(model, folder, to="gguf", tokenizer=tokenizer_of(model), **options)


def fields(folder: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(folder / "model.gguf")
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors(folder: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}


def worst(report: Any, end: str = "") -> float:
    return max(check.difference for check in report.checks if check.quantity.endswith(end))


@pytest.mark.parametrize(
    ("build", "scheme", "options", "carrier"),
    SAME,
    ids=label,
)
def test_llama_cpp_gives_the_same_numbers(
    build: Callable[..., PreTrainedModel], scheme: Any, options: dict[str, Any], carrier: str, tmp_path: Path
) -> None:
    if "UMT5" in options.get("name", ""):
        since("5.18", "its decoder loses its mask, and is refused")
    model = build(scheme, **options)
    report = exported(model, tmp_path / "out")
    assert carrier in report.carrier
    quantities = ("logits", "probabilities") if model.can_generate() else ("hidden states",)
    ends = ("", END) if has_gelu(model) else ("",)
    modes = ("prefill", "decode") if model.can_generate() else ("prefill",)
    expected = [(mode, what + end) for mode in modes for end in ends for what in quantities]
    assert [(check.mode, check.quantity) for check in report.checks] == expected
    if has_gelu(model):
        assert worst(report, END) < SAME_GELU
        assert model.config.model_type in ("t5", "bert") or worst(report) < OTHER_GELU
    else:
        assert worst(report) < (TOLERANCE_OF_T5 if build is t5 else TOLERANCE)
    assert {"model.gguf", "README.md", "export.json", "tokenizer.json"} <= set(report.files)
    if build in (llama, t5):
        assert not (model.config.tie_word_embeddings and "output.weight" in tensors(tmp_path / "out"))


STORED = {"blk.0.attn_q.weight": "Q8_0", "rope_freqs.weight": "F32", "output_norm.weight": "F32"}
ROUTED = {"blk.0.ffn_gate_inp.weight": "F32", "blk.0.ffn_up_exps.weight": "Q8_0", "blk.0.attn_q_norm.weight": "F32"}
TABLES = {f"{side}.blk.0.attn_rel_b.weight": "F32" for side in ("enc", "dec")} | {"enc.blk.0.attn_q.weight": "Q8_0"}


@pytest.mark.parametrize(
    ("build", "dtype", "bound", "stored"),
    [
        # 48 numbers per row do not divide into blocks of 32.
        (lambda: llama("none"), "q8_0", 0.1, {**STORED, "blk.0.ffn_down.weight": "F16"}),
        pytest.param(lambda: llama("none"), "f16", 0.01, {"blk.0.attn_q.weight": "F16"}, marks=pytest.mark.slow),
        (lambda: gpt2("alibi"), "q8_0", 0.1, {}),
        (lambda: llama(**QWEN3_MOE), "q8_0", 0.1, ROUTED),
        (lambda: t5(num_heads=32, d_kv=4), "q8_0", 0.25, TABLES),
    ],
    ids=["llama", "f16", "gpt2", "experts", "t5"],
)
def test_rounded_weights(
    build: Callable[[], PreTrainedModel], dtype: str, bound: float, stored: dict[str, str], tmp_path: Path
) -> None:
    report = exported(build(), tmp_path / "out", dtype=dtype)
    exact, rounded = report.checks[:-4], report.checks[-4:]
    assert all(check.runtime.endswith("f32") for check in exact)
    assert all(check.runtime.endswith(dtype) for check in rounded)
    assert [check.mode for check in rounded] == ["prefill", "prefill", "decode", "decode"]
    assert 1e-5 < max(check.difference for check in rounded if check.quantity == "logits") < bound
    found = {name: tensor.tensor_type.name for name, tensor in tensors(tmp_path / "out").items()}
    assert {name: found[name] for name in stored} == stored


Fault = Callable[[GgufForm], GgufForm]


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Changes all weights whose name ends so."""
    return lambda form: replace(
        form, tensors={key: change(rows) if key.endswith(name) else rows for key, rows in form.tensors.items()}
    )


def metadata(**wrong: Any) -> Fault:
    found = {key.replace("__", "."): value for key, value in wrong.items()}
    return lambda form: replace(form, metadata={**form.metadata, **found})


def without_factors(form: GgufForm) -> GgufForm:
    return replace(form, tensors={name: rows for name, rows in form.tensors.items() if name != "rope_freqs.weight"})


def in_halves(rows: Tensor) -> Tensor:
    """The pairs of heads of width 8 as transformers stores them."""
    return rows.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)


def one_row_wrong(rows: Tensor) -> Tensor:
    return torch.cat((rows[:200], rows[100:101], rows[201:]))


def queries_as_keys(rows: Tensor) -> Tensor:
    query, key, value = rows.chunk(3)
    return torch.cat((key, value, query))


def shifted(rows: Tensor) -> Tensor:
    return rows.roll(1, 0)


STD = {"initializer_range": 0.02}


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        # A new model, whose logits hardly depend on positions, has a deviation of 0.02.
        (lambda: llama(**STD), with_tensor(".attn_q.weight", in_halves)),
        (lambda: llama("none", **STD), without_factors),
        (lambda: llama("p_rope"), without_factors),
        pytest.param(lambda: llama(), metadata(rope__freq_base=20000.0), marks=pytest.mark.slow),
        (lambda: llama(YARN), metadata(rope__scaling__factor=5.0)),
        pytest.param(
            lambda: llama("alibi", **STD), metadata(attention__layer_norm_rms_epsilon=1e-3), marks=pytest.mark.slow
        ),
        (lambda: llama(**QWEN3_MOE), with_tensor(".attn_q_norm.weight", shifted)),
        (lambda: llama(**QWEN3_MOE), with_tensor(".ffn_gate_exps.weight", shifted)),
        (lambda: llama(**QWEN3_MOE), metadata(expert_used_count=1)),
        (lambda: gpt2(**STD), with_tensor("position_embd.weight", shifted)),
        (lambda: gpt2("sinusoidal", **STD), with_tensor("position_embd.weight", torch.zeros_like)),
        (lambda: gpt2("alibi", **STD), metadata(attention__max_alibi_bias=0.0)),
        (lambda: mpt(**STD), metadata(attention__max_alibi_bias=0.0)),
        (lambda: mpt(), metadata(attention__max_alibi_bias=7.8)),
        (lambda: bloom(**STD), with_tensor(".attn_qkv.weight", queries_as_keys)),
        (lambda: neox(), metadata(rope__freq_base=20000.0)),
        (lambda: neox(), metadata(use_parallel_residual=False)),
        (lambda: gpt2("p_rope"), metadata(rope__dimension_count=8)),
        (lambda: gpt2(YARN), metadata(rope__scaling__factor=5.0)),
        (lambda: gpt2(), with_tensor("blk.1.ffn_up.bias", torch.zeros_like)),
        (lambda: bert(), with_tensor("position_embd.weight", shifted)),
        (lambda: bert(), with_tensor("position_embd.weight", one_row_wrong)),
        (lambda: bert("alibi"), lambda form: replace(form, architecture="jina-bert-v3")),
        (lambda: bert("rope"), metadata(rope__freq_base=10200.0)),
        (lambda: t5(name="T5EncoderModel"), metadata(attention__causal=True)),
        (lambda: t5(), with_tensor("dec.blk.0.attn_rel_b.weight", torch.zeros_like)),
        (lambda: t5(), with_tensor("enc.blk.0.attn_rel_b.weight", shifted)),
        (
            lambda: t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
            metadata(attention__relative_buckets_count=30),
        ),
        (lambda: t5(), with_tensor("dec.output_norm.weight", lambda norm: norm * 32**0.5)),
    ],
)
def test_a_wrong_file_is_found(
    model: Callable[[], PreTrainedModel], fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = model()
    faulty(monkeypatch, given, fault)
    refusal = r"(?s)(llama.cpp gives different numbers. The \S+.* differ by|cannot run the file).*What can be done:"
    with pytest.raises(ExportError, match=refusal) as refused:
        exported(given, tmp_path / "out")
    # A stock Llama has no ALiBi.
    has_stock = given.config.model_type == "llama" and "scheme alibi" not in str(refused.value)
    assert not has_stock or "export it to 'stock'" in str(refused.value)
    assert not (tmp_path / "out").exists()


def faulty(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, fault: Fault) -> None:
    """Leaves the carrier that the model would have, whose files get a fault."""

    def write_wrong(path: Path, form: GgufForm, *rest: Any) -> None:
        real(path, fault(form), *rest)

    real, carriers = target.write_file, target.GgufExport().of(ModelParts(model), Path(), None).carriers()
    for carrier in carriers:
        try:
            carrier.form_of(ModelParts(model), "llama.cpp")
        except UnsupportedError:
            continue
        monkeypatch.setattr(target, "CARRIERS", [carrier])
        break
    monkeypatch.setattr(target, "write_file", write_wrong)


def test_approximate_writes_what_differs_with_the_measured_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama("none")
    faulty(monkeypatch, model, without_factors)
    report = exported(model, tmp_path / "out", approximate=True)
    assert all(check.allowed is None for check in report.checks)
    assert worst(report) > 0.01


def test_a_file_that_llama_cpp_cannot_read_is_refused_with_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, llama(), metadata(embedding_length=64))
    reason = r"(?s)cannot run the file: .*token_embd.weight.* Export to 'onnx'.* Its last messages:"
    with pytest.raises(UnsupportedError, match=reason):
        exported(llama(), tmp_path / "out")


@pytest.mark.parametrize(
    ("kinds", "numbers", "types", "known"),
    [(4, 8, (1, 1), True), (4, 9, (1, 1), True), (4, 8, (1, 2), False), (3, 8, (1, 1), False)],
)
def test_fields_of_llama_cpp_are_found_in_the_layouts_of_its_versions(
    kinds: int, numbers: int, types: tuple[int, int], known: bool
) -> None:
    unspecified = [2**32 - 1] * kinds
    defaults = [512, 2048, 512, 1, 0, 0, 1, 4, 4, 0, *unspecified, *[0xBF800000] * numbers, 0, 0, 0, 0, *types, 7]
    library = Library.__new__(Library)
    words = (ctypes.c_uint32 * 1024)(*defaults)
    library.functions = SimpleNamespace(llama_context_default_params=lambda: Opaque(words))
    if not known:
        with pytest.raises(RuntimeError, match="fields cannot be set"):
            library._context_parameters(1024, 512, precise=True)
        return
    found = list(library._context_parameters(1024, 512, precise=True).words)[: len(defaults)]
    assert found[:3] == [1024, 1024, 512]
    assert found[10:14] == [2**32 - 1, 0, 2**32 - 1, 0]  # no pooling, no flash attention
    assert found[-3:] == [0, 0, 7]
    found = list(library._context_parameters(1024, 512, precise=False).words)[: len(defaults)]
    assert found[10:14] == [2**32 - 1, 0, 2**32 - 1, 2**32 - 1]
    assert found[-3:] == [1, 1, 7]


def test_tokens_that_are_left_out_are_never_chosen(tmp_path: Path) -> None:
    export_model(tiny_llama().eval(), tmp_path / "out", to="gguf", tokenizer=byte_tokenizer())
    file, prompt = tmp_path / "out" / "model.gguf", [[[70, 71, 72]]]
    (free,) = decode(file, prompt, 5)
    best = free.argmax(-1).tolist()
    (bound,) = decode(file, prompt, 5, without=best)
    assert not {*bound.argmax(-1).tolist()} & {*best}
    assert bound[:, best].isneginf().all()
    kept = [place for place in range(free.shape[-1]) if place not in best]
    torch.testing.assert_close(bound[0, kept], free[0, kept])


@pytest.mark.parametrize(("model", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_what_llama_cpp_lacks(model: Callable[[], PreTrainedModel], reason: str, tmp_path: Path) -> None:
    given = model()
    with pytest.raises(ExportError, match=rf"(?s){reason}.*What can be done:.*run the checkpoint where") as refused:
        exported(given, tmp_path / "out")
    # Neither carriers with other blocks nor a reason twice.
    assert ("smollm3" in str(refused.value)) == is_llama(given)
    reasons = [reason.partition(": ")[2] for reason in refused.value.reasons]
    assert len(reasons) == len(set(reasons))
    # No target is named that takes no encoder with a decoder.
    assert not given.config.is_encoder_decoder or "export it to 'onnx'" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["GPTJForCausalLM", "CohereForCausalLM"])
def test_other_blocks_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    options = {"rotary_dim": 4} if name.startswith("GPTJ") else {}
    message = rf"{name} .* has blocks that this export does not write\. It writes Llama's.*GPT-2's"
    with pytest.raises(UnsupportedError, match=message) as refused:
        exported(llama(None, name, **options), tmp_path / "out")
    assert "\n- " not in str(refused.value)


def test_the_table_has_the_current_length(tmp_path: Path) -> None:
    model = gpt2("sinusoidal")
    hf_posenc.extend_context(model, length=400)
    exported(model, tmp_path / "out")
    assert tensors(tmp_path / "out")["position_embd.weight"].data.shape == (400, 32)
    assert fields(tmp_path / "out")["gpt2.context_length"] == 400


def test_a_length_that_a_file_cannot_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"llama\.context_length .* has 1000000000000\. Change that field"):
        exported(llama(max_position_embeddings=10**12), tmp_path / "out")


def test_a_model_that_computes_nan_is_not_compared(tmp_path: Path) -> None:
    model = llama()
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(MeasurementError, match="The model itself computes NaN"):
        exported(model, tmp_path / "out")


def test_no_length_in_the_config(tmp_path: Path) -> None:
    exported(bloom("sinusoidal", seq_length=None), tmp_path / "out")
    assert fields(tmp_path / "out")["gpt2.context_length"] == 2048


def test_normalised_embeddings_leave_the_output_and_the_model_as_they_are(tmp_path: Path) -> None:
    model, ids = bloom("none"), torch.arange(20).unsqueeze(0)
    before = model(ids).logits
    exported(model, tmp_path / "out")
    assert torch.equal(model(ids).logits, before)
    found, embeddings = tensors(tmp_path / "out"), model.get_input_embeddings().weight.detach()
    norm = model.transformer.word_embeddings_layernorm
    assert torch.equal(torch.tensor(found["output.weight"].data), embeddings)
    assert torch.allclose(torch.tensor(found["token_embd.weight"].data), norm(embeddings).detach(), atol=1e-6)


@pytest.mark.parametrize("name", ["BertModel", "T5EncoderModel"])
def test_the_server_returns_the_mean_of_the_hidden_states(name: str, tmp_path: Path) -> None:
    import xllamacpp

    model = tiny_encoder(name)
    exported(model, tmp_path / "out", pooling="mean")
    architecture = {"BertModel": "bert", "T5EncoderModel": "t5encoder"}[name]
    assert fields(tmp_path / "out")[f"{architecture}.pooling_type"] == 1
    options = xllamacpp.CommonParams()
    options.model.path, options.embedding, options.verbosity = str(tmp_path / "out" / "model.gguf"), True, 1
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.warmup = options.fit_params = False
    text = "the dog do a b"
    answer = xllamacpp.Server(options).handle_embeddings({"input": [text]})
    found = torch.tensor(answer["data"][0]["embedding"])
    with torch.no_grad():
        mean = model(**tokenizer_of(model)(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    # The server rounds attention to float16. Later tokens that are masked change more.
    assert torch.allclose(found, mean / mean.norm(), atol=5e-3)


def test_options_of_the_target(tmp_path: Path) -> None:
    exported(bert(), tmp_path / "open")
    card = (tmp_path / "open" / "README.md").read_text()
    assert "--pooling mean" in card
    assert "LLAMA_POOLING_TYPE_MEAN" in card
    for name, wrong, known in (("pooling", "average", "mean"), ("dtype", "q8", "q8_0")):
        with pytest.raises(hf_posenc.UnknownNameError, match=known):
            exported(bert(), tmp_path / "out", **{name: wrong})
    with pytest.raises(UsageError, match=r"pooling='mean' .* is for encoders"):
        exported(llama(), tmp_path / "out", pooling="mean")


@pytest.mark.parametrize("count", [16, 32, 64])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_llama_cpp_has_the_buckets_of_t5(count: int, bidirectional: bool) -> None:
    distance = torch.arange(-5000, 5001)
    expected = relative_position_bucket(distance, count, 128, bidirectional)
    assert torch.equal(llama_cpp_bucket(distance, count, bidirectional), expected)
    with pytest.raises(UnsupportedError, match="no 256 buckets for a direction"):
        llama_cpp_bucket(distance, 512 if bidirectional else 256, bidirectional)


def test_transformers_reads_the_experts_of_a_file(tmp_path: Path) -> None:
    """Its own reader of GGUF files, which takes a type's default for the width of experts."""
    width = Qwen3MoeConfig().moe_intermediate_size
    model = llama(**{**QWEN3_MOE, "moe_intermediate_size": width})
    exported(model, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    assert type(read) is type(model)
    assert read.config.intermediate_size == model.config.intermediate_size
    found, expected = read.state_dict(), model.state_dict()
    assert all(torch.equal(found[key], rows) for key, rows in expected.items())
    ids = torch.arange(2, 42).unsqueeze(0)
    with torch.no_grad():
        # The epsilon and the base of RoPE are float32 in a file.
        assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-5)


def test_the_factor_of_the_logits_is_not_rounded(tmp_path: Path) -> None:
    model = t5().bfloat16()
    exported(model, tmp_path / "out")
    found = torch.tensor(tensors(tmp_path / "out")["dec.output_norm.weight"].data)
    assert torch.equal(found, model.decoder.final_layer_norm.weight.detach().float() * 32**-0.5)


def test_a_t5_whose_config_names_no_first_token(tmp_path: Path) -> None:
    model = t5(decoder_start_token_id=None)
    model.config.__dict__.pop("decoder_start_token_id")
    exported(model, tmp_path / "out")
    assert fields(tmp_path / "out")["t5.decoder_start_token_id"] == model.config.pad_token_id
