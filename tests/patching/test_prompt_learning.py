"""PEFT's prompt learning: virtual tokens, then the padding of a row, then its text.

What reaches the model:

========================================  ==========================================================================
prompt tuning, p-tuning, multitask        no position_ids, in forward and generate (PEFT drops them with a warning); the
prompt tuning                             mask of virtual tokens and text, with the padding as a hole in it
prefix tuning, forward                    no position_ids, the same mask, and a cache that PEFT has filled
prefix tuning, generate                   position_ids of the text moved by the number of virtual tokens; the same mask,
                                          unless no row is padded, and then none
========================================  ==========================================================================

So every position is known: counted over the mask, or given. Stock Llama counts slots in prompt tuning.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import UnsupportedError
from hf_posenc.patching.call.cache_notes import cache_argument
from tests.matrix.running import distance, patched, tokens
from tests.versions import torch_since

DISTANCE: list[Any] = ["alibi", "t5", "kerple", "sandwich"]
OTHERS: list[Any] = ["fire", "shaw", "cope", "sinusoidal", "rope", ["rope", "forget_gate"]]
#: Three methods change the input alike. The virtual keys of prefix tuning have no forget gates.
CASES = [(scheme, method) for scheme in (*DISTANCE, *OTHERS) for method in ("prompt", "prefix")][:-1]
CASES += [("t5", "p-tuning"), ("t5", "multitask")]
VIRTUAL, PADDED, LENGTH = 4, 5, 18
#: Two tiny layers in float32, whose sums have other lengths.
CLOSE = 1e-4


def tuned(method: str, scheme: Any, architecture: str = "llama_gqa", **settings: Any) -> Any:
    peft = pytest.importorskip("peft")

    shared = {"task_type": "CAUSAL_LM", "num_virtual_tokens": VIRTUAL}
    config = {
        "prompt": lambda: peft.PromptTuningConfig(**shared),
        "p-tuning": lambda: peft.PromptEncoderConfig(**shared, encoder_hidden_size=16),
        "prefix": lambda: peft.PrefixTuningConfig(**shared),
        "multitask": lambda: peft.MultitaskPromptTuningConfig(**shared, num_tasks=2, num_ranks=1),
    }[method]()
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
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :PADDED] = 0
    return tokens(2, LENGTH), mask


def tasks(method: str, rows: int) -> dict[str, Tensor]:
    return {"task_ids": torch.ones(rows, dtype=torch.long)} if method == "multitask" else {}


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Position ids are not supported")
        return function(*args, **kwargs)


@pytest.mark.parametrize(("scheme", "method"), CASES, ids=str)
@torch.no_grad()
def test_a_padded_row_is_the_row_alone(scheme: Any, method: str) -> None:
    model = tuned(method, scheme)
    ids, mask = batch()
    padded = model(input_ids=ids, attention_mask=mask, **tasks(method, 2)).logits[1, -LENGTH + PADDED :]
    text = ids[1:, PADDED:]
    alone = model(input_ids=text, attention_mask=torch.ones_like(text), **tasks(method, 1)).logits[0]
    assert distance(padded, alone[-LENGTH + PADDED :]) <= CLOSE
    # The virtual tokens are seen, and where they stand matters.
    assert distance(model.base_model(input_ids=text).logits[0], alone[-LENGTH + PADDED :]) > 1e-3


def uses_cache(model: Any, ids: torch.Tensor) -> bool | None:
    """Whether `generate` can use a cache; `None` if it cannot run without one either.

    A PEFT that knows another name for the cache is refused. Without a cache it recomputes virtual tokens, but not keys.
    """
    if cache_argument(model.get_base_model()) == "past_key_values":
        return True
    for given in (True, False) if model.active_peft_config.peft_type == "PREFIX_TUNING" else (True,):
        with pytest.raises(UnsupportedError, match="does not notice the cache of"):
            quietly(model.generate, input_ids=ids, max_new_tokens=1, use_cache=given)
    return None if model.active_peft_config.peft_type == "PREFIX_TUNING" else False


@pytest.mark.parametrize(("scheme", "method"), CASES, ids=str)
@torch.no_grad()
def test_generate_equals_no_cache_and_the_row_alone(scheme: Any, method: str) -> None:
    model = tuned(method, scheme)
    ids, mask = batch()
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    settings["use_cache"] = uses_cache(model, ids)
    if settings["use_cache"] is None:
        return
    found = quietly(model.generate, input_ids=ids, attention_mask=mask, **settings, **tasks(method, 2))
    text = ids[1:, PADDED:]
    alone = quietly(
        model.generate, input_ids=text, attention_mask=torch.ones_like(text), **settings, **tasks(method, 1)
    )
    assert torch.equal(found.sequences[1:, LENGTH:], alone.sequences[:, LENGTH - PADDED :])
    assert distance(torch.stack(found.logits)[:, 1:], torch.stack(alone.logits)) <= CLOSE
    # Without a cache: the whole sequence in one call.
    whole = found.sequences[:, :-1]
    mask = torch.cat((mask, torch.ones(2, 4, dtype=torch.long)), dim=1)
    logits = model(input_ids=whole, attention_mask=mask, **tasks(method, 2)).logits[:, -5:]
    assert distance(torch.stack(found.logits, dim=1), logits) <= CLOSE


@pytest.mark.parametrize("scheme", ["alibi", "t5", {"scheme": "alibi", "learnable": True}], ids=str)
@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_gradients_of_a_padded_row_are_those_of_the_row_alone(scheme: Any, method: str) -> None:
    """Of the virtual tokens and of the bias, both."""
    model = tuned(method, scheme)
    for parameter in model.get_base_model().position_encoding.parameters():
        parameter.requires_grad_()
    ids, mask = batch()
    found = []
    for one, shown in ((ids[1:], mask[1:]), (ids[1:, PADDED:], None)):
        model.zero_grad()
        logits = model(input_ids=one, attention_mask=torch.ones_like(one) if shown is None else shown).logits
        logits[:, -LENGTH + PADDED :].square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any("position_encoding" in name for name in found[0]) == (scheme != "alibi")
    assert any("prompt_encoder" in name for name in found[0])
    for name, gradient in found[0].items():
        assert float((gradient - found[1][name]).norm()) <= 1e-3 * float(found[1][name].norm()), name


@pytest.mark.parametrize("method", ["prompt", "prefix"])
@torch.no_grad()
def test_a_forward_is_one_graph(method: str) -> None:
    torch_since("2.13", "compiled code cannot import transformers' lazy modules")
    ids = tokens(2, LENGTH)
    torch.compiler.reset()
    model = tuned(method, "alibi", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert distance(compiled(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, expected) <= CLOSE


@torch.no_grad()
def test_beams_of_rows_with_gaps() -> None:
    model = tuned("prompt", "t5")
    ids, mask = batch()
    settings: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 3, "eos_token_id": None, "pad_token_id": 0}
    settings["use_cache"] = uses_cache(model, ids)
    found = quietly(model.generate, input_ids=ids, attention_mask=mask, **settings)
    text = ids[1:, PADDED:]
    alone = quietly(model.generate, input_ids=text, attention_mask=torch.ones_like(text), **settings)
    assert torch.equal(found[1:, LENGTH:], alone[:, LENGTH - PADDED :])


@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt2"])
@torch.no_grad()
def test_the_native_scheme_uses_keys_of_a_prefix_as_the_stock_model_does(architecture: str) -> None:
    found, stock = (tuned("prefix", scheme, architecture)(input_ids=batch()[0]).logits for scheme in ("native", None))
    assert distance(found, stock) <= 1e-6


@pytest.mark.parametrize(("scheme", "part", "width"), [("pope", "PopeMap", 16), ("forget_gate", "ForgetGateBias", 12)])
@torch.no_grad()
def test_a_prefix_cannot_say_what_a_scheme_adds_to_keys(scheme: str, part: str, width: int) -> None:
    reason = f"The cache holds keys of width 8, but with {part} this LlamaAttention caches keys of width"
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        tuned("prefix", scheme, num_key_value_heads=2)(input_ids=batch()[0])
    assert f"width {width}." in str(refusal.value)
    assert "Use LoRA or prompt tuning with this scheme" in str(refusal.value)
