"""Exact match of encoder-decoders, whose encoder reads the prompt."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    ByT5Tokenizer,
    EncoderDecoderModel,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
)

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.generalization import (
    IGNORED,
    EncoderDecoderCollator,
    SyntheticExamples,
    exact_match,
)


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


@pytest.fixture(scope="module")
def marian(tokenizer):
    """An encoder-decoder that is right on some examples and wrong on others."""
    torch.manual_seed(0)
    layers = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "ffn_dim")}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    sizes = layers | heads | {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.2}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
    config = MarianConfig(vocab_size=len(tokenizer), **sizes, **ids, max_position_embeddings=64, dropout=0.0)
    model = patch_model(MarianMTModel(config), "rope")
    examples = SyntheticExamples("repeated_copy", range(1, 7), 0, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(examples, batch_size=32, collate_fn=EncoderDecoderCollator(0, 0))
    for _, batch in zip(range(250), loader, strict=False):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


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
        torch.manual_seed(0)
        sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
        bart = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **sizes, **heads)).eval()
        result = exact_match(bart, tokenizer, "copy", [3, 30], samples=4)
        assert result.row(3).exact_match is not None
        assert "Position 30 lies past the 16 positions" in result.row(30).reason

    def test_models_that_write_no_answer(self, tokenizer):
        sizes = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1}
        with pytest.raises(UnsupportedError, match="returns no logits"):
            exact_match(T5Model(T5Config(**sizes, decoder_start_token_id=0)).eval(), tokenizer, "copy", [3], samples=4)
        model = T5ForConditionalGeneration(T5Config(**sizes)).eval()
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
        with pytest.raises(MeasurementError, match="no decoder_start_token_id"):
            exact_match(model, tokenizer, "copy", [3], samples=4)

    def test_the_decoder_has_to_know_the_tokens_too(self, tokenizer):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        encoder = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes))
        decoder = BertLMHeadModel(BertConfig(vocab_size=50, is_decoder=True, add_cross_attention=True, **sizes))
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
        with pytest.raises(MeasurementError, match="has 50 embeddings"):
            exact_match(model, tokenizer, "copy", [3], samples=4)
