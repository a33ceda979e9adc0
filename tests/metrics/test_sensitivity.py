import dataclasses

import pytest
import torch

from hf_posenc import SequenceLengthError, patch_model
from hf_posenc.metrics import MeasurementError, dog_test, order_sensitivity, quantization_test, relative_l2
from hf_posenc.metrics.forward import outputs_of
from hf_posenc.metrics.sensitivity import (
    ENGLISH,
    permuted_context,
    repeated_sentences,
    repeated_words,
    sensitivity_test,
    shifted_positions,
    shuffled_order,
    tokenize_material,
)
from tests.metrics.conftest import build, build_word_tokenizer

WORDS = tuple(dict.fromkeys((*ENGLISH.nouns, *ENGLISH.verbs, *ENGLISH.fillers, "the", "another", "today")))
SIZES = {"vocab_size": 120, "max_position_embeddings": 512}
#: Rounding of float32 through three layers.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def tokenizer():
    return build_word_tokenizer(WORDS)


@pytest.fixture(scope="module")
def material():
    generator = torch.Generator().manual_seed(0)
    words = [WORDS[index] for index in torch.randint(len(WORDS), (300,), generator=generator)]
    return dataclasses.replace(ENGLISH, passage=" ".join(words))


@pytest.fixture(scope="module")
def tokens(tokenizer, material):
    return tokenize_material(tokenizer, material)


@pytest.fixture
def encoder():
    return build("BertForMaskedLM", **SIZES)


@pytest.fixture
def decoder():
    return build("LlamaForCausalLM", **SIZES)


def test_the_words_stand_where_they_should(tokens, tokenizer):
    sentences, first = repeated_sentences(tokens, 5)
    assert tokenizer.convert_ids_to_tokens(sentences[0].tolist()) == (
        ["[CLS]", "the", "dog", "and", "then", "with", "another", "dog", "[SEP]"]
    )
    assert sentences.shape[0] == len(ENGLISH.nouns)
    assert sentences[:, first].equal(sentences[:, first + 5])


def test_an_encoder_without_positions_sees_a_set(encoder, tokenizer, material):
    result = sensitivity_test(
        encoder, tokenizer, ["native", "none", "alibi", "rope", "sinusoidal"], gaps=(2, 16), material=material
    )
    assert not result.settings["causal"]
    assert {one.scheme: result.record(one.label, "sees_order").passed for one in result.subjects} == {
        "native": True, "none": False, "alibi": True, "rope": True, "sinusoidal": True,
    }  # fmt: skip
    for label in result.labels:
        if label != "none":
            last = [
                result.value(label, "repeated", gap=2, layer=3),
                *(result.value(label, quantity, layer=3) for quantity in ("word_role", "roles")),
            ]
            assert max(last) > 1e-3
            assert min(last) > 1e-4


def test_relative_schemes_do_not_see_a_shift_and_absolute_ones_do(encoder, tokens):
    for scheme, absolute in {"none": False, "alibi": False, "rope": False, "t5": False, "sinusoidal": True}.items():
        shifts = shifted_positions(patch_model(encoder, scheme), tokens, offsets=(1, 100))
        assert [dict(shift.at) for shift in shifts] == [{"offset": 1}, {"offset": 100}, {"tokens": 5}]
        for shift in shifts[:2]:
            # Phases of positions near 100 are rounded a little otherwise than those near 0.
            assert (shift.value > 1e-2) if absolute else (shift.value <= ROUNDING)
        # A patched model counts no padding.
        assert shifts[2].value <= ROUNDING


def test_a_stock_table_counts_padding_and_ends(encoder, tokens):
    shifts = shifted_positions(encoder, tokens, offsets=(1, 4000))
    assert shifts[0].value > 1e-2
    assert shifts[1].value is None
    assert "past the 512 positions" in shifts[1].note
    assert shifts[2].value > 1e-2


def test_a_table_that_is_too_short_ends_the_curve_or_is_refused(tokenizer, material):
    short = build("BertForMaskedLM", **SIZES | {"max_position_embeddings": 60})
    result = sensitivity_test(short, tokenizer, ["native", "alibi"], gaps=(2, 100), material=material)
    assert result.value("native", "repeated", gap=2, layer=3) > 1e-3
    assert "past the 60 positions" in result.record("native", "repeated", gap=100).note
    assert "gap 100: Position" in result.table(markdown=True)
    assert "past the 60 positions" in result.record("native", "shift", offset=256).note
    # A relative scheme in its place goes on past the table, with explicit positions too.
    assert result.value("alibi", "repeated", gap=100, layer=3) > 1e-3
    assert result.value("alibi", "shift", offset=256) <= ROUNDING
    tiny = build("BertForMaskedLM", **SIZES | {"max_position_embeddings": 4})
    for measure in (dog_test, sensitivity_test, quantization_test):
        with pytest.raises(SequenceLengthError, match="past the 4 positions"):
            measure(tiny, tokenizer)
    with pytest.raises(SequenceLengthError, match="past the 4 positions"):
        order_sensitivity(tiny, torch.arange(8).unsqueeze(0))


