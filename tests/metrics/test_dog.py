import pytest
import torch

from hf_posenc import patch_model
from hf_posenc.metrics import MeasurementError, dog_test
from hf_posenc.schemes import AlibiConfig, ComposedConfig, IntegerConfig, RopeConfig, YarnScaling


def layers(result, scheme):
    return [record.value for record in result.of(scheme, "relative_l2")]


def told_apart(result, scheme):
    return result.record(scheme, "told_apart").passed


def identical(result, scheme):
    return result.record(scheme, "identical").passed


def test_a_stock_bert_tells_the_dogs_apart_by_its_table(tiny_bert, word_tokenizer):
    result = dog_test(tiny_bert(), word_tokenizer)
    (subject,) = result.subjects
    assert subject.scheme == "native"
    assert subject.config["scheme"] == "learned"
    assert [record.at["layer"] for record in result.of("native", "relative_l2")] == [0, 1, 2, 3]
    assert min(layers(result, "native")) > 1e-2
    assert min(record.value for record in result.of("native", "cosine")) > 1e-4
    assert told_apart(result, "native")
    assert not identical(result, "native")
    assert not result.settings["causal"]
    assert result.settings["probe_without_positions"] == 0.0
    assert (result.settings["first"], result.settings["second"]) == ([2], [5])


def test_distances_are_those_of_the_hidden_states(tiny_bert, word_tokenizer):
    model = tiny_bert()
    result = dog_test(model, word_tokenizer)
    with torch.no_grad():
        ids = torch.tensor([word_tokenizer("The dog chased another dog")["input_ids"]])
        states = model(ids, output_hidden_states=True).hidden_states
    for distance, state in zip(layers(result, "native"), states, strict=True):
        first, second = state[0, 2].double(), state[0, 5].double()
        scale = (first.norm() + second.norm()) / 2
        assert distance == pytest.approx(((first - second).norm() / scale).item(), rel=1e-5)


def test_a_bert_without_positions_holds_the_dogs_for_the_same_at_every_layer(tiny_bert, word_tokenizer):
    result = dog_test(patch_model(tiny_bert(), "none"), word_tokenizer)
    assert result.labels == ["none"]
    assert max(layers(result, "none")) <= 1e-6
    assert identical(result, "none")
    assert not told_apart(result, "none")
    assert result.value("none", "probe") == 0.0


@pytest.mark.parametrize("scheme", ["integer", "normalized_integer"])
def test_integer_positions_are_invisible_under_layer_norm_and_reported_as_zero(tiny_bert, word_tokenizer, scheme):
    result = dog_test(tiny_bert(), word_tokenizer, [scheme])
    assert identical(result, scheme)
    assert not told_apart(result, scheme)
    assert result.value(scheme, "probe") > 1e-3  # no LayerNorm there
    (note,) = result.subject(scheme).notes
    assert "LayerNorm" in note


def test_a_schedule_has_no_probe_and_says_why(tiny_llama, word_tokenizer):
    model = patch_model(tiny_llama(), "rope", layers=[0], elsewhere="none")
    result = dog_test(model, word_tokenizer)
    assert result.value("schedule", "probe") is None
    assert told_apart(result, "schedule") is None
    assert "The probe has no number" in result.record("schedule", "probe").note


@pytest.mark.parametrize(
    "scheme", ["binary", "sinusoidal", "learned", IntegerConfig(direction="one_hot"), "t5", "alibi", "rope", "p_rope"]
)
def test_every_scheme_sets_the_dogs_apart_in_an_encoder(tiny_bert, word_tokenizer, scheme):
    result = dog_test(tiny_bert(), word_tokenizer, [scheme])
    (label,) = result.labels
    assert told_apart(result, label)
    assert layers(result, label)[-1] > 1e-3
    assert result.value(label, "probe") > 1e-5
    additive = scheme in ("binary", "sinusoidal", "learned") or isinstance(scheme, IntegerConfig)
    assert (layers(result, label)[0] > 1e-3) == additive  # a bias or a rotation acts in the attention only


