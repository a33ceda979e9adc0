"""Which schemes distinguish the two dogs, and what the result says about them."""

import pytest
import torch

from hf_posenc import patch_model
from hf_posenc.metrics import MeasurementError, dog_test
from hf_posenc.schemes import AlibiConfig, ComposedConfig, IntegerConfig, RopeConfig, YarnScaling
from tests.metrics.conftest import build, build_word_tokenizer
from tests.models import tiny

#: A bias or a rotation acts in the attention only.
ADDITIVE = ["native", "binary", "sinusoidal", "learned", IntegerConfig(direction="one_hot")]
IN_ATTENTION = ["t5", "alibi", "rope", "p_rope"]
UNDER_LAYER_NORM = ["integer", "normalized_integer"]


@pytest.fixture(scope="module")
def encoder():
    return build("BertModel")


@pytest.fixture(scope="module")
def of_encoder(encoder):
    return dog_test(encoder, build_word_tokenizer(), ["none", *ADDITIVE, *IN_ATTENTION, *UNDER_LAYER_NORM])


def layers(result, scheme):
    return [record.value for record in result.of(scheme, "relative_l2")]


def verdicts(result, scheme):
    """Whether the two are identical for the model, and whether positions distinguish them."""
    return tuple(result.record(scheme, quantity).passed for quantity in ("identical", "told_apart"))


def test_a_stock_bert_tells_the_dogs_apart_by_its_table(encoder, of_encoder, word_tokenizer):
    subject = of_encoder.subject("native")
    assert (subject.scheme, subject.config["scheme"]) == ("native", "learned")
    assert verdicts(of_encoder, "native") == (False, True)
    assert min(record.value for record in of_encoder.of("native", "cosine")) > 1e-4
    of_model = of_encoder.settings["of_model"]
    assert (of_encoder.settings["causal"], of_model["probe_without_positions"]) == (False, 0.0)
    assert (of_model["first"], of_model["second"]) == ([2], [5])
    with torch.no_grad():
        ids = torch.tensor([word_tokenizer("The dog chased another dog")["input_ids"]])
        states = encoder(ids, output_hidden_states=True).hidden_states
    assert [record.at["layer"] for record in of_encoder.of("native", "relative_l2")] == [0, 1, 2, 3]
    for distance, state in zip(layers(of_encoder, "native"), states, strict=True):
        first, second = state[0, 2].double(), state[0, 5].double()
        scale = (first.norm() + second.norm()) / 2
        assert distance == pytest.approx(((first - second).norm() / scale).item(), rel=1e-5)
        assert distance > 1e-2


def test_every_scheme_sets_the_dogs_apart_in_an_encoder_and_none_does_not(of_encoder):
    assert max(layers(of_encoder, "none")) <= 1e-6
    assert verdicts(of_encoder, "none") == (True, False)
    assert of_encoder.value("none", "probe") == 0.0
    for label in of_encoder.labels[1 : -len(UNDER_LAYER_NORM)]:
        assert verdicts(of_encoder, label) == (False, True)
        assert layers(of_encoder, label)[-1] > 1e-3
        assert of_encoder.value(label, "probe") > 1e-5
        assert (layers(of_encoder, label)[0] > 1e-3) == (label not in IN_ATTENTION)
    # Integer positions are invisible under a LayerNorm, and reported as zero.
    for scheme in UNDER_LAYER_NORM:
        assert verdicts(of_encoder, scheme) == (True, False)
        assert of_encoder.value(scheme, "probe") > 1e-3  # no LayerNorm there
        (note,) = of_encoder.subject(scheme).notes
        assert "LayerNorm" in note
    # A learned scheme takes over the native table and says so.
    assert layers(of_encoder, "learned") == layers(of_encoder, "native")
    assert any("position_embeddings" in note for note in of_encoder.subject("learned").notes)
    assert of_encoder.subject("alibi").notes == ()


def test_a_schedule_has_no_probe_and_says_why(tiny_llama, word_tokenizer):
    model = patch_model(tiny_llama(), "rope", layers=[0], elsewhere="none")
    result = dog_test(model, word_tokenizer)
    assert result.value("schedule", "probe") is None
    assert result.record("schedule", "told_apart").passed is None
    assert "The probe could not run" in result.record("schedule", "probe").note


