"""A bias of every form with queries of every dtype and every kind of mask, in the backends of transformers.

Schemes compute biases in float32, masks come in whatever dtype their caller had, and a kernel that accepts a mask of
another dtype than its queries does not always read it correctly.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_posenc.attention.forms import BiasForm, FusedForm, RowsForm

from .fused import attended
from .plain_attention import gradients, plain_attention, toeplitz

#: Below and from 16 queries on, where torch's fused kernel on the CPU begins; one, as in decoding.
LENGTHS = [1, 7, 20]
FORMS = ["distance", "separable", "rows"]
#: The rounding of the output, and in half precision of the probabilities the kernel multiplies values with.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MASKS = ["none", "boolean", "additive", "-inf", "-inf in float32"]
KEYS = 23


def form_of(kind: str, vector: Tensor, query_length: int) -> tuple[BiasForm, Tensor]:
    """A form, and the same bias as a matrix `(1, heads, query_len, key_len)`."""
    if kind == "separable":
        terms = vector[:, :KEYS].exp().cumsum(-1).unsqueeze(0)
        slots = torch.arange(query_length) + (KEYS - query_length)
        # In float64, as the fused form subtracts them.
        return FusedForm.of_keys(terms, slots), terms.double().unsqueeze(-2) - terms.double()[..., slots].unsqueeze(-1)
    form = FusedForm(vector, query_length, KEYS)
    dense = toeplitz(vector, query_length, KEYS)
    if kind == "rows":
        return RowsForm(form.rows, query_length, KEYS, 4), dense
    return form, dense


def mask_of(kind: str, query_length: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """A mask as a caller gives it, and the equivalent boolean one."""
    if kind == "none":
        return None, None
    queries = torch.arange(query_length).unsqueeze(-1) + (KEYS - query_length)
    visible = (torch.arange(KEYS) <= queries).expand(2, 1, -1, -1).clone()
    visible[1, ..., :2] = False
    if kind == "boolean":
        return visible, visible
    own = torch.float32 if kind == "-inf in float32" else dtype
    hidden = -torch.inf if kind.startswith("-inf") else torch.finfo(own).min
    return torch.zeros(visible.shape, dtype=own).masked_fill(~visible, hidden), visible


def given(query_length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(query_length)
    query = torch.randn(2, 4, query_length, 8, generator=generator)
    key, value = (torch.randn(2, 2, KEYS, 8, generator=generator) for _ in range(2))
    vector = torch.randn(4, query_length + KEYS - 1, generator=generator)
    return *(tensor.to(dtype).requires_grad_() for tensor in (query, key, value)), vector.requires_grad_()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_values_and_gradients(kind: str, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        for mask_kind in MASKS:
            tensors = given(length, dtype)
            query, key, value, vector = tensors
            form, dense = form_of(kind, vector, length)
            mask, visible = mask_of(mask_kind, length, dtype)
            found = attended(form, query, key, value, mask, scaling=0.3, is_causal=False)
            wanted = plain_attention(query, key, value, dense, visible, 0.3, False)
            case = f"{length} queries, mask {mask_kind}"
            assert found.dtype == dtype
            torch.testing.assert_close(
                found.double(),
                wanted,
                atol=CLOSE[dtype],
                rtol=CLOSE[dtype],
                msg=lambda text, case=case: f"{case}: {text}",
            )
            for one, other in zip(gradients(found, tensors), gradients(wanted, tensors), strict=True):
                # Parameters are float32 in any case.
                close = max(CLOSE[dtype], 1e-5) if one.dtype == torch.float32 else CLOSE[dtype]
                scale = float(other.abs().max().clamp(min=1))
                assert float((one - other).abs().max()) <= 2 * close * scale, case


@pytest.mark.parametrize("kind", FORMS)
def test_autocast_leaves_float64_alone_and_keys_of_another_dtype_are_refused(kind: str) -> None:
    """Torch refuses them, as without a bias: a cache of another dtype than the model is a mistake."""
    query, key, value, vector = (tensor.detach() for tensor in given(20, torch.float64))
    form, _ = form_of(kind, vector, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attended(form, query, key, value, is_causal=False)
    assert torch.equal(found, attended(form, query, key, value, is_causal=False))
    for narrow in (torch.float32, torch.bfloat16):
        with pytest.raises(RuntimeError, match="dtype"):
            attended(form, query, key.to(narrow), value.to(narrow), is_causal=False)
