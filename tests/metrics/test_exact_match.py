"""Exact match of decoders, and of encoder-decoders, whose encoder reads the prompt."""

import copy
import itertools

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, EncoderDecoderModel

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.generalization import (
    IGNORED,
    SYNTHETIC_TASKS,
    EncoderDecoderCollator,
    SyntheticExamples,
    compare_generalization,
    encode_example,
    get_task,
    held_out_examples,
)
from tests.metrics.conftest import train
from tests.models import tiny

TOKENIZER = ByT5Tokenizer()
VOCABULARY = len(TOKENIZER)


def build_llama(scheme="rope", **options):
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_key_value_heads": 4, "initializer_range": 0.2}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return patch_model(tiny("LlamaForCausalLM", vocab_size=VOCABULARY, **sizes, **ids), scheme, **options).eval()


def half_trained(model, collate=None):
    """A model that is right on some examples and wrong on others."""
    examples = SyntheticExamples("repeated_copy", range(1, 7), 0, TOKENIZER)
    return train(model, itertools.islice(DataLoader(examples, batch_size=32, collate_fn=collate), 120))


@pytest.fixture(scope="module")
def llama():
    return half_trained(build_llama())


@pytest.fixture(scope="module")
def marian():
    torch.manual_seed(0)
    one_layer = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
    model = tiny("MarianMTModel", vocab_size=VOCABULARY, init_std=0.2, **one_layer, **widths, **ids)
    return half_trained(patch_model(model, "rope"), EncoderDecoderCollator(0, 0))


def rows(model, lengths=range(1, 11), task="repeated_copy", quantity="exact_match", **options):
    return list(compare_generalization(model, TOKENIZER, task, lengths, **options).of(quantity=quantity))


def matches(*arguments, **options):
    return [row.value for row in rows(*arguments, **options)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "batch_size"), [("llama", 64), ("llama", 5), ("marian", 64)])
def test_teacher_forcing_is_greedy_decoding(request, name, batch_size):
    options = {"samples": 26, "batch_size": batch_size}
    forced = matches(request.getfixturevalue(name), **options)
    assert forced == matches(request.getfixturevalue(name), method="generate", **options)
    # A comparison of zeros or of ones would show nothing.
    assert any(0 < match < 1 for match in forced)
    assert max(forced) > 0.5 > min(forced)


def test_figures_agree_with_a_loop_by_hand(llama):
    (row,) = rows(llama, [4], samples=26, seed=5)
    right, right_tokens, tokens = 0, 0, 0
    for example in held_out_examples(SYNTHETIC_TASKS["repeated_copy"], 4, 26, seed=5):
        ids, labels = encode_example(TOKENIZER, example)
        with torch.no_grad():
            guesses = llama(torch.tensor([ids])).logits[0, :-1].argmax(-1)
        hits = [int(guess) == label for guess, label in zip(guesses, labels[1:], strict=True) if label != IGNORED]
        right += all(hits)
        right_tokens += sum(hits)
        tokens += len(hits)
    assert 0 < row.value == right / 26 < 1
    assert 0 <= row.low <= row.value <= row.high <= 1
    accuracy = {"quantity": "token_accuracy", "samples": 26, "seed": 5}
    assert matches(llama, [4], **accuracy) == pytest.approx([right_tokens / tokens])
    assert matches(llama, [4], samples=26, seed=5, method="generate") == [row.value]
    assert matches(llama, [4], method="generate", **accuracy) == []


def test_answers_of_unequal_lengths_share_a_test():
    kinds = {len(example.answer) for example in held_out_examples(get_task("addition"), 3, 40, seed=0)}
    assert kinds == {3, 4}
    assert rows(build_llama(), [3], "addition", samples=40)[0].count == 40


def test_the_result_as_table_and_as_data(llama):
    result = compare_generalization(llama, TOKENIZER, "repeated_copy", [1, 40, 2], samples=10)
    assert [record.at["length"] for record in result.of("rope", "exact_match")] == [1, 2, 40]
    assert result.record("rope", "held_out", length=1).passed is False
    table = result.table(markdown=True)
    assert "task 'repeated_copy'" in table
    assert table.count("\n| ") == 5  # headers, rule, three lengths


