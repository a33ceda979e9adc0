"""`disentangled` against the DeBERTas of transformers, and in models whose own factor is another."""

from __future__ import annotations

import math
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor

from hf_posenc import (
    ComposedConfig,
    DisentangledConfig,
    LearnedConfig,
    native_scheme,
    patch_model,
    unpatch_model,
)
from hf_posenc.errors import UnsupportedError
from tests.models import tiny

#: fp32, two layers: the same numbers summed in another order.
CLOSE = 1e-5
RELATIVE: dict[str, Any] = {
    "relative_attention": True,
    "position_biased_input": False,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BOTH = "c2p|p2c"
LEARNED = LearnedConfig(num_positions=64)

#: class, options, the scheme, and lengths: shorter than the span, and beyond it.
CASES: dict[str, tuple[str, dict[str, Any], Any, tuple[int, ...]]] = {
    "v1_short_span": (
        "Deberta",
        {"pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8},
        DisentangledConfig(max_distance=8),
        (1, 5, 8, 9, 40),
    ),
    "v1_c2p_and_a_table": (
        "Deberta",
        {"pos_att_type": "c2p", "max_relative_positions": 8, "position_biased_input": True},
        ComposedConfig(parts=(LEARNED, DisentangledConfig("c2p", max_distance=8))),
        (6, 40),
    ),
    "v1_p2c": (
        "Deberta",
        {"pos_att_type": ["p2c"], "max_relative_positions": 8},
        DisentangledConfig("p2c", max_distance=8),
        (6, 40),
    ),
    "v2_buckets": (
        "DebertaV2",
        {"pos_att_type": BOTH, "position_buckets": 8, "max_relative_positions": 24},
        DisentangledConfig(max_distance=24, buckets=8),
        (3, 12, 60),
    ),
    "v2_normed": (
        "DebertaV2",
        {"pos_att_type": BOTH, "max_relative_positions": 8, "norm_rel_ebd": "layer_norm"},
        DisentangledConfig(max_distance=8),
        (6, 40),
    ),
    "v2_shared_projections": (
        "DebertaV2",
        {"pos_att_type": BOTH, "position_buckets": 7, "max_relative_positions": 20, "share_att_key": True},
        DisentangledConfig(max_distance=20, buckets=7),
        (6, 60),
    ),
    "v2_c2p": (
        "DebertaV2",
        {"pos_att_type": "c2p", "max_relative_positions": 8, "share_att_key": True},
        DisentangledConfig("c2p", max_distance=8),
        (6, 40),
    ),
    "v2_p2c_with_convolution": (
        "DebertaV2",
        {"pos_att_type": "p2c", "position_buckets": 8, "max_relative_positions": 24, "conv_kernel_size": 3},
        DisentangledConfig("p2c", max_distance=24, buckets=8),
        (6, 40),
    ),
    "v3": (
        "DebertaV2",
        {"pos_att_type": BOTH, "position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
        | {"max_position_embeddings": 512},
        DisentangledConfig(max_distance=512, buckets=256),
        (20, 600),
    ),
}


def stock(family: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = tiny(f"{family}Model", **(RELATIVE | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or name.endswith("bias"):
                parameter.normal_(std=0.6 if "rel_embeddings" in name or ".pos_" in name else 0.25)
    return model.eval()


def tokens_of(length: int) -> dict[str, Tensor]:
    """Two sequences, of which one is padded if it has room."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, max(length - 3, 1) :] = 0
    return {
        "input_ids": torch.randint(5, 96, (2, length), generator=torch.Generator().manual_seed(1)),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_native_deberta(case: str) -> None:
    family, options, scheme, lengths = CASES[case]
    model = stock(family, options)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    inputs = [tokens_of(length) for length in lengths]
    expected = [model(**given).last_hidden_state for given in inputs]
    assert native_scheme(model) == scheme

    patch_model(model, scheme)
    for given, before in zip(inputs, expected, strict=True):
        difference = (model(**given).last_hidden_state - before).abs().max()
        assert difference <= CLOSE * before.abs().max().clamp(min=1.0), (given["input_ids"].shape, difference)
    idle = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert any("rel_embeddings" in name for name in idle)
    assert not any("query_proj" in name or "in_proj" in name for name in idle if "pos_" not in name)

    # Without its terms the model is another one, so the comparison can fail.
    patch_model(model, "none")
    assert (model(**inputs[-1]).last_hidden_state - expected[-1]).abs().max() > 1e-2
    unpatch_model(model)
    for given, before in zip(inputs, expected, strict=True):
        assert torch.equal(model(**given).last_hidden_state, before)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trainable


def test_the_stock_tables_are_taken_over_in_every_layer() -> None:
    model = stock(*CASES["v2_shared_projections"][:2])
    patch_model(model, "disentangled", max_distance=20, buckets=7)
    (stack,) = model.position_encoding.stacks.values()
    assert stack.adopted == [f"logit_bias: encoder.layer.{layer}.attention.self" for layer in range(2)]
    patch_model(model, "disentangled", max_distance=20, buckets=6)
    assert next(iter(model.position_encoding.stacks.values())).adopted == []


@torch.no_grad()
def test_offloaded_layers_give_their_tables() -> None:
    model = stock(*CASES["v2_shared_projections"][:2])
    given = tokens_of(30)
    before = model(**given).last_hidden_state
    accelerate.cpu_offload(model.encoder.layer, execution_device=torch.device("cpu"))
    assert model.encoder.layer[0].attention.self.query_proj.weight.is_meta
    patch_model(model, native_scheme(model))
    assert (model(**given).last_hidden_state - before).abs().max() <= CLOSE * before.abs().max()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("Deberta", {"pos_att_type": BOTH, "talking_head": True}, "mixes the logits of all heads"),
        ("Deberta", {"pos_att_type": ["c2p", "p2p"]}, r"divides its logits by sqrt\(3 head_dim\), although it sums 2"),
        (
            "DebertaV2",
            {"pos_att_type": BOTH, "position_buckets": 16, "max_relative_positions": 9},
            "has buckets that no scheme describes: .*expected more than 9",
        ),
    ],
)
@torch.no_grad()
def test_settings_that_no_scheme_describes(family: str, options: dict[str, Any], message: str) -> None:
    model = stock(family, options)
    given = tokens_of(12)
    before = model(**given).last_hidden_state
    with pytest.raises(UnsupportedError, match=message):
        native_scheme(model)
    patch_model(model, "alibi")
    assert (model(**given).last_hidden_state - before).abs().max() > 1e-3
    unpatch_model(model)
    assert torch.equal(model(**given).last_hidden_state, before)


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_relative_attention_without_terms_has_no_positions_of_its_own(family: str) -> None:
    table = {"position_biased_input": True}
    assert native_scheme(stock(family, {"pos_att_type": None} | table)) == LEARNED
    assert native_scheme(stock(family, {"relative_attention": False, "pos_att_type": BOTH} | table)) == LEARNED


def heads_of(projected: Tensor) -> Tensor:
    return projected.unflatten(-1, (4, 8)).transpose(1, 2)


@pytest.mark.parametrize("terms", [BOTH, "c2p", "p2c"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Bert", {"attn_implementation": "eager"}),
        ("DebertaV2", {"pos_att_type": BOTH}),
        ("DebertaV2", {"pos_att_type": "c2p"}),
        ("DebertaV2", {"relative_attention": False, "pos_att_type": None}),
    ],
    ids=["bert", "three terms", "two terms", "one term"],
)
@torch.no_grad()
def test_the_divisor_is_that_of_the_scheme_in_every_model(family: str, options: dict[str, Any], terms: str) -> None:
    """DeBERTa divides by sqrt(3 head_dim) even where its terms are replaced, BERT by sqrt(head_dim)."""
    model = stock(family, options)
    patch_model(model, "disentangled", terms=terms, max_distance=4)
    torch.manual_seed(1)
    for part in model.position_encoding.parameters():
        part.normal_()
    output = model(**tokens_of(9), output_attentions=True, output_hidden_states=True)
    hidden = output.hidden_states[0]
    layer = model.encoder.layer[0].attention.self
    projections = (layer.query, layer.key) if family == "Bert" else (layer.query_proj, layer.key_proj)
    query, key = (heads_of(one(hidden)) for one in projections)

    (stack,) = model.position_encoding.stacks.values()
    bias = stack.layers[0].logit_bias
    slots = torch.arange(9)
    rows = (slots.unsqueeze(1) - slots).clamp(-4, 3) + 4
    logits = query @ key.transpose(-1, -2)
    if "c2p" in terms:
        logits = logits + torch.einsum("bhid,hijd->bhij", query, bias.key_weight[:, rows])
    if "p2c" in terms:
        logits = logits + torch.einsum("bhjd,hijd->bhij", key, bias.query_weight[:, rows])
    logits = logits / math.sqrt((1 + len(terms.split("|"))) * 8)
    # The first sequence has no padding.
    torch.testing.assert_close(output.attentions[0][0], logits[0].softmax(-1), rtol=1e-4, atol=1e-5)
