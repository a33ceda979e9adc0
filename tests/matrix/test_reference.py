"""Every variant in models, against the reference of logits, which knows neither kernels nor caches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import SchemeConfig, UnsupportedError
from hf_posenc.patching.forwards import forward_on_instance
from hf_posenc.schemes import SchemeParts
from hf_posenc.schemes.logits import positional_logits
from tests.kits.decoding import decoded, left_padding
from tests.matrix.running import distance, drawn, outputs, patched, tokens
from tests.schemes.building import counted
from tests.schemes.table import VARIANTS, parts_for

pytestmark = pytest.mark.usefixtures("without_gradients")
LENGTH = 14
#: The path of the attention modules, and the names of their projections.
LAYERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama_gqa": ("model.layers.{}.self_attn", ("q_proj", "k_proj", "v_proj")),
    "bert": ("bert.encoder.layer.{}.attention.self", ("query", "key", "value")),
}
#: Float32 in two ways: the logits of these models go up to some tens.
CLOSE = 1e-4


def with_scheme(architecture: str, config: SchemeConfig) -> Any:
    try:
        return drawn(patched(architecture, config, attn_implementation="sdpa"), std=0.3)
    except (UnsupportedError, ValueError) as reason:
        pytest.skip(f"Not for this architecture: {reason}")


def attended(attention: Any, names: tuple[str, ...], hidden: Tensor) -> Tensor:
    """What a layer attends to, `(batch, length, heads * head_dim)`."""
    encoding = forward_on_instance(attention).encoding
    query, key, value = (
        getattr(attention, name)(hidden).unflatten(-1, (-1, encoding.head_dim)).transpose(1, 2) for name in names
    )
    parts = SchemeParts(None, encoding.query_key_map, encoding.logit_bias, encoding.logit_scale)
    logits = positional_logits(parts, query, key, counted(LENGTH), hidden)
    if encoding.causal:
        logits = logits.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)


def seen_by(module: Any, run: Callable[[], Any], *, before: bool) -> Tensor:
    """The first argument of a module, or its first result, in a run."""
    seen: list[Tensor] = []
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    with register(lambda *given: seen.append(given[-1][0])):
        run()
    return seen[0]


EVERY_VARIANT = pytest.mark.parametrize("config", [pytest.param(config, id=label) for _, config, label in VARIANTS])


@EVERY_VARIANT
@pytest.mark.parametrize("architecture", LAYERS)
def test_layers_compute_the_reference(architecture: str, config: SchemeConfig) -> None:
    model = with_scheme(architecture, config)
    path, names = LAYERS[architecture]
    for layer in range(2):
        attention = model.get_submodule(path.format(layer))
        # Llama projects what it attends to in the same module.
        result = getattr(attention, "o_proj", attention)
        hidden, found = (
            seen_by(module, lambda: outputs(model, tokens(length=LENGTH)), before=module is not attention)
            for module in (getattr(attention, names[0]), result)
        )
        assert distance(found, attended(attention, names, hidden)) <= CLOSE


@EVERY_VARIANT
def test_tokens_enter_and_leave_a_decoder_like_the_reference(config: SchemeConfig) -> None:
    """What is added to them in front of the first layer, and the logits when a cache is filled in pieces."""
    model, ids = with_scheme("llama_gqa", config), tokens(length=LENGTH)
    expected = model.get_input_embeddings()(ids)
    (stack,) = model.position_encoding.stacks.children()
    if getattr(stack, "additive", None) is not None:
        expected = expected + stack.additive(counted(LENGTH))
    assert distance(seen_by(model.model.layers[0], lambda: model(ids), before=True), expected) <= CLOSE
    whole = model(ids, use_cache=False).logits
    # These may refuse a cache.
    refused = UnsupportedError if any(part.length_dependent for part in parts_for(config)) else ()
    with contextlib.suppress(refused):
        assert distance(decoded(model, ids, None, (1, 8, 3, 1, 1)), whole) <= CLOSE


@EVERY_VARIANT
def test_padding_and_other_documents_change_nothing(config: SchemeConfig) -> None:
    model = with_scheme("llama_gqa", config)
    documents = tokens(1, 6, seed=2), tokens(1, LENGTH, seed=3)
    alone = [model(ids, use_cache=False).logits for ids in documents]
    padding = LENGTH - 6
    row = torch.nn.functional.pad(documents[0], (padding, 0))
    padded = model(torch.cat((row, documents[1])), attention_mask=left_padding(LENGTH, padding).flip(0)).logits
    assert distance(padded[:1, padding:], alone[0]) <= CLOSE
    assert distance(padded[1:], alone[1]) <= CLOSE
    # These may be refused.
    refused = UnsupportedError if any(part.length_dependent for part in parts_for(config)) else ()
    with contextlib.suppress(refused):
        position_ids = torch.cat((torch.arange(6), torch.arange(LENGTH))).unsqueeze(0)
        packed = model(torch.cat(documents, dim=1), position_ids=position_ids, use_cache=False).logits
        assert distance(packed, torch.cat(alone, dim=1)) <= CLOSE