def gpt2():
    return tiny("GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=16).eval()


def bart():
    return tiny("BartForConditionalGeneration", vocab_size=VOCABULARY, max_position_embeddings=16).eval()


@pytest.mark.parametrize(
    ("build", "method", "reason"),
    [
        (lambda: build_llama("learned", num_positions=16), "teacher_forced", "16"),
        (gpt2, "teacher_forced", "Position 61 lies past the 16 positions"),
        (gpt2, "generate", "Position 61 lies past the 16 positions"),
        # The longer one of a prompt of 31 tokens and an answer of 31.
        (bart, "teacher_forced", "Position 30 lies past the 16 positions"),
    ],
)
def test_a_length_past_the_table_has_its_reason(build, method, reason):
    model = build()
    result = compare_generalization(model, TOKENIZER, "copy", [3, 30], samples=4, method=method)
    fits, ends = result.of(quantity="exact_match")
    assert fits.value is not None
    assert ends.value is None
    assert reason in ends.note
    assert ends.note.startswith("length 30: ")
    assert f"[1] {ends.note}" in result.table()
    # Studies need a value for each length, known or not.
    assert len(list(result.of(quantity="token_accuracy"))) == (2 if method == "teacher_forced" else 0)


def test_the_length_that_has_to_fit_an_encoder_decoder_is_that_of_prompt_or_answer(marian):
    """30 letters are a prompt of 31 tokens and an answer of 31, where a causal model would read 62."""
    model = patch_model(copy.deepcopy(marian), "learned", num_positions=31)
    fits, ends = rows(model, [30, 31], "copy", samples=4)
    assert fits.value is not None
    assert "31" in ends.note.removeprefix("length 31")


def test_a_scheme_that_grows_with_the_sequence_says_so():
    model = build_llama("normalized_integer")
    assert rows(model, [3], "copy", samples=4)[0].note
    assert not rows(model, [3], "copy", samples=4, method="generate")[0].note


def test_batches_are_what_an_encoder_decoder_makes_of_the_labels_itself(marian):
    """Marian shifts labels to the right when it gets no `decoder_input_ids`."""
    examples = SyntheticExamples("addition", None, 0, TOKENIZER)
    batch = EncoderDecoderCollator(0, 0)([examples[index] for index in range(8)])
    for index, (prompt, answer) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        assert TOKENIZER.decode(prompt[prompt != 0]) == examples.example(index).prompt
        assert TOKENIZER.decode(answer[answer != IGNORED]) == examples.example(index).answer + TOKENIZER.eos_token
    by_itself = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
    assert torch.equal(marian(**batch).loss, marian(**by_itself).loss)


def test_the_generation_config_of_the_model_changes_nothing(marian):
    options = {"lengths": [4, 6], "samples": 20}
    expected = matches(marian, **options)
    own = copy.deepcopy(marian.generation_config)
    bent = copy.deepcopy(own)
    letters = [[token] for token in TOKENIZER("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)["input_ids"]]
    bent.update(bad_words_ids=letters, num_beams=3, repetition_penalty=9.0, begin_suppress_tokens=[100, 101])
    bent.update(return_dict_in_generate=True, decoder_start_token_id=0)
    marian.generation_config = bent
    try:
        assert matches(marian, method="generate", **options) == expected
        assert marian.generation_config is bent
    finally:
        marian.generation_config = own
    assert max(expected) > 0.5


def test_a_model_with_adapters_writes_answers_too(marian):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(copy.deepcopy(marian), LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q_proj"]))
    options = {"lengths": [4], "samples": 20}
    assert matches(model.eval(), method="generate", **options) == matches(marian, **options)


def broken():
    model = build_llama()
    model.model.norm.weight.data[0] = float("nan")
    return model


def without_start():
    model = tiny("T5ForConditionalGeneration", vocab_size=VOCABULARY).eval()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    return model


def of_two_vocabularies():
    decoder = tiny("BertLMHeadModel", vocab_size=50, is_decoder=True, add_cross_attention=True)
    return EncoderDecoderModel(encoder=tiny("BertModel", vocab_size=VOCABULARY), decoder=decoder).eval()


def encoder():
    return tiny("BertLMHeadModel", vocab_size=VOCABULARY).eval()


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (build_llama, {"method": "beam"}, MeasurementError, "'beam'"),
        (build_llama, {"samples": 0}, MeasurementError, "samples is 0"),
        (build_llama, {"batch_size": 0}, MeasurementError, "batch_size is 0"),
        (build_llama, {"lengths": []}, MeasurementError, "No lengths"),
        (build_llama, {"lengths": [0]}, MeasurementError, "whole number"),
        (lambda: tiny("LlamaForCausalLM", vocab_size=50), {}, MeasurementError, "50 embeddings"),
        (of_two_vocabularies, {}, MeasurementError, "has 50 embeddings"),
        (broken, {}, MeasurementError, "not finite"),
        (without_start, {}, MeasurementError, "no decoder_start_token_id"),
        (encoder, {}, UnsupportedError, "sees later tokens"),
        (lambda: tiny("LlamaModel", vocab_size=VOCABULARY).eval(), {}, UnsupportedError, "no logits"),
        (lambda: tiny("T5Model", vocab_size=VOCABULARY).eval(), {}, UnsupportedError, "returns no logits"),
    ],
)
def test_what_cannot_be_measured_is_refused(build, options, error, message):
    with pytest.raises(error, match=message):
        rows(build(), **{"lengths": [3], "task": "copy", "samples": 4} | options)


def test_a_model_that_does_not_continue_a_text_is_a_row_where_schemes_are_compared():
    (subject,) = compare_generalization(encoder(), TOKENIZER, "copy", [3], ["native"]).subjects
    assert "sees later tokens" in subject.error
    decoder = tiny("BertLMHeadModel", vocab_size=VOCABULARY, is_decoder=True).eval()
    assert rows(decoder, [3], "copy", samples=4)[0].count == 4
