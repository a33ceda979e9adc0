"""Patched models among the tools around them: generate, compile, flex attention, accelerate hooks, PEFT."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch

from hf_posenc import UnsupportedError, patch_model, unpatch_model
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, outputs, patched, tokens
from tests.models import tiny_config
from tests.thinning import mostly_slow

#: One for each mechanism: nothing, two distance biases, a rotation, an additive scheme; a bias with features in the
#: cache, one that reads queries, a map that widens heads, a correction of far pairs, and a scale.
SCHEMES: list[Any] = [
    "none",
    "alibi",
    "t5",
    "rope",
    "sinusoidal",
    "forget_gate",
    {"scheme": "shaw", "max_distance": 4},
    "pope",
    {"scheme": "self_extend", "window": 4, "group": 2},
    "ssmax",
]


def _name(scheme: Any) -> str:
    """Of a scheme, or any other word."""
    return scheme if isinstance(scheme, str) else scheme["scheme"]


#: Compiling takes seconds each time: a bias, a map and something added, and the rest in the longer run.
COMPILED = mostly_slow(SCHEMES, lambda scheme: scheme in ("t5", "rope", "sinusoidal"))
#: A graph grows with the layers. Where they do not matter to a test of one, there is one.
ONE_LAYER: dict[str, dict[str, int]] = {
    "llama_gqa": {"num_hidden_layers": 1},
    "bert": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "gptj": {"n_layer": 1},
}


@pytest.mark.parametrize("scheme", [*SCHEMES, "normalized_integer"], ids=_name)
@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt2", "gemma3_two_rotaries", "bloom"])
@torch.no_grad()
def test_generate_equals_argmax_over_full_forwards(architecture: str, scheme: str) -> None:
    row, model = ARCHITECTURES[architecture], patched(architecture, scheme)
    prompt = tokens(2, 6)
    padding = torch.full((2, 2), 0)
    padded = torch.cat((padding, prompt), dim=1)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(prompt)), dim=1)
    expected = prompt
    for _ in range(5):
        logits = outputs(model, row, expected, use_cache=False)
        expected = torch.cat((expected, logits[:, -1:].argmax(-1)), dim=1)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        left = model.generate(padded, attention_mask=mask, **settings)
    assert torch.equal(plain, expected)
    assert torch.equal(left[:, 2:], expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=_name)
@torch.no_grad()
def test_beam_and_prompt_lookup_decoding(scheme: str) -> None:
    model = patched("llama_gqa", scheme)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = tokens(1, 8)
    greedy = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=2, **settings), greedy)
    cached = model.generate(prompt, num_beams=3, **settings)
    assert torch.equal(model.generate(prompt, num_beams=3, use_cache=False, **settings), cached)


@pytest.mark.parametrize(
    ("scheme", "stance"),
    mostly_slow(product(SCHEMES, ["force_eager", "default"]), lambda case: case[1] == "force_eager"),
    ids=_name,
)
@torch.no_grad()
def test_flex_attention_equals_eager(scheme: str, stance: str) -> None:
    """As plain operations, and compiled, which takes half a minute where nothing is in the compiler's cache."""
    row = ARCHITECTURES["llama_gqa"]
    overrides = {"hidden_size": 64, "head_dim": 16}
    expected = outputs(patched("llama_gqa", scheme, **overrides), row, tokens())
    model = patched("llama_gqa", scheme, **overrides)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance(stance):
        assert distance(outputs(model, row, tokens()), expected) <= 1e-4


@pytest.mark.parametrize("scheme", ["alibi", "rope", "learned"])
@torch.no_grad()
def test_accelerate_hooks_stay_in_place(scheme: str) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            Count.calls += 1
            return args, kwargs

    row, model = ARCHITECTURES["gpt2"], patched("gpt2", None)
    stock = outputs(model, row, tokens())
    expected = outputs(patch_model(patched("gpt2", None), scheme), row, tokens()) if scheme != "learned" else stock
    for block in model.transformer.h:
        add_hook_to_module(block.attn, Count())
    patch_model(model, scheme)
    assert distance(outputs(model, row, tokens()), expected) <= 1e-6
    assert Count.calls == 2
    unpatch_model(model)
    assert torch.equal(outputs(model, row, tokens()), stock)
    for block in model.transformer.h:
        remove_hook_from_module(block.attn)


