"""A position adapter of a pretrained model: the base in half precision is the same one, and a fine-tuned one is not."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import CheckpointError, load_position_adapter, patch_model, save_position_adapter

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def saved(smollm2_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    save_position_adapter(
        patch_model(AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32), "t5"), folder
    )
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_smollm2_in_half_precision_is_the_same_base(saved, smollm2_folder, dtype):
    load_position_adapter(AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=dtype), saved)


def test_a_fine_tuned_sibling_of_smollm2_is_refused(saved, smollm2_folder):
    """One step of AdamW at a usual rate; the optimizer moves every weight by about that."""
    sibling = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(sibling.parameters(), lr=5e-5)
    ids = torch.arange(5, 45)[None]
    sibling(ids, labels=ids).loss.backward()
    optimizer.step()
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=r"trained on different weights.*tensors differ"):
            load_position_adapter(sibling.to(dtype), saved)
        assert not hasattr(sibling, "position_encoding")