def test_in_a_causal_model_the_mask_alone_tells_the_dogs_apart_after_the_embeddings(tiny_llama, word_tokenizer):
    result = dog_test(tiny_llama(), word_tokenizer, ["native", "none", "alibi", "integer"])
    assert result.settings["causal"]
    assert "the mask alone" in result.table()
    embeddings, *others = layers(result, "none")
    assert embeddings == 0.0
    assert min(others) > 1e-3
    assert not identical(result, "none")
    assert result.value("none", "probe") == 0.0
    assert not told_apart(result, "none")
    for scheme in ("native", "alibi", "integer"):
        assert told_apart(result, scheme)
    assert layers(result, "integer")[0] > 0.1  # nothing normalises it away


def test_a_learned_scheme_takes_over_the_native_table_and_says_so(tiny_bert, word_tokenizer):
    result = dog_test(tiny_bert(), word_tokenizer, ["native", "learned", "alibi"])
    assert layers(result, "learned") == layers(result, "native")
    assert any("position_embeddings" in note for note in result.subject("learned").notes)
    assert result.subject("alibi").notes == ()


def test_words_of_several_tokens_are_compared_as_a_whole(tiny_bert, word_tokenizer):
    result = dog_test(tiny_bert(), word_tokenizer, ["none", "rope"], "The fox chased another fox", "fox")
    assert len(result.settings["first"]) == len(result.settings["second"]) == 3
    assert identical(result, "none")
    assert told_apart(result, "rope")


def test_of_an_encoder_decoder_the_encoder_is_measured(word_tokenizer):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=80, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    result = dog_test(T5ForConditionalGeneration(config), word_tokenizer, ["native", "none"])
    assert not result.settings["causal"]
    assert any("encoder-decoder" in remark for remark in result.remarks)
    assert told_apart(result, "native")
    assert identical(result, "none")


def test_labels_tell_configs_apart_and_one_that_is_named_twice_is_measured_once(tiny_llama, word_tokenizer):
    scalings = [YarnScaling(factor=4.0, original_max_positions=length) for length in (8, 64)]
    configs = [*(RopeConfig(scaling=scaling) for scaling in scalings), RopeConfig(theta=300.0)]
    wanted = ["native", "rope", *configs, AlibiConfig(learnable=True), "alibi", AlibiConfig()]
    result = dog_test(tiny_llama(), word_tokenizer, wanted)
    assert result.labels == [
        "native (rope)", "rope", "rope(yarn x4)", "rope(yarn x4) #2", "rope(theta=300)", "alibi(learnable=True)",
        "alibi",
    ]  # fmt: skip
    lengths = [
        result.subject(f"rope(yarn x4){mark}").config["scaling"]["original_max_positions"] for mark in ("", " #2")
    ]
    assert lengths == [8, 64]
    assert result.value("rope(yarn x4) #2", "probe") is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(tiny_bert, word_tokenizer, dtype):
    model = tiny_bert().to(dtype)
    result = dog_test(model, word_tokenizer, ["none", "sinusoidal"])
    assert identical(result, "none")
    assert told_apart(result, "sinusoidal")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_scheme_with_required_options_is_refused_by_name_and_taken_as_a_config(tiny_bert, word_tokenizer):
    with pytest.raises(MeasurementError, match=r"'composed' cannot be built from its name alone.*parts"):
        dog_test(tiny_bert(), word_tokenizer, ["composed"])
    config = ComposedConfig((AlibiConfig(), IntegerConfig(direction="one_hot")))
    assert told_apart(dog_test(tiny_bert(), word_tokenizer, [config]), "composed")


def test_the_tokenizer_of_another_model_is_refused(tiny_bert, byte_tokenizer):
    with pytest.raises(MeasurementError, match="but the model has 80 embeddings"):
        dog_test(tiny_bert(), byte_tokenizer)


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
