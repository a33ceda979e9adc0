import dataclasses
import math

import pytest
import torch
from torch import nn

from hf_posenc.cli.catalogue import REQUIRED, defaults_of
from hf_posenc.metrics.probe import AttentionProbe, probe_distance, probe_heads
from hf_posenc.schemes import (
    BuildContext,
    DistanceBias,
    PRopeConfig,
    RopeConfig,
    SchemeConfig,
    SchemeParts,
    get_scheme,
    list_schemes,
)
from tests.schemes.table import TABLE

# "[CLS] the dog chased another dog [SEP]"
IDS = torch.tensor([2, 4, 5, 6, 7, 5, 3])
FIRST, SECOND = (2,), (5,)


def sentence(hidden: int = 32, seed: int = 0) -> torch.Tensor:
    table = torch.randn(10, hidden, generator=torch.Generator().manual_seed(seed))
    return table[IDS]


@pytest.mark.parametrize("hidden", [2, 12, 30, 64, 384])
def test_without_positions_the_dogs_are_identical_bit_for_bit(hidden):
    for seed, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        outputs = AttentionProbe(hidden, probe_heads(hidden), seed=seed)(sentence(hidden, seed).to(dtype))
        assert torch.equal(outputs[FIRST[0]], outputs[SECOND[0]])


def test_the_identity_holds_for_many_equal_tokens_and_threads():
    table = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([0, 1, 2, 1, 3, 1, 4, 1, 1, 0, 1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        outputs = AttentionProbe(64)(table[ids])
    finally:
        torch.set_num_threads(threads)
    for index in (3, 5, 7, 8, 10):
        assert torch.equal(outputs[1], outputs[index])


class _OneSided(DistanceBias):
    """Other numbers before a query than behind it, and in every head."""

    def forward(self, distance):
        return torch.stack([head * torch.where(distance > 0, 0.3, 0.1) * distance for head in range(1, 5)])


def test_the_probe_is_the_multi_head_attention_of_the_published_test_and_a_bias_is_added_to_its_logits():
    hidden, heads = 32, 4
    probe = AttentionProbe(hidden, heads, seed=5)
    reference = nn.MultiheadAttention(hidden, heads, batch_first=True, dtype=torch.float64)
    places = torch.arange(7)
    bias = _OneSided()(places - places[:, None]).double()  # key position minus query position
    with torch.no_grad():
        reference.in_proj_weight.copy_(probe.in_projection.flatten(0, 1))
        reference.in_proj_bias.copy_(probe.in_bias.flatten())
        reference.out_proj.weight.copy_(probe.out_projection)
        reference.out_proj.bias.copy_(probe.out_bias)
        inputs = sentence(hidden).double().unsqueeze(0)
        projected = [nn.functional.linear(inputs, probe.projections[index]) for index in range(3)]
        expected, (biased, _) = reference(*projected)[0], reference(*projected, attn_mask=bias)
    torch.testing.assert_close(probe(inputs[0]), expected[0], atol=1e-12, rtol=0)
    # The bias is in float32.
    torch.testing.assert_close(probe(inputs[0], SchemeParts(logit_bias=_OneSided())), biased[0], atol=1e-6, rtol=0)


def test_weights_have_the_published_spread():
    probe = AttentionProbe(256)
    assert probe.in_projection.std().item() == pytest.approx(0.1, rel=0.02)
    assert probe.out_bias.std().item() == pytest.approx(0.1, rel=0.2)
    assert probe.projections.abs().max().item() == pytest.approx(1 / math.sqrt(256), rel=0.01)
    assert not torch.equal(AttentionProbe(256, seed=1).in_projection, probe.in_projection)


#: In a bidirectional model of short sentences a temperature is the same for all tokens.
SCALES = ("ssmax", "log_n_scale", "llama4_scale")
CAUSAL = tuple(name for name, row in TABLE.items() if row.causal_only)
TELLING = [
    name
    for name in list_schemes()
    if REQUIRED not in defaults_of(get_scheme(name)).values() and name not in ("none", *SCALES, *CAUSAL)
]


def distance(config: SchemeConfig | None) -> float:
    return probe_distance(AttentionProbe(32), sentence(), FIRST, SECOND, config)


@pytest.mark.parametrize(
    "config",
    [None, get_scheme("none")(), PRopeConfig(fraction=0.0), get_scheme("log_n_scale")(training_length=1024),
     get_scheme("ssmax")(), get_scheme("llama4_scale")()],
    ids=str,
)  # fmt: skip
def test_no_positions_no_strength_and_a_temperature_alone_tell_no_dogs_apart(config):
    assert distance(config) == 0.0


@pytest.mark.parametrize("name", TELLING)
def test_every_scheme_tells_the_dogs_apart(name):
    # There is no LayerNorm in the probe, so that integer positions act here too.
    assert 1e-5 < distance(get_scheme(name)()) <= 2


class _Window(DistanceBias):
    def forward(self, distance):
        return torch.where(distance.abs() <= 1, 0.0, -torch.inf).expand(4, *distance.shape)


def test_rotations_act_on_queries_and_keys_and_depend_on_distance_only():
    # Two sentences with a word in front of the other: the same distances, so the same outputs behind it.
    probe = AttentionProbe(32)
    parts = RopeConfig().build(BuildContext(32, 4, 8, causal=False, max_positions=512))
    isolating = _Window()
    first = probe(sentence()[1:], dataclasses.replace(parts, logit_bias=isolating))
    second = probe(sentence(), dataclasses.replace(parts, logit_bias=isolating))[1:]
    torch.testing.assert_close(first[1:], second[1:], atol=1e-5, rtol=0)
    plain = probe(sentence(), SchemeParts(logit_bias=isolating))[1:]
    assert (second - plain).abs().max() > 1e-3


def test_a_probe_has_heads_of_even_width():
    for hidden, heads in ((64, 4), (12, 2), (6, 1), (384, 4), (8, 4)):
        assert probe_heads(hidden) == heads
    with pytest.raises(ValueError, match="even width, got 7"):
        probe_heads(7)
    for heads in (0, 3):
        with pytest.raises(ValueError, match=f"num_heads={heads} must divide hidden_size=32"):
            AttentionProbe(32, heads)
