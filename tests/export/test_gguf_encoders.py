"""Encoders and encoder-decoders in GGUF, run by llama.cpp: the same numbers, or a refusal with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import AlibiConfig, LinearScaling, NoneConfig, RopeConfig, ScheduleConfig, T5Config, UnsupportedError
from hf_posenc.errors import UsageError
from hf_posenc.export.export_model import export_model
from hf_posenc.export.gguf import write
from hf_posenc.export.gguf.carriers import CARRIERS
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.gelu import has_gelu, table_gelu
from hf_posenc.export.gguf.t5 import llama_cpp_bucket
from hf_posenc.schemes.bias.t5 import relative_position_bucket
from tests.export.gguf_cases import (
    byte_tokenizer,
    tiny_encoder,
    tiny_llama,
    unigram_tokenizer,
    with_strong_weights,
    word_piece_tokenizer,
)
from tests.versions import since

pytest.importorskip("xllamacpp")

#: Without GELU, llama.cpp gives the outputs of these models to about 1e-5 of the largest.
TOLERANCE = 5e-5
#: llama.cpp's GELU is a table of float16. The same table in the model leaves the cases in which rounding leads to
#: another entry.
SAME_GELU = 1e-3


def exported(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    kind = unigram_tokenizer if hasattr(model.config, "d_kv") else word_piece_tokenizer
    return export_model(model, folder, to="gguf", **({"tokenizer": kind()} | options))


def t5(scheme: Any = None, name: str = "T5ForConditionalGeneration", **options: Any) -> PreTrainedModel:
    return patched(tiny_encoder(name, **options), scheme)


def bert(scheme: Any = None, **options: Any) -> PreTrainedModel:
    return patched(tiny_encoder("BertModel", **options), scheme)


def patched(model: PreTrainedModel, scheme: Any) -> PreTrainedModel:
    if scheme is None:
        return model
    hf_posenc.patch_model(model, scheme)
    return with_strong_weights(model)


def worst(report: Any, same_gelu: bool) -> float:
    return max(check.difference for check in report.checks if check.quantity.endswith("GELU") == same_gelu)


def fields(folder: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(folder / "model.gguf")
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors(folder: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}


GATED = {"feed_forward_proj": "gated-gelu"}
T5_CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (None, "T5ForConditionalGeneration", {"tie_word_embeddings": False, "num_decoder_layers": 1, **GATED}),
    (None, "T5EncoderModel", {}),
    (None, "UMT5ForConditionalGeneration", {"feed_forward_proj": "relu"}),
    ("t5", "T5ForConditionalGeneration", {}),
    (T5Config(max_distance=64), "T5EncoderModel", {}),
    (ScheduleConfig((T5Config(num_buckets=16), NoneConfig())), "T5ForConditionalGeneration", {}),
]
#: Like one of these.
MORE_T5_CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (None, "T5ForConditionalGeneration", {}),
    (None, "T5EncoderModel", GATED),
    ("none", "T5ForConditionalGeneration", {}),
]


def with_slow(cases: list[tuple[Any, ...]], more: list[tuple[Any, ...]]) -> list[Any]:
    return [*cases, *(pytest.param(*row, marks=pytest.mark.slow) for row in more)]


@pytest.mark.parametrize(("scheme", "name", "options"), with_slow(T5_CASES, MORE_T5_CASES), ids=str)
def test_t5_gives_the_same_numbers(scheme: Any, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    if name == "UMT5ForConditionalGeneration":
        since("5.18", "its decoder loses its mask, and is refused")
    model = t5(scheme, name, **options)
    report = exported(model, tmp_path / "out")
    decoder = name != "T5EncoderModel"
    assert ("'t5'" if decoder else "'t5encoder'") in report.carrier
    assert {check.mode for check in report.checks} == ({"prefill", "decode"} if decoder else {"prefill"})
    assert worst(report, same_gelu=has_gelu(model)) < (SAME_GELU if has_gelu(model) else TOLERANCE)
    assert fields(tmp_path / "out").get("t5.decoder_start_token_id", 0) == 0


def test_t5_keeps_its_tables_in_float32(tmp_path: Path) -> None:
    report = exported(t5(num_heads=32, d_kv=4), tmp_path / "out", dtype="q8_0")
    stored = {name: tensor.tensor_type.name for name, tensor in tensors(tmp_path / "out").items()}
    assert stored["enc.blk.0.attn_rel_b.weight"] == stored["dec.blk.0.attn_rel_b.weight"] == "F32"
    assert stored["enc.blk.0.attn_q.weight"] == "Q8_0"
    assert "output.weight" not in stored
    assert report.checks[-1].runtime.endswith("q8_0")


BERT_CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (None, "'bert'", {}),
    ("sinusoidal", "'bert'", {}),
    ("alibi", "'jina-bert-v2'", {}),
    ("rope", "'jina-bert-v3'", {}),
    (RopeConfig(theta=500.0, rotary_dim=4, scaling=LinearScaling(4.0)), "'jina-bert-v3'", {}),
]
#: Like one of these.
MORE_BERT_CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (None, "'bert'", {"hidden_act": "gelu_new"}),
    ("integer", "'bert'", {}),
    ("binary", "'bert'", {}),
    ("none", "'bert'", {}),
]


@pytest.mark.parametrize(("scheme", "carrier", "options"), with_slow(BERT_CASES, MORE_BERT_CASES), ids=str)
def test_bert_gives_the_same_numbers(scheme: Any, carrier: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = exported(bert(scheme, **options), tmp_path / "out", pooling="mean")
    assert carrier in report.carrier
    assert worst(report, same_gelu=True) < SAME_GELU
    assert {check.quantity for check in report.checks} == {"hidden states", "hidden states with llama.cpp's GELU"}
    assert fields(tmp_path / "out")[f"{carrier.strip(chr(39))}.pooling_type"] == 1


@pytest.mark.parametrize("name", ["BertModel", "T5EncoderModel"])
def test_the_server_returns_the_mean_of_the_hidden_states(name: str, tmp_path: Path) -> None:
    import xllamacpp

    model = tiny_encoder(name)
    tokenizer = word_piece_tokenizer() if name == "BertModel" else unigram_tokenizer()
    exported(model, tmp_path / "out", pooling="mean")
    options = xllamacpp.CommonParams()
    options.model.path, options.embedding, options.verbosity = str(tmp_path / "out" / "model.gguf"), True, 1
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.warmup = options.fit_params = False
    text = "the dog do a b"
    answer = xllamacpp.Server(options).handle_embeddings({"input": [text]})
    found = torch.tensor(answer["data"][0]["embedding"])
    with torch.no_grad():
        mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    # The server rounds attention to float16. Later tokens that are masked change more.
    assert torch.allclose(found, mean / mean.norm(), atol=5e-3)


Fault = Callable[[GgufForm], GgufForm]


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda form: replace(form, tensors={**form.tensors, name: change(form.tensors[name].clone())})


def one_row_wrong(rows: torch.Tensor) -> torch.Tensor:
    rows[200] = rows[100]
    return rows


def lost(name: str) -> Fault:
    return with_tensor(name, torch.zeros_like)


def metadata(**wrong: Any) -> Fault:
    found = {key.replace("__", "."): value for key, value in wrong.items()}
    return lambda form: replace(form, metadata={**form.metadata, **found})


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (lambda: bert(), with_tensor("position_embd.weight", lambda rows: rows.roll(1, 0))),
        (lambda: bert(), with_tensor("position_embd.weight", one_row_wrong)),
        (lambda: bert("alibi"), lambda form: replace(form, architecture="jina-bert-v3")),
        (lambda: bert("rope"), metadata(rope__freq_base=10200.0)),
        (lambda: t5(name="T5EncoderModel"), metadata(attention__causal=True)),
        (lambda: t5(), lost("dec.blk.0.attn_rel_b.weight")),
        (lambda: t5(), with_tensor("enc.blk.0.attn_rel_b.weight", lambda rows: rows.roll(1, 0))),
        (lambda: t5(tie_word_embeddings=False, **GATED), metadata(attention__relative_buckets_count=30)),
        (lambda: t5(), with_tensor("dec.output_norm.weight", lambda norm: norm * 32**0.5)),
    ],
    ids=[
        "shifted",
        "one-row",
        "lost-alibi",
        "theta",
        "later-tokens-masked",
        "lost-bias",
        "other-buckets",
        "count",
        "factor",
    ],
)
def test_wrong_positions_are_found(
    model: Callable[[], PreTrainedModel], fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(path: Path, form: GgufForm, *rest: Any) -> None:
        real(path, fault(form), *rest)

    real = write.write_file
    monkeypatch.setattr(write, "write_file", faulty)
    refusal = r"(?s)llama.cpp (gives other numbers|cannot run the file).*What can be done:"
    with pytest.raises(UnsupportedError, match=refusal):
        exported(model(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: t5("alibi"), "has 32 buckets of distances.*AlibiBias has several values in the bucket of distance"),
        (lambda: t5(T5Config(max_distance=300)), "T5Bias has several values in the bucket of distance"),
        (lambda: t5("sinusoidal"), r"adds vectors to the embeddings \(Sinusoidal"),
        (lambda: t5("rope"), "changes queries and keys"),
        (lambda: t5(num_decoder_layers=3), "3 layers in the decoder and 2 in the encoder"),
        (lambda: t5(feed_forward_proj="gated-silu"), "activation 'silu' with a gate"),
        (lambda: t5(name="T5Model"), "has no output layer.*AutoModelForSeq2SeqLM"),
        (lambda: tiny_encoder("BertForMaskedLM"), "no place for the head of BertForMaskedLM.*AutoModel"),
        (lambda: bert("t5"), r"jina-bert-v2: llama\.cpp has no bias but ALiBi"),
        (lambda: bert(AlibiConfig(variant="asymmetric")), "asymmetric ALiBi"),
        (lambda: bert(["native", "rope"]), "adds vectors to the embeddings"),
        (lambda: bert(ScheduleConfig((RopeConfig(), RopeConfig(theta=100.0)))), "layers have different frequencies"),
        (lambda: bert("learned_rope"), "not those of RoPE, and these blocks have no table of frequencies"),
        (lambda: bert(hidden_act="relu"), "activation 'relu'; llama.cpp's BERT has 'gelu'"),
    ],
)
def test_what_llama_cpp_lacks(model: Callable[[], PreTrainedModel], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"(?s){reason}.*What can be done:"):
        exported(model(), tmp_path / "out")


def test_options_of_pooling(tmp_path: Path) -> None:
    exported(bert(), tmp_path / "open")
    assert "--pooling mean" in (tmp_path / "open" / "README.md").read_text()
    assert "LLAMA_POOLING_TYPE_MEAN" in (tmp_path / "open" / "README.md").read_text()
    with pytest.raises(hf_posenc.UnknownNameError, match="mean"):
        exported(bert(), tmp_path / "out", pooling="average")
    with pytest.raises(UsageError, match=r"pooling='mean' .* is for encoders"):
        export_model(tiny_llama(), tmp_path / "out", to="gguf", tokenizer=byte_tokenizer(), pooling="mean")


@pytest.mark.parametrize("count", [16, 32, 64])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_llama_cpp_has_the_buckets_of_t5(count: int, bidirectional: bool) -> None:
    distance = torch.arange(-5000, 5001)
    expected = relative_position_bucket(distance, count, 128, bidirectional)
    assert torch.equal(llama_cpp_bucket(distance, count, bidirectional), expected)


def test_the_table_of_gelu() -> None:
    found = table_gelu(torch.tensor([-11.0, -1.0, 0.0, 1.0003, 12.3456]))
    exact = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))
    assert found[0] == found[2] == 0.0
    assert found[4] == 12.3456
    assert found[3] == torch.tensor(exact).half()


def test_an_architecture_that_a_row_names_has_no_other_rows() -> None:
    assert [row.name for row in CARRIERS if row.blocks.fits(t5())] == ["t5"]
    assert {row.name for row in CARRIERS if row.blocks.fits(bert())} == {"bert", "jina-bert-v2", "jina-bert-v3"}


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


def test_no_target_is_advised_that_takes_no_encoder_with_a_decoder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="What can be done:") as refused:
        exported(t5("alibi"), tmp_path / "out")
    assert "export it to" not in str(refused.value)
