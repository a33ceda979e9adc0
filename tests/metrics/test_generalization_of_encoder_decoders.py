"""Exact match of encoder-decoders, whose encoder reads the prompt."""

import copy
import itertools

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, EncoderDecoderModel

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.generalization import IGNORED, EncoderDecoderCollator, SyntheticExamples, exact_match
from tests.metrics.conftest import train
from tests.models import tiny


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


@pytest.fixture(scope="module")
def marian(tokenizer):
    """An encoder-decoder that is right on some examples and wrong on others."""
    torch.manual_seed(0)
    one_layer = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
    sizes = {"vocab_size": len(tokenizer), "init_std": 0.2, **one_layer, **widths}
    model = patch_model(tiny("MarianMTModel", **sizes, **ids), "rope")
    examples = SyntheticExamples("repeated_copy", range(1, 7), 0, tokenizer)
    loader = DataLoader(examples, batch_size=32, collate_fn=EncoderDecoderCollator(0, 0))
    return train(model, itertools.islice(loader, 250))


class TestEncoderDecoders:
    """The encoder reads the prompt, and the decoder writes the answer."""

    def test_batches_are_what_the_model_makes_of_the_labels_itself(self, tokenizer, marian):
        """Marian shifts labels to the right when it gets no `decoder_input_ids`."""
        examples = SyntheticExamples("addition", None, 0, tokenizer)
        rows = [examples[index] for index in range(8)]
        batch = EncoderDecoderCollator(0, 0)(rows)
        for row, index in zip(batch["input_ids"], range(8), strict=True):
            assert tokenizer.decode(row[row != 0]) == examples.example(index).prompt
        for row, index in zip(batch["labels"], range(8), strict=True):
            assert tokenizer.decode(row[row != IGNORED]) == examples.example(index).answer + tokenizer.eos_token
        by_itself = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
        assert torch.equal(marian(**batch).loss, marian(**by_itself).loss)

    def test_teacher_forcing_is_greedy_decoding(self, tokenizer, marian):
        options = {"lengths": range(1, 11), "samples": 26}
        forced = exact_match(marian, tokenizer, "repeated_copy", **options)
        decoded = exact_match(marian, tokenizer, "repeated_copy", method="generate", **options)
        matches = [row.exact_match for row in forced.rows]
        assert matches == [row.exact_match for row in decoded.rows]
        assert max(matches) > 0.5 > min(matches)

    def test_the_generation_config_of_the_model_changes_nothing(self, tokenizer, marian):
        options = {"lengths": [4, 6], "samples": 20}
        expected = [row.exact_match for row in exact_match(marian, tokenizer, "repeated_copy", **options).rows]
        own = copy.deepcopy(marian.generation_config)
        bent = copy.deepcopy(own)
        letters = [[token] for token in tokenizer("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)["input_ids"]]
        bent.update(bad_words_ids=letters, num_beams=3, repetition_penalty=9.0, begin_suppress_tokens=[100, 101])
        bent.update(return_dict_in_generate=True, decoder_start_token_id=0)
        marian.generation_config = bent
        try:
            found = exact_match(marian, tokenizer, "repeated_copy", method="generate", **options)
            assert marian.generation_config is bent
        finally:
            marian.generation_config = own
        assert [row.exact_match for row in found.rows] == expected
        assert max(expected) > 0.5

    def test_a_model_with_adapters_writes_answers_too(self, tokenizer, marian):
        from peft import LoraConfig, get_peft_model

        options = {"lengths": [4], "samples": 20}
        forced = exact_match(marian, tokenizer, "repeated_copy", **options).row(4).exact_match
        model = get_peft_model(copy.deepcopy(marian), LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q_proj"]))
        found = exact_match(model.eval(), tokenizer, "repeated_copy", method="generate", **options)
        assert found.row(4).exact_match == forced

    def test_the_length_that_has_to_fit_is_that_of_prompt_or_answer(self, tokenizer, marian):
        """30 letters are a prompt of 31 tokens and an answer of 31, where a causal model would read 62."""
        model = patch_model(copy.deepcopy(marian), "learned", num_positions=31)
        assert exact_match(model, tokenizer, "copy", [30], samples=4).row(30).exact_match is not None
        assert "31" in exact_match(model, tokenizer, "copy", [31], samples=4).row(31).reason

    def test_the_stock_table_of_the_decoder_ends(self, tokenizer):
        bart = tiny("BartForConditionalGeneration", vocab_size=len(tokenizer), max_position_embeddings=16).eval()
        result = exact_match(bart, tokenizer, "copy", [3, 30], samples=4)
        assert result.row(3).exact_match is not None
        assert "Position 30 lies past the 16 positions" in result.row(30).reason

    def test_models_that_write_no_answer(self, tokenizer):
        with pytest.raises(UnsupportedError, match="returns no logits"):
            exact_match(tiny("T5Model", vocab_size=len(tokenizer)).eval(), tokenizer, "copy", [3], samples=4)
        model = tiny("T5ForConditionalGeneration", vocab_size=len(tokenizer)).eval()
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
        with pytest.raises(MeasurementError, match="no decoder_start_token_id"):
            exact_match(model, tokenizer, "copy", [3], samples=4)

    def test_the_decoder_has_to_know_the_tokens_too(self, tokenizer):
        encoder = tiny("BertModel", vocab_size=len(tokenizer))
        decoder = tiny("BertLMHeadModel", vocab_size=50, is_decoder=True, add_cross_attention=True)
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
        with pytest.raises(MeasurementError, match="has 50 embeddings"):
            exact_match(model, tokenizer, "copy", [3], samples=4)
