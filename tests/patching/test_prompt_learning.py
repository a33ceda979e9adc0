"""PEFT's prompt learning: virtual tokens, then the padding of a row, then its text.

What reaches the model:

========================================  ==========================================================================
prompt tuning, p-tuning, multitask        no position_ids, in forward and generate (PEFT drops them with a warning); the
prompt tuning                             mask of virtual tokens and text, with the padding as a hole in it
prefix tuning, forward                    no position_ids, the same mask, and a cache that PEFT has filled
prefix tuning, generate                   position_ids of the text moved by the number of virtual tokens; the same mask,
                                          unless no row is padded, and then none
========================================  ==========================================================================

So every position is known: counted over the mask, or given. Stock Llama counts slots in prompt tuning. That a padded
row is the row alone, in a forward and in generate, is tested by the rows of PEFT in tests/integrations.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import UnsupportedError
from hf_posenc.patching.call.cache import cache_argument
from tests.kits.decoding import left_padding
from tests.matrix.running import distance, gradients, patched, tokens
from tests.thinning import in_turn
from tests.versions import torch_since

pytestmark = pytest.mark.usefixtures("without_gradients")
VIRTUAL, PADDED, LENGTH = 4, 5, 18
#: Two tiny layers in float32, whose sums have other lengths.
CLOSE = 1e-4


def tuned(method: str, scheme: Any, architecture: str = "llama_gqa", **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    kind = peft.PromptTuningConfig if method == "prompt" else peft.PrefixTuningConfig
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
    heads = {"num_key_value_heads": 4} if architecture == "llama_gqa" else {}
    model = patched(architecture, scheme, attn_implementation="sdpa", **(heads | settings))
    torch.manual_seed(3)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_(std=0.5)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Two rows, the second of them padded from the left."""
    return tokens(2, LENGTH), left_padding(LENGTH, PADDED)


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Position ids are not supported")
        return function(*args, **kwargs)


@pytest.mark.parametrize(
    ("scheme", "method"),
    in_turn(["alibi", "t5", {"scheme": "alibi", "learnable": True}], ["prompt", "prefix"]),
    ids=str,
)
@torch.enable_grad()
def test_gradients_of_a_padded_row_are_those_of_the_row_alone(scheme: Any, method: str) -> None:
    """Of the virtual tokens and of the bias, both."""
    model = tuned(method, scheme)
    for parameter in model.get_base_model().position_encoding.parameters():
        parameter.requires_grad_()
    ids, mask = batch()
    found = []
    for one, shown in ((ids[1:], mask[1:]), (ids[1:, PADDED:], None)):
        logits = model(input_ids=one, attention_mask=torch.ones_like(one) if shown is None else shown).logits
        found.append(gradients(model, logits[:, -LENGTH + PADDED :].square().mean()))
    assert found[0].keys() == found[1].keys()
    assert any("position_encoding" in name for name in found[0]) == (scheme != "alibi")
    assert any("prompt_encoder" in name for name in found[0])
    for name, gradient in found[0].items():
        assert float((gradient - found[1][name]).norm()) <= 1e-3 * float(found[1][name].norm()), name


@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_a_forward_is_one_graph(method: str) -> None:
    torch_since("2.13", "compiled code cannot import transformers' lazy modules")
    ids = tokens(2, LENGTH)
    torch.compiler.reset()
    model = tuned(method, "alibi", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert distance(compiled(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, expected) <= CLOSE


def test_beams_of_rows_with_gaps() -> None:
    model = tuned("prompt", "t5")
    ids, mask = batch()
    settings: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 3, "eos_token_id": None, "pad_token_id": 0}
    if cache_argument(model.get_base_model()) != "past_key_values":  # This PEFT knows another name.
        with pytest.raises(UnsupportedError, match="does not notice the cache of"):
            quietly(model.generate, input_ids=ids, **settings)
        settings["use_cache"] = False
    found = quietly(model.generate, input_ids=ids, attention_mask=mask, **settings)
    text = ids[1:, PADDED:]
    alone = quietly(model.generate, input_ids=text, attention_mask=torch.ones_like(text), **settings)
    assert torch.equal(found[1:, LENGTH:], alone[:, LENGTH - PADDED :])


@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt2"])
def test_the_native_scheme_uses_keys_of_a_prefix_as_the_stock_model_does(architecture: str) -> None:
    found, stock = (tuned("prefix", scheme, architecture)(input_ids=batch()[0]).logits for scheme in ("native", None))
    assert distance(found, stock) <= 1e-6


@pytest.mark.parametrize(("scheme", "part", "width"), [("pope", "PopeMap", 16), ("forget_gate", "ForgetGateBias", 12)])
def test_a_prefix_cannot_say_what_a_scheme_adds_to_keys(scheme: str, part: str, width: int) -> None:
    reason = f"The cache holds keys of width 8, but with {part} this LlamaAttention caches keys of width"
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        tuned("prefix", scheme, num_key_value_heads=2)(input_ids=batch()[0])
    assert f"width {width}." in str(refusal.value)
    assert "use LoRA or prompt tuning with this scheme" in str(refusal.value)
