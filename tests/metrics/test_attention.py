"""Where attention goes, against weights that are known."""

import pytest
import torch

from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.attention import attention_test
from tests.metrics.conftest import TEXT


def _uniform(model):
    """Every visible key gets the same weight, but for positions."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    return model


def test_uniform_attention_has_the_distance_and_the_entropy_of_its_prefix(tiny_llama, word_tokenizer):
    result = attention_test(_uniform(tiny_llama()), word_tokenizer, TEXT, ["native", "none"], length=16)
    queries = torch.arange(16, dtype=torch.float64)
    for label in result.labels:
        for layer in {record.at["layer"] for record in result.records}:
            assert result.value(label, "distance", layer=layer) == pytest.approx(float((queries / 2).mean()), rel=1e-6)
            entropy = float((queries + 1).log().mean())
            assert result.value(label, "entropy", layer=layer) == pytest.approx(entropy, rel=1e-6)


def test_a_penalty_on_distance_keeps_attention_near(tiny_llama, word_tokenizer):
    model = _uniform(tiny_llama())
    implementation = model.config._attn_implementation
    result = attention_test(model, word_tokenizer, TEXT, ["none", "alibi"], length=16)
    slopes = torch.tensor([2.0 ** (-8 * head / 4) for head in range(1, 5)], dtype=torch.float64)
    distance = (torch.arange(16)[:, None] - torch.arange(16)).double()
    weights = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).softmax(-1)
    expected = float((weights * distance).sum(-1).mean())
    assert result.value("alibi", "distance", layer=1) == pytest.approx(expected, rel=1e-6)
    assert result.value("alibi", "entropy", layer=1) < result.value("none", "entropy", layer=1)
    assert model.config._attn_implementation == implementation


def test_an_encoder_attends_on_both_sides_of_a_text_that_is_long_enough(tiny_bert, word_tokenizer):
    model = tiny_bert()
    result = attention_test(model, word_tokenizer, TEXT, ["native", "alibi", "forget_gate"], length=16)
    assert "bidirectional" in result.subject("forget_gate").error
    assert "| layer" in result.table(markdown=True)
    assert result.value("native", "distance", layer=1) > 4
    with pytest.raises(MeasurementError, match="one window needs 128"):
        attention_test(model, word_tokenizer, ["the dog"])
