"""Logits of far pairs computed from other heads by two calls of a kernel, compared with the equal bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from hf_posenc import patch_model
from hf_posenc.attention import backends
from tests.kits.decoding import decoded
from tests.models import tiny

#: More than a block of rows.
LENGTH = 900
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("rerope", {"window": 100}),
    ("rerope", {"window": 800, "factor": 2.0}),
    ("self_extend", {"window": 40, "group": 4}),
    ("dual_chunk", {"chunk_size": 250, "local_size": 30}),
    ("attention_sinks", {"sinks": 4, "window": 100}),
    ("attention_sinks", {"sinks": 0, "window": 800}),
]


@pytest.fixture
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 2048}
    return tiny("LlamaForCausalLM", initializer_range=0.3, **sizes).eval()


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(1))


def both(model: PreTrainedModel, **inputs: Any) -> tuple[Tensor, Tensor, int]:
    """Logits without gradients, with them (by the bias), and how often the two calls were made."""
    with mock.patch.object(backends, "divided_attention", wraps=backends.divided_attention) as divided:
        with torch.no_grad():
            fast = model(**inputs, use_cache=False).logits
        calls = divided.call_count
        slow = model(**inputs, use_cache=False).logits.detach()
        assert divided.call_count == calls
    return fast, slow, calls


@pytest.mark.parametrize(("scheme", "options"), SCHEMES)
def test_two_calls_equal_the_bias(llama: PreTrainedModel, scheme: str, options: dict[str, Any]) -> None:
    """Also for an empty static cache."""
    patch_model(llama, scheme, inner="native", **options)
    fast, slow, calls = both(llama, input_ids=tokens())
    assert calls == 2
    assert (fast - slow).abs().max() < 2e-5 * slow.abs().max()  # float32
    cache = StaticCache(config=llama.config, max_cache_len=LENGTH + 100)
    counted = mock.patch.object(backends, "divided_attention", wraps=backends.divided_attention)
    with torch.no_grad(), counted as divided:
        found = llama(tokens(), cache=cache, use_cache=True).logits
    assert divided.call_count == 2
    assert torch.equal(found, fast)


def test_bfloat16(llama: PreTrainedModel) -> None:
    patch_model(llama.bfloat16(), "rerope", inner="native", window=100)
    fast, slow, calls = both(llama, input_ids=tokens())
    assert calls == 2
    # As far as the bias is from float32 itself: both round to bfloat16.
    exact = patch_model(llama.float(), "rerope", inner="native", window=100)(tokens()).logits
    assert (fast - exact).abs().mean() < 1.2 * (slow - exact).abs().mean()


def test_autocast(llama: PreTrainedModel) -> None:
    patch_model(llama, "rerope", inner="native", window=100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast, slow, calls = both(llama, input_ids=tokens())
    assert calls == 2
    assert (fast - slow).abs().max() < 0.1 * slow.abs().max()  # bfloat16


REROPE = {"scheme": "rerope", "inner": "native", "window": 100}
DOCUMENTS = torch.cat((torch.arange(140), torch.arange(160))).expand(2, -1)
PADDING = torch.ones(2, 300, dtype=torch.int64)
PADDING[1, :50] = 0
#: The scheme, what is done to the model, and the inputs.
OTHER_CALLS: dict[str, tuple[Any, Callable[[Any], Any], dict[str, Tensor]]] = {
    "float64": (REROPE, lambda model: model.double(), {}),
    "padded": (REROPE, lambda model: None, {"attention_mask": PADDING}),
    "packed": (REROPE, lambda model: None, {"position_ids": DOCUMENTS}),
    "eager": (REROPE, lambda model: model.set_attn_implementation("eager"), {}),
    "scaled": ([REROPE, {"scheme": "log_n_scale", "training_length": 100}], lambda model: None, {}),
    "biased": (REROPE | {"inner": "alibi"}, lambda model: None, {}),
}


@pytest.mark.parametrize("case", OTHER_CALLS)
def test_other_calls_keep_the_bias(llama: PreTrainedModel, case: str) -> None:
    scheme, change, inputs = OTHER_CALLS[case]
    change(llama)
    patch_model(llama, scheme)
    fast, slow, calls = both(llama, input_ids=tokens(300), **inputs)
    assert calls == 0
    assert (fast - slow).abs().max() < 2e-5 * slow.abs().max()


def test_decoding_in_pieces_equals_the_whole_text(llama: PreTrainedModel) -> None:
    patch_model(llama, "self_extend", inner="native", window=40, group=4)
    with torch.no_grad():
        whole = llama(tokens(), use_cache=False).logits
    pieces = decoded(llama, tokens(), None, [600, 299, 1])
    assert (pieces - whole).abs().max() < 2e-5 * whole.abs().max()
