"""`generate` of a patched model: what is refused before it runs, and what it leaves behind when it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_posenc import UnsupportedError, patch_model, unpatch_model
from hf_posenc.schemes import AlibiConfig, RopeConfig, ScheduleConfig, SelfExtendConfig

from ..kits.decoding import left_padding
from ..matrix.running import patched, tokens

ROPE_THEN_ALIBI = ScheduleConfig(layers=(RopeConfig(), AlibiConfig()))


GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def continued(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    sequences: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **(GREEDY | arguments))
    return sequences


@pytest.mark.parametrize("scheme", ["pope", "forget_gate", ROPE_THEN_ALIBI])
def test_an_early_exit_drafts_and_the_whole_model_decides(scheme: Any) -> None:
    """A layer behind the exit has cached fewer tokens than those before it in the middle of a step."""
    model, ids = patched("llama_gqa", scheme), tokens(1, 9)
    assert torch.equal(continued(model, ids, assistant_early_exit=1), continued(model, ids))


@pytest.mark.parametrize("error", [UnsupportedError("no"), KeyboardInterrupt()])
def test_an_early_exit_that_fails_leaves_the_model_as_deep_as_it_was(error: BaseException) -> None:
    model, ids = patched("llama_gqa", SelfExtendConfig(window=4, group=2)), tokens(1, 9)
    expected = continued(model, ids)
    calls = []

    def fail_in_the_second_draft(*_: Any) -> None:
        calls.append(model.config.num_hidden_layers)
        if calls.count(1) == 2:
            raise error

    with model.model.layers[0].register_forward_pre_hook(fail_in_the_second_draft), pytest.raises(type(error)):
        continued(model, ids, assistant_early_exit=1)
    assert calls[-1] == 1
    assert model.config.num_hidden_layers == 2
    assert torch.equal(continued(model, ids), expected)


def test_a_generate_that_somebody_set_is_called_and_stays() -> None:
    model, ids = patched("llama_gqa", None), tokens(1, 5)
    seen = []

    def noted(inner: Any, word: str) -> Any:
        def generate(*args: Any, **kwargs: Any) -> Any:
            seen.append(word)
            return inner(*args, **kwargs)

        return generate

    model.generate = noted(model.generate, "before")
    patch_model(model, "alibi")
    continued(model, ids)
    model.generate = behind = noted(model.generate, "behind")
    expected = continued(model, ids)
    assert torch.equal(continued(patch_model(model, AlibiConfig()), ids), expected)
    assert seen == ["before", *["behind", "before"] * 2]
    unpatch_model(model)
    assert model.generate is behind


# Assisted decoding


def assistant(scheme: Any) -> Any:
    """Agrees with the model it assists now and then."""
    model = patched("llama_gqa", scheme)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("scheme", [SelfExtendConfig(window=4, group=2), "forget_gate", "alibi"], ids=str)
def test_a_generated_token_with_the_id_of_the_padding_is_a_token_for_an_assistant(scheme: Any) -> None:
    model, helper, ids = patched("llama_gqa", "rope"), assistant(scheme), tokens(1, 8, 2)
    expected = continued(model, ids, max_new_tokens=16, use_cache=False)
    assert (expected == GREEDY["pad_token_id"]).any()
    seen = []
    helper.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    assert torch.equal(continued(model, ids, max_new_tokens=16, assistant_model=helper), expected)
    assert seen
    assert all(mask is None or mask.all() for mask in seen)  # nothing is taken for padding
    other_way = continued(helper, ids, max_new_tokens=16, use_cache=False)
    assert torch.equal(continued(helper, ids, max_new_tokens=16, assistant_model=model), other_way)


@pytest.mark.parametrize(
    "name", ["prompt_lookup_num_tokens", "assistant_early_exit", "prefill_chunk_size", "assistant_model"]
)
def test_a_scheme_that_no_cache_serves_refuses_what_needs_one(name: str) -> None:
    """However it is asked for, and before the model is run."""
    model, ids, ran = patched("llama_gqa", "normalized_integer"), tokens(1, 8), []
    ways: list[dict[str, Any]] = [{name: patched("llama_gqa", None) if name == "assistant_model" else 1}]
    plain = model.generation_config
    if name != "assistant_model":
        model.generation_config = GenerationConfig(**ways[0])
        ways += [{"generation_config": model.generation_config}, {}]
    with model.model.register_forward_pre_hook(lambda *_: ran.append(1)):
        for asked in ways:
            with pytest.raises(UnsupportedError, match=f"{name} needs a growing cache, which cannot run"):
                continued(model, ids, **asked)
    assert not ran
    model.generation_config = plain
    assert continued(model, ids).shape == (1, 16)
    with pytest.raises(UnsupportedError, match="Generate with use_cache=False"):
        continued(model, ids, use_cache=True)
    with pytest.raises(UnsupportedError, match=r"This assistant model cannot draft.*the scheme 'normalized_integer'"):
        continued(patched("llama_gqa", None), ids, assistant_model=model)


@pytest.mark.parametrize("scheme", ["alibi", "rerope"])
def test_a_chunk_of_a_padded_prompt_may_hold_only_padding(scheme: str) -> None:
    model, ids = patched("llama_gqa", scheme), tokens(2, 24)
    options = {"attention_mask": left_padding(24, 12), "pad_token_id": 0, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, **options, prefill_chunk_size=8), model.generate(ids, **options))