def test_positions_are_counted_as_the_model_counts_them(tokens):
    model = build("OPTForCausalLM", **SIZES)
    assert shifted_positions(model, tokens, offsets=(1,))[0].value > 1e-2
    patch_model(model, "alibi")
    assert shifted_positions(model, tokens, offsets=(1,))[0].value <= ROUNDING


def test_a_causal_model_tells_words_apart_by_its_mask(decoder, tokenizer, material):
    result = sensitivity_test(decoder, tokenizer, ["native", "none"], gaps=(2, 16), material=material)
    assert result.settings["causal"]
    # Each occurrence sees another prefix; the embeddings are still equal.
    assert result.value("none", "repeated", gap=2, layer=0) == 0
    assert result.value("none", "repeated", gap=2, layer=3) > 1e-2
    # After one layer the last word has seen the same words in either order, and the mask tells from the second on.
    assert result.value("none", "roles", layer=1) <= ROUNDING
    assert result.value("none", "roles", layer=2) > 1e-3
    assert result.value("native", "roles", layer=1) > 1e-3
    assert result.record("none", "sees_order").passed is None
    assert "mask" in result.table()
    assert "loss" in result.table()


def test_distances_are_those_of_single_sentences(encoder, tokens):
    found = repeated_words(encoder, tokens, [4])
    sentences, first = repeated_sentences(tokens, 4)
    single = [outputs_of(encoder, sentence[None]).states for sentence in sentences]
    expected = [
        sum(relative_l2(states[layer][0, first], states[layer][0, first + 4]) for states in single) / len(single)
        for layer in range(4)
    ]
    assert [record.value for record in found] == pytest.approx(expected, abs=1e-6)


def test_the_loss_of_a_shuffled_context_is_that_of_the_token_in_question(decoder, tokens):
    loss, *_ = permuted_context(decoder, tokens, causal=True, context=8, max_windows=3)
    frame, count = tokens.frame, tokens.passage.shape[0] - 10
    windows = torch.stack([tokens.passage[start : start + 10] for start in (0, count // 2, count)])
    assert (frame.before, loss.quantity, loss.count) == ((2,), "loss", 3)
    with torch.no_grad():
        logits = decoder(torch.cat([torch.full((3, 1), 2), windows[:, :9]], dim=1)).logits[:, -1]
    assert loss.value == pytest.approx(float(torch.nn.functional.cross_entropy(logits, windows[:, 9])), abs=1e-5)


def test_a_masked_model_predicts_the_masked_last_token(encoder, tokens):
    masked = dataclasses.replace(tokens, mask_token_id=1)
    found = permuted_context(patch_model(encoder, "none"), masked, causal=False, context=8, max_windows=4)
    changes = {record.quantity: record.value for record in found}
    assert changes.pop("loss") > 0
    assert list(changes) == ["shuffled", "shuffled_loss", "shuffled_block", "shuffled_block_loss"]
    assert max(map(abs, changes.values())) <= ROUNDING
    without_mask = permuted_context(encoder, tokens, causal=False, context=8, max_windows=4)
    assert [record.quantity for record in without_mask] == ["shuffled", "shuffled_block"]


def test_blocks_are_shuffled_by_themselves():
    order = shuffled_order(20, 8, 50, torch.Generator().manual_seed(0))
    assert order.sort(dim=1).values.equal(torch.arange(20).expand(50, 20))
    assert (order // 8).equal((torch.arange(20) // 8).expand(50, 20))
    assert not order.equal(torch.arange(20).expand(50, 20))
    whole = shuffled_order(20, 20, 50, torch.Generator().manual_seed(0))
    assert not (whole // 8).equal((torch.arange(20) // 8).expand(50, 20))


def test_words_the_tokenizer_does_not_know_are_named(byte_tokenizer, tokenizer, tokens, encoder):
    other, short = dataclasses.replace(ENGLISH, another="anotherword"), tokens.passage[:31]
    for message, measure in {
        "has 1 of the nouns .* with a Material of its words": lambda: tokenize_material(byte_tokenizer, ENGLISH),
        "the another 'anotherword'": lambda: tokenize_material(tokenizer, other),
        "at least 2": lambda: repeated_words(encoder, tokens, [1]),
        "one window needs 402": lambda: permuted_context(encoder, tokens, causal=False, context=400),
        "At least 2 tokens": lambda: permuted_context(encoder, tokens, causal=False, context=1),
        "at least 1": lambda: shifted_positions(encoder, tokens, offsets=(0,)),
        "one window needs 32": lambda: shifted_positions(encoder, dataclasses.replace(tokens, passage=short)),
    }.items():
        with pytest.raises(MeasurementError, match=message):
            measure()