@pytest.mark.parametrize("scheme", ["rope", "sinusoidal", "t5"])
def test_checkpoint_wrappers_around_layers(scheme: str) -> None:
    """FSDP's activation checkpointing, two packed forwards before one backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    row, gradients = ARCHITECTURES["llama_gqa"], []
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    for wrapped in (False, True):
        model = patched("llama_gqa", scheme).train()
        if wrapped:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
        first = outputs(model, row, tokens(1, 8), position_ids=packed, use_cache=False)
        second = outputs(model, row, tokens(1, 5), use_cache=False)
        (first.pow(2).mean() + second.pow(2).mean()).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    assert all(distance(after, before) <= 2e-5 for before, after in zip(*gradients, strict=True))


@pytest.mark.parametrize("scheme", ["rope", "sinusoidal", "alibi"])
@torch.no_grad()
def test_static_generation_with_prepared_masks(scheme: str) -> None:
    """Models with two kinds of layers get their masks from generate() as a dictionary."""
    model = patched("gemma3_two_rotaries", scheme)
    prompt = torch.cat((torch.zeros(1, 2, dtype=torch.int64), tokens(1, 6)), dim=1)
    mask = (torch.arange(8) >= 2).long().unsqueeze(0)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    static = model.generate(prompt, attention_mask=mask, cache_implementation="static", **settings)
    assert torch.equal(static, model.generate(prompt, attention_mask=mask, use_cache=False, **settings))


@pytest.mark.parametrize("scheme", ["t5", "rope", "learned"])
@torch.no_grad()
def test_cpu_offload(scheme: str) -> None:
    from accelerate import cpu_offload

    row = ARCHITECTURES["llama_gqa"]
    expected = outputs(patched("llama_gqa", scheme), row, tokens())
    model = patched("llama_gqa", None)
    cpu_offload(model, execution_device=torch.device("cpu"))
    torch.manual_seed(7)
    patch_model(model, scheme)
    from tests.matrix.running import strengthen

    strengthen(model)
    assert distance(outputs(model, row, tokens()), expected) <= 1e-6


@pytest.mark.parametrize("hook_first", [True, False])
@torch.no_grad()
def test_hooks_may_come_and_go_while_a_model_is_patched(hook_first: bool) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    row, model = ARCHITECTURES["gpt2"], patched("gpt2", None)
    stock = outputs(model, row, tokens())
    attention = model.transformer.h[0].attn
    if hook_first:
        add_hook_to_module(attention, ModelHook())
        patch_model(model, "alibi")
        remove_hook_from_module(attention)
    else:
        patch_model(model, "alibi")
        add_hook_to_module(attention, ModelHook())
    assert distance(outputs(model, row, tokens()), outputs(patched("gpt2", "alibi"), row, tokens())) <= 1e-6
    unpatch_model(model)
    assert torch.equal(outputs(model, row, tokens()), stock)
    assert ("_hf_hook" in attention.__dict__) is not hook_first


@pytest.mark.parametrize("scheme", COMPILED, ids=_name)
@torch.no_grad()
def test_compiling_attention_outside_the_interface(scheme: str) -> None:
    row, model = ARCHITECTURES["gptj"], patched("gptj", scheme, **ONE_LAYER["gptj"])
    expected = outputs(model, row, tokens())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert distance(outputs(compiled, row, tokens(), use_cache=False), expected) <= 1e-5


@torch.no_grad()
def test_left_padding_in_static_generation_without_position_ids() -> None:
    """BLOOM takes no position ids, and generate() hands it masks it has already prepared."""
    model = patched("bloom", "sinusoidal")
    ids = tokens(1, 6)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), ids), dim=1)
    mask = (torch.arange(9) >= 3).long().unsqueeze(0)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    static = model.generate(padded, attention_mask=mask, cache_implementation="static", **settings)
    assert torch.equal(static[:, 3:], alone)


@pytest.mark.parametrize("scheme", COMPILED, ids=_name)
@torch.no_grad()
def test_compiled_layers_under_an_eager_model(scheme: str) -> None:
    row, model = ARCHITECTURES["llama_gqa"], patched("llama_gqa", scheme, **ONE_LAYER["llama_gqa"])
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    expected = outputs(model, row, tokens(1, 8), position_ids=packed, use_cache=False)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    assert distance(outputs(model, row, tokens(1, 8), position_ids=packed, use_cache=False), expected) <= 1e-4


def test_parts_patched_on_their_own() -> None:
    from transformers import EncoderDecoderConfig, EncoderDecoderModel

    both = EncoderDecoderConfig.from_encoder_decoder_configs(tiny_config("BertModel"), tiny_config("BertModel"))
    model = EncoderDecoderModel(config=both).eval()
    ids = torch.arange(5, 11).unsqueeze(0)
    with torch.no_grad():
        stock = model(input_ids=ids, decoder_input_ids=ids).logits
        patch_model(model.encoder, "alibi")
        patch_model(model.decoder, "rope")
        with pytest.raises(UnsupportedError, match="patched on its own"):
            patch_model(model, "none")
        unpatch_model(model)
        assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, stock)


@pytest.mark.parametrize(
    "scheme",
    [
        ["rope", "forget_gate", "ssmax"],
        "string",
        "pope",
        {"scheme": "fope", "learnable": True},
        "learned_rope",
        "learned",
    ],
    ids=str,
)
@torch.no_grad()
def test_weights_that_are_kept_elsewhere_come_when_they_are_needed(scheme: Any) -> None:
    from accelerate import cpu_offload

    row, model = ARCHITECTURES["llama_gqa"], patched("llama_gqa", scheme)
    expected = outputs(model, row, tokens())
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    assert any(parameter.is_meta for parameter in model.position_encoding.parameters())
    assert distance(outputs(model, row, tokens()), expected) <= 1e-6
    assert all(parameter.is_meta for parameter in model.position_encoding.parameters())
