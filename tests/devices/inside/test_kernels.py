"""Which kernel of scaled_dot_product_attention CUDA would take for what each scheme hands to it.

The strict device takes the paths of an accelerator, and the calls are judged by the conditions that torch's CUDA code
states (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posenc import PositionEncodingError
from hf_posenc.attention import block_attention
from hf_posenc.attention.backends import attention_with
from hf_posenc.attention.forms import FusedForm
from tests.attention.fused import masks_of_kernels
from tests.devices import kernels, spreading
from tests.devices.inside.subjects import SCHEMES, on_one_device
from tests.thinning import mostly_slow

pytestmark = on_one_device


@pytest.mark.parametrize("dtype", mostly_slow([torch.bfloat16, torch.float32], torch.bfloat16.__eq__), ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_scheme_needs_plain_operators_where_stock_does_not(scheme: str, dtype: torch.dtype) -> None:
    try:
        model, stock = kernels.model_of(scheme, dtype), kernels.model_of(None, dtype)
    except (PositionEncodingError, ValueError) as refused:
        pytest.skip(str(refused)[:100])
    for length in (32, 60, 160):
        if length > kernels.LONGEST.get(scheme, length):
            continue
        for padded in (False, True):
            both = (kernels.taken_by(one, length, padded) for one in (model, stock))
            for own, native in zip(*both, strict=True):
                assert "math" not in own - native


@pytest.mark.parametrize("case", ["additive mask", "mask in float32", "autocast"])
def test_layers_share_what_the_kernel_gets(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix in the dtype of the kernel, without -inf, which a query that sees no key might not survive."""
    given = masks_of_kernels(monkeypatch)
    form = FusedForm(torch.full((2, 11), -20.0), 6, 6)
    of_mask = torch.float32 if case == "mask in float32" else torch.float16
    mask = None if case == "autocast" else torch.full((1, 1, 6, 6), torch.finfo(of_mask).min, dtype=of_mask)
    heads = torch.ones(1, 2, 6, 8, dtype=torch.float32 if case == "autocast" else torch.float16)
    with torch.autocast(spreading.device, torch.float16, enabled=case == "autocast"):
        module = nn.Module()
        call = block_attention.AttentionCall("sdpa", sdpa_attention_forward, mask, (), {"is_causal": True})
        attend = attention_with(call, form, module, heads, heads)
        for _ in range(3):
            attend(module, heads, heads, heads)
    assert len({one.data_ptr() for one in given}) == 1
    assert given[0].dtype == torch.float16
    assert given[0].isfinite().all()
