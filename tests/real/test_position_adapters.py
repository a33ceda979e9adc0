"""Position adapters of pretrained models: their size, fresh processes, other dtypes, a quantised base, siblings."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, QuantoConfig

from hf_posenc import CheckpointError, load_position_adapter, patch_model, save_position_adapter
from tests.fresh import run_fresh

pytestmark = pytest.mark.assets

SCRIPT = """
import sys, torch, hf_posenc
from transformers import AutoModelForCausalLM
base, folder, out, dtype = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).eval()
hf_posenc.load_position_adapter(model, folder)
with torch.no_grad():
    logits = model(torch.arange(5, 45)[None]).logits.float()
torch.save({"logits": logits, "table": dict(model.position_encoding.named_parameters())}, out)
"""


def trained(model, seed=0):
    """Values a training might have left in the scheme's parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def saved(smollm2_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    trained(patch_model(model, "t5"))
    save_position_adapter(model, folder)
    return folder, model


def test_smollm2_comes_back_in_a_fresh_process_bit_for_bit(saved, smollm2_folder, tmp_path):
    folder, model = saved
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000
    done = run_fresh(SCRIPT, smollm2_folder, folder, tmp_path / "out", "float32")
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "out")
    for name, parameter in model.position_encoding.named_parameters():
        torch.testing.assert_close(found["table"][name], parameter, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], model(torch.arange(5, 45)[None]).logits, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_smollm2_in_half_precision_is_the_same_base(saved, smollm2_folder, dtype):
    load_position_adapter(AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=dtype), saved[0])


def test_smollm2_in_int8_is_the_same_base(saved, smollm2_folder):
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_folder, dtype=torch.float32, quantization_config=QuantoConfig(weights="int8")
    )
    load_position_adapter(model, saved[0])
    expected = dict(saved[1].position_encoding.named_parameters())
    for name, parameter in model.position_encoding.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)


def test_a_fine_tuned_sibling_of_smollm2_is_refused(saved, smollm2_folder):
    """One step of AdamW at a usual rate; the optimizer moves every weight by about that."""
    sibling = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(sibling.parameters(), lr=5e-5)
    ids = torch.arange(5, 45)[None]
    sibling(ids, labels=ids).loss.backward()
    optimizer.step()
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=r"trained on other weights.*tensors differ"):
            load_position_adapter(sibling.to(dtype), saved[0])
        assert not hasattr(sibling, "position_encoding")


def test_minilm_keeps_a_learned_table(minilm_folder, tmp_path):
    model = trained(patch_model(AutoModel.from_pretrained(minilm_folder).eval(), "learned", num_positions=600))
    save_position_adapter(model, tmp_path)
    found = load_position_adapter(AutoModel.from_pretrained(minilm_folder).eval(), tmp_path)
    inputs = AutoTokenizer.from_pretrained(minilm_folder)("The dog chased another dog.", return_tensors="pt")
    with torch.no_grad():
        expected, given = (one(**inputs).last_hidden_state for one in (model, found))
    torch.testing.assert_close(given, expected, rtol=0, atol=0)
