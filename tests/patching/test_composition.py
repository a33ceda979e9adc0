"""Combined schemes: the result is the requested one, and not only free of errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import (
    AlibiConfig,
    InterleavedConfig,
    NativeConfig,
    NoneConfig,
    RopeConfig,
    ScheduleConfig,
    get_scheme,
    native_scheme,
    patch_model,
)
from hf_posenc.schemes import SchemeConfig, SchemeParts
from hf_posenc.schemes.config import OuterConfig
from tests.matrix.running import distance, outputs, patched, tokens

pytestmark = pytest.mark.usefixtures("without_gradients")
#: fp32 with two tiny layers: sums of some hundred terms in another order.
CLOSE = 2e-5


def scheme(name: str, **options: Any) -> Any:
    return get_scheme(name).from_options(options)


def logits_of(config: Any, **overrides: Any) -> Tensor:
    return outputs(patched("llama_gqa", config, **overrides), tokens(), use_cache=False)


@dataclass(frozen=True)
class BiasAndRotation(OuterConfig):
    """A combinator from outside the package: the biases of one scheme and the rotation of another."""

    name = "bias_and_rotation"
    combinator = True
    merges_children = True

    bias: SchemeConfig
    rotation: SchemeConfig

    def merge(self, built: Sequence[SchemeParts]) -> SchemeParts:
        return SchemeParts(query_key_map=built[1].query_key_map, logit_bias=built[0].logit_bias)


def test_a_combinator_from_outside_takes_part_as_those_of_the_package_do() -> None:
    """Its children are visited, get the layout and the native scheme of the model, and are shared by layers."""
    config = BiasAndRotation(get_scheme("t5")(), NativeConfig())
    found = patched("llama_gqa", config)
    wanted = patched("llama_gqa", ["t5", "native"])
    own, parameters = found.position_encoding.parameters(), wanted.position_encoding.parameters()
    for one, other in zip(own, parameters, strict=True):
        one.copy_(other)
    assert distance(outputs(found, tokens()), outputs(wanted, tokens())) == 0
    chosen = found.position_encoding.config
    assert isinstance(chosen, BiasAndRotation)
    assert isinstance(chosen.rotation, RopeConfig)
    assert sum(parameter.numel() for parameter in found.position_encoding.parameters()) == 32 * 4
    per_layer = patched("llama_gqa", BiasAndRotation(get_scheme("forget_gate")(), RopeConfig()))
    assert per_layer.position_encoding.config.per_layer


#: log n / log L, at the length of the tokens.
FACTOR = math.log(tokens().shape[1]) / math.log(4)
LOG_N = scheme("log_n_scale", training_length=4)
LEARNABLE = AlibiConfig(learnable=True)
#: Scheme, another one, and factors of its queries and its slopes with which it is the same.
SAME: dict[str, tuple[Any, Any, float, float]] = {
    "a scale multiplies queries": (LOG_N, "none", FACTOR, 1.0),
    "a scale multiplies biases too": ([LEARNABLE, LOG_N], LEARNABLE, FACTOR, FACTOR),
    "interleaved layers are a schedule": (
        InterleavedConfig(every=2),
        ScheduleConfig((RopeConfig(), NoneConfig())),
        1,
        1,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_two_ways_to_write_a_scheme(name: str) -> None:
    """Compared at the last token, behind which a scale by length is the same in every row."""
    config, other, of_queries, of_slopes = SAME[name]
    layers = {"num_hidden_layers": 2 if "layers" in name else 1}
    found, model = logits_of(config, **layers)[:, -1], patched("llama_gqa", other, **layers)
    before = outputs(model, tokens())[:, -1]
    model.model.layers[0].self_attn.q_proj.weight.mul_(of_queries)
    for parameter in model.position_encoding.parameters():
        parameter.add_(math.log(of_slopes))
    assert distance(found, outputs(model, tokens())[:, -1]) <= CLOSE
    assert (distance(found, before) > 1e-3) == (of_queries * of_slopes != 1)


@torch.enable_grad()
def test_a_table_shared_by_all_layers_stays_one_beside_a_scheme_of_each_layer():
    model = patched("llama_gqa", ["t5", {"scheme": "ssmax"}])
    names = [name for name, _ in model.position_encoding.named_parameters()]
    tables = [name for name, parameter in model.position_encoding.named_parameters() if parameter.shape == (32, 4)]
    assert len(tables) == 1
    assert len(names) == 1 + 2  # the table, and a scale in each of two layers
    layers = model.position_encoding.stacks["model"].layers
    assert layers[0].logit_bias is layers[1].logit_bias
    assert layers[0].logit_scale is not layers[1].logit_scale


@pytest.mark.parametrize("architecture", ["llama_gqa", "cohere2_interleaved", "bloom"])
def test_native_stands_for_what_the_model_has(architecture: str):
    model = patched(architecture, None)
    stock, native = outputs(model, tokens()), native_scheme(model)
    forms: list[Any] = ["native", ["native"], {"scheme": "interleaved", "inner": "native", "other": "native"}]
    if not isinstance(native, ScheduleConfig):
        forms.append({"scheme": "randomized", "inner": "native"})
    for scheme_like in forms:
        patch_model(model, scheme_like)
        assert "native" not in str(model.position_encoding.config.to_dict())
        assert distance(outputs(model, tokens()), stock) <= CLOSE
    patch_model(model, ["native", {"scheme": "log_n_scale", "training_length": 4}])
    assert distance(outputs(model, tokens()), stock) > 1e-3
    if not isinstance(native, ScheduleConfig):
        assert native in model.position_encoding.config.parts


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_length_is_the_last_position_with_a_mask_and_without(kind: str):
    """Stock frequencies follow the largest position id, so the native round trip does, however the call is made."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 20}
    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0} | (factors if kind == "longrope" else {})
    model = patched("llama_gqa", None, rope_parameters=rope, max_position_embeddings=20)
    ids = tokens()
    arguments = {"position_ids": torch.arange(ids.shape[1]).unsqueeze(0) + 40, "use_cache": False}
    stock = outputs(model, ids, **arguments)
    with pytest.warns(UserWarning, match="use_cache"):
        patch_model(model, native_scheme(model))
    for mask in (None, torch.ones_like(ids)):
        assert distance(outputs(model, ids, attention_mask=mask, **arguments), stock) <= CLOSE
