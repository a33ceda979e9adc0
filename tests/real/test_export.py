"""Pretrained models, patched and exported."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel

import hf_posenc
from hf_posenc import InterleavedConfig, PRopeConfig, RopeConfig, YarnScaling
from tests.versions import EXPORTER, since

pytestmark = pytest.mark.assets

THETA = 100_000.0
SMOLLM2 = {
    "yarn": (RopeConfig(theta=THETA, scaling=YarnScaling(4.0, 8192)), "LlamaForCausalLM"),
    "none": ("none", "LlamaForCausalLM"),
    "p_rope": (PRopeConfig(theta=THETA, fraction=0.75), "LlamaForCausalLM"),
    "hope": ("hope", "LlamaForCausalLM"),
    "interleaved": (InterleavedConfig(inner=RopeConfig(theta=THETA)), "SmolLM3ForCausalLM"),
}
MINILM = {"rope": "RoFormerModel", "t5": "MPNetModel", "sinusoidal": "BertModel", "none": "BertModel"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOLLM2)
def test_smollm2_runs_in_plain_transformers(name: str, smollm2_folder: str, tmp_path) -> None:
    scheme, carrier = SMOLLM2[name]
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    report = hf_posenc.export_model(hf_posenc.patch_model(model, scheme), tmp_path / "stock")
    assert carrier in report.carrier
    assert report.checks[0].difference == 0.0


@pytest.mark.parametrize("name", MINILM)
def test_minilm_runs_in_plain_transformers(name: str, minilm_folder: str, tmp_path) -> None:
    model = BertModel.from_pretrained(minilm_folder, dtype=torch.float32, add_pooling_layer=False)
    hf_posenc.patch_model(model, name)
    with torch.no_grad():
        for weight in model.position_encoding.parameters():
            weight.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    # MPNet has no token types, and MiniLM has two.
    report = hf_posenc.export_model(model, tmp_path / "stock", approximate=name == "t5")
    assert MINILM[name] in report.carrier
    assert report.checks[0].difference <= 1e-5


@pytest.mark.parametrize("name", ["alibi", "forget_gate"])
def test_smollm2_runs_with_its_own_code(name: str, smollm2_folder: str, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    report = hf_posenc.export_model(hf_posenc.patch_model(model, name), tmp_path / "code", to="remote_code")
    differences = {check.mode: check.difference for check in report.checks}
    assert differences["prefill"] <= 1e-5
    # Decoding sums in another order than a whole forward.
    assert differences["decode"] <= 5e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "name", "close"),
    [("minilm", "alibi", 1e-5), ("minilm", "rope", 1e-5), ("smollm2", "none", 5e-5), ("smollm2", "alibi", 5e-5)],
)
def test_onnxruntime(base: str, name: str, close: float, request: pytest.FixtureRequest, tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    since(*EXPORTER)
    model_class = BertModel if base == "minilm" else AutoModelForCausalLM
    model = model_class.from_pretrained(request.getfixturevalue(f"{base}_folder"), dtype=torch.float32)
    report = hf_posenc.export_model(hf_posenc.patch_model(model, name), tmp_path / "onnx", to="onnx")
    assert {check.mode for check in report.checks} == {"embedding" if base == "minilm" else "decode", "prefill"}
    assert max(check.difference for check in report.checks) <= close


@pytest.mark.parametrize(
    ("name", "carrier"),
    [
        ("alibi", "'jina-bert-v2'"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((None, "'bert'"), ("rope", "'jina-bert-v3'"))),
    ],
)
@pytest.mark.filterwarnings("ignore:llama.cpp tokenizes some texts differently:UserWarning")
def test_embeddings_of_minilm_in_llama_cpp(name: str | None, carrier: str, minilm_folder: str, tmp_path) -> None:
    pytest.importorskip("xllamacpp")
    model = BertModel.from_pretrained(minilm_folder, dtype=torch.float32)
    if name is not None:
        hf_posenc.patch_model(model, name)
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    report = hf_posenc.export_model(model, tmp_path / "gguf", to="gguf", tokenizer=tokenizer, pooling="mean")
    assert carrier in report.carrier
    differences = {check.quantity: check.difference for check in report.checks}
    # Stock MiniLM differs by 2e-3 because of GELU. With the same GELU, wrong positions would change more than 1e-2.
    assert differences["hidden states"] < 1e-2
    assert differences["hidden states with llama.cpp's GELU"] < 1e-3
