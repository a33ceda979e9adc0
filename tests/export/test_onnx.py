"""Patched models in onnxruntime: the same numbers at every length, or a refusal."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
import torch

from hf_posenc import DynamicScaling, DynamicYarnScaling, RopeConfig, UnknownNameError, UnsupportedError
from hf_posenc.errors import UsageError
from hf_posenc.export import onnx_graph
from hf_posenc.export.carriers import Form
from hf_posenc.export.comparison import excess
from hf_posenc.export.export_model import export_model
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.onnx import TOLERANCE, OnnxExport, Session, quantize
from tests.versions import EXPORTER, since

from .models import visible

#: Two layers differ less than the check allows. `integer` comes closest, because it adds numbers as large as positions.
CLOSE = 2e-5

LLAMA, BERT = "LlamaForCausalLM", "BertModel"


def to_onnx(model: Any, folder: Path, **options: Any) -> Any:
    """The export, where transformers can be used for it."""
    since(*EXPORTER)
    return export_model(model, folder, to="onnx", **options)


FORM = Form(carrier="its own ONNX graph")


def export_of(model: Any, folder: Path) -> OnnxExport:
    """An export that is not finished."""
    return OnnxExport().of(ModelParts(model), folder, None)


@pytest.fixture(scope="module")
def alibi(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama with ALiBi, and its export."""
    model, folder = visible(LLAMA, "alibi"), tmp_path_factory.mktemp("onnx") / "alibi"
    return model, folder, to_onnx(model, folder, quantize=True)


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "name"), [("forget_gate", LLAMA), ("selective_rope", LLAMA), ("string", BERT)])
def test_a_graph_has_standard_operators_only(scheme: str, name: str, tmp_path: Path) -> None:
    """`test_runtimes` exports every scheme."""
    report = to_onnx(visible(name, scheme), tmp_path / "out")
    assert all(check.difference <= CLOSE for check in report.checks)
    operators = {node.domain for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    assert operators <= {"", "ai.onnx"}


def test_a_folder_has_what_other_programs_read(alibi: Any) -> None:
    """The names and open axes are those of optimum."""
    _, folder, report = alibi
    assert [check.allowed for check in report.checks] == [TOLERANCE, TOLERANCE, None, None]
    assert all(TOLERANCE < check.difference < 1 for check in report.checks[2:])
    session = Session(folder / "model.onnx")
    places = [f"{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    assert session.inputs == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        **{f"past_key_values.{place}": ["batch_size", 2, "past_sequence_length", 8] for place in places},
    }
    assert session.outputs == ["logits", *(f"present.{place}" for place in places)]
    assert "position_encoding" not in json.loads((folder / "config.json").read_text())
    assert {"model.onnx", "model_quantized.onnx", "config.json", "generation_config.json", "README.md"} <= set(
        report.files
    )


@pytest.mark.long
def test_outliers_in_a_matrix_do_not_round_its_other_int8_weights(tmp_path: Path) -> None:
    """Trained matrices have outliers. With one scale for a whole matrix, MiniLM with ALiBi was lost in int8.

    Here the weights of one neuron are large, and its bias switches it off, so that only rounding can be changed by it.
    """
    model = visible(BERT, "alibi")
    with torch.no_grad():
        for layer in model.encoder.layer:
            linear = layer.intermediate.dense
            linear.weight[0] = 100 * linear.weight.abs().max()
            linear.bias[0] = -1e5
    report = to_onnx(model, tmp_path / "out", quantize=True)
    rounded = [check for check in report.checks if check.runtime.endswith("int8")]
    # Measured: 0.044, and 1.7 with one scale for a matrix.
    assert 0 < max(check.difference for check in rounded) < 0.1


def test_the_check_finds_a_lost_bias(alibi: Any) -> None:
    _, folder, _ = alibi
    for other in ("none", "kerple"):
        with torch.no_grad():
            found = excess("", export_of(visible(LLAMA, other), folder).checks(FORM))
        assert "The logits differ" in found


@pytest.mark.long
def test_an_encoder_beyond_its_native_length(tmp_path: Path) -> None:
    model = visible(BERT, "alibi")
    to_onnx(model, tmp_path / "alibi")
    ids = torch.randint(3, 40, (1, 150), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    found = Session(tmp_path / "alibi" / "model.onnx")(inputs, [])["last_hidden_state"]
    with torch.no_grad():
        torch.testing.assert_close(found, model(**inputs).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_the_check_finds_a_fixed_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    since(*EXPORTER)
    monkeypatch.setattr(onnx_graph, "_open", lambda value: None)
    model = visible(BERT, "alibi")
    export = export_of(model, tmp_path)
    export.write(FORM)
    with pytest.raises(UnsupportedError, match="cannot run the graph on"), torch.no_grad():
        list(export.checks(FORM))


def test_padding_between_real_tokens_counts_as_in_torch(alibi: Any) -> None:
    model, folder, _ = alibi
    ids = torch.randint(3, 40, (1, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 4:7] = 0
    past = [(torch.zeros(1, 2, 0, 8),) * 2] * 2
    found = Session(folder / "model.onnx")({"input_ids": ids, "attention_mask": mask}, past)["logits"]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scheme",
    [
        "normalized_integer",
        RopeConfig(scaling=DynamicScaling(factor=4.0, original_max_positions=64)),
        RopeConfig(scaling=DynamicYarnScaling(64)),
    ],
    ids=str,
)
def test_what_changes_cached_keys_is_refused(scheme: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not check the length of its cache"):
        to_onnx(visible(LLAMA, scheme), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "alibi", "t5"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2LMHeadModel", {}),
        ("OPTForCausalLM", {}),
        ("BloomForCausalLM", {}),
        ("GPTNeoXForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 8}),
        ("MistralForCausalLM", {"sliding_window": 12}),
        ("RobertaForMaskedLM", {"max_position_embeddings": 66}),
        ("BertForSequenceClassification", {}),
        ("ModernBertModel", {"pad_token_id": 0, "local_attention": 8}),
        ("LlamaModel", {}),
    ],
)
def test_other_architectures_stock_and_patched(name: str, options: Any, scheme: str | None, tmp_path: Path) -> None:
    report = to_onnx(visible(name, scheme, **options), tmp_path / "out")
    assert report.checks
    assert all(check.difference <= CLOSE for check in report.checks)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"has an encoder and a decoder, .*T5EncoderModel"):
        to_onnx(visible("T5ForConditionalGeneration"), tmp_path / "t5")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"onnx, onnxruntime, onnxscript. Run: pip install 'hf-posenc\[onnx\] @ git"):
        export_model(visible(BERT), tmp_path / "out", to="onnx")


def test_an_exporter_that_returns_other_programs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.exporters", ModuleType("exporters of an older transformers"))
    with pytest.raises(UsageError, match=r"newer exporters than those of .*pip install 'transformers>=5\.23'"):
        export_model(visible(BERT), tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantize": "no"}, UsageError, "True or False"),
        ({"opset_version": "20"}, UsageError, "a number"),
        ({"opset": 17}, UnknownNameError, "opset_version"),
        ({"opset_version": 5}, UnsupportedError, "opset_version=5; the exporter wrote version 18"),
    ],
)
def test_options_are_checked(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since(*EXPORTER)
    # It returns the graph that it could not convert.
    unconverted = SimpleNamespace(program=SimpleNamespace(opset_imports={"": 18}))
    monkeypatch.setattr("transformers.exporters.OnnxExporter.export", lambda *_, **__: unconverted)
    with pytest.raises(error, match=message):
        to_onnx(visible(BERT), tmp_path / "out", **options)


def test_the_quantizer_leaves_logging_as_it_is(
    caplog: pytest.LogCaptureFixture, alibi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder, _ = alibi
    shutil.copy(folder / "model.onnx", tmp_path)
    caplog.set_level(logging.INFO)
    quantize(tmp_path / "model.onnx")
    assert not [record for record in caplog.records if record.name.startswith("onnxruntime.quantization")]
    # Its import calls `logging.basicConfig`.
    monkeypatch.delitem(sys.modules, "onnxruntime.quantization.matmul_nbits_quantizer")
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    root.setLevel(logging.WARNING)
    quantize(tmp_path / "model.onnx")
    assert (root.level, root.handlers) == (logging.WARNING, [])
