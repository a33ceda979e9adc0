"""Which kernel of scaled_dot_product_attention CUDA would take for what each scheme hands to it.

The strict device takes the paths of an accelerator, and the calls are judged by the conditions that torch's CUDA code
states (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
"""

from __future__ import annotations

import pytest
import torch

from hf_posenc import PositionEncodingError
from tests.devices import kernels, spreading
from tests.devices.inside.subjects import SCHEMES
from tests.thinning import mostly_slow


@pytest.fixture(autouse=True)
def _on_one_device() -> None:
    if spreading.placement != "one":
        pytest.skip("looks at one device")


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