def test_in_a_causal_model_the_mask_alone_tells_the_dogs_apart_after_the_embeddings(tiny_llama, word_tokenizer):
    result = dog_test(tiny_llama(), word_tokenizer, ["native", "none", "alibi", "integer"])
    assert result.settings["causal"]
    assert "the mask alone" in result.table()
    embeddings, *others = layers(result, "none")
    assert embeddings == result.value("none", "probe") == 0.0
    assert min(others) > 1e-3
    assert verdicts(result, "none") == (False, False)
    for scheme in ("native", "alibi", "integer"):
        assert result.record(scheme, "told_apart").passed
    assert layers(result, "integer")[0] > 0.1  # nothing normalises it away


def test_of_an_encoder_decoder_the_encoder_is_measured(word_tokenizer):
    torch.manual_seed(0)
    result = dog_test(tiny("T5ForConditionalGeneration"), word_tokenizer, ["native", "none"])
    assert not result.settings["causal"]
    assert any("encoder-decoder" in remark for remark in result.remarks)
    assert (verdicts(result, "none"), verdicts(result, "native")) == ((True, False), (False, True))


def test_labels_tell_configs_apart_and_one_that_is_named_twice_is_measured_once(tiny_llama, word_tokenizer):
    scalings = [YarnScaling(factor=4.0, original_max_positions=length) for length in (8, 64)]
    configs = [*(RopeConfig(scaling=scaling) for scaling in scalings), RopeConfig(theta=300.0)]
    wanted = ["native", "rope", *configs, AlibiConfig(learnable=True), "alibi", AlibiConfig()]
    result = dog_test(tiny_llama(), word_tokenizer, wanted)
    assert result.labels == [
        "native (rope)", "rope", "rope(yarn x4)", "rope(yarn x4) #2", "rope(theta=300)", "alibi(learnable=True)",
        "alibi",
    ]  # fmt: skip
    subjects = [result.subject(f"rope(yarn x4){mark}") for mark in ("", " #2")]
    assert [subject.config["scaling"]["original_max_positions"] for subject in subjects] == [8, 64]
    assert result.value("rope(yarn x4) #2", "probe") is not None


@pytest.mark.parametrize(
    ("dtype", "word", "pieces"), [(torch.bfloat16, "dog", 1), (torch.float64, "dog", 1), (torch.float32, "fox", 3)]
)
def test_other_dtypes_and_words_of_several_tokens(tiny_bert, word_tokenizer, dtype, word, pieces):
    model = tiny_bert().to(dtype)
    result = dog_test(model, word_tokenizer, ["none", "sinusoidal", "rope"], f"The {word} chased another {word}", word)
    assert len(result.settings["of_model"]["first"]) == len(result.settings["of_model"]["second"]) == pieces
    assert [verdicts(result, label) for label in result.labels] == [(True, False), (False, True), (False, True)]
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_what_needs_a_config_or_another_tokenizer_is_refused(encoder, word_tokenizer, byte_tokenizer):
    with pytest.raises(ValueError, match="'composed' needs the option parts"):
        dog_test(encoder, word_tokenizer, ["composed"])
    config = ComposedConfig((AlibiConfig(), IntegerConfig(direction="one_hot")))
    result = dog_test(encoder, word_tokenizer, [config])
    assert result.labels == ["composed(parts=[alibi, integer(direction=one_hot)])"]
    assert result.record("composed", "told_apart").passed
    with pytest.raises(MeasurementError, match="but the model has 80 embeddings"):
        dog_test(encoder, byte_tokenizer)


def test_deep_models_show_some_of_their_layers(word_tokenizer, tiny_bert):
    model = tiny_bert()
    model.encoder.layer = torch.nn.ModuleList([*model.encoder.layer] * 4)
    model.config.num_hidden_layers = 12
    result = dog_test(model, word_tokenizer)
    assert len(layers(result, "native")) == 13
    header = result.table().splitlines()[2]
    assert header.split()[:4] == ["scheme", "probe", "layer", "0"]
    assert header.count("layer ") == 8
    assert header.endswith("layer 12  apart")
