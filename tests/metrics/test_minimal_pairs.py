import json
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer

from hf_posenc import UnsupportedError
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.minimal_pairs import (
    ALL,
    TOKENS_PER_BATCH,
    MinimalPair,
    MinimalPairsTask,
    causal_scores,
    continues_word,
    encode_pairs,
    masked_scores,
    minimal_pairs_accuracy,
    read_minimal_pairs,
)
from tests.metrics.conftest import build, build_byte_tokenizer, build_word_tokenizer, train
from tests.models import tiny

BYTES = ByT5Tokenizer()
WORDS = ("the", "cat", "cats", "near", "dog", "dogs", "sees", "see", "it", "approve")


def write(folder: Path, examples, name="task.json", **fields) -> Path:
    path = folder / name
    path.write_text(json.dumps({"name": "agreement", "canary": "never train on this", "examples": examples, **fields}))
    return path


def agreement(prefix, right, wrong, comment=None):
    return {"input": prefix, "target_scores": {right: 1, wrong: 0}} | ({"comment": comment} if comment else {})


def masked_tokenizer():
    tokenizer = build_word_tokenizer(WORDS)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


def build_bert(tokenizer):
    return build("BertForMaskedLM", vocab_size=len(tokenizer), num_hidden_layers=2, initializer_range=0.3)


@pytest.fixture
def masked():
    """A masked model and its tokenizer."""
    tokenizer = masked_tokenizer()
    return build_bert(tokenizer), tokenizer


@pytest.fixture(scope="module")
def pairs():
    return MinimalPairsTask(
        "agreement",
        tuple(
            MinimalPair(f"the {first} near the {second} ", *verbs, conditions=(kind, f"{number}_{other}"))
            for first, number, verbs in (
                ("cat", "singular", ("sees", "see")),
                ("cats", "plural", ("see", "sees")),
            )
            for second, other in (("dog", "singular"), ("dogs", "plural"))
            for kind in ["congruent" if number == other else "incongruent"]
        ),
        skipped=2,
    )


def conditions(result):
    return [record.at["condition"] for record in result.of(quantity="accuracy")]


class TestReading:
    def test_agreement_with_its_conditions(self, tmp_path):
        examples = [
            agreement("The cat near the dogs ", "sees", "see", "singular_plural"),
            {"input": "The cats ", "target_scores": {"sees": 0, "see": 1}, "comment": "plural"},
            agreement("The dogs that the cats near the dogs", "see it", "sees it", "plural_plural_plural"),
            agreement("the dog", "sees", "see"),
            agreement("the dog", "sees", "see", "easy"),
        ]
        task = read_minimal_pairs(write(tmp_path, examples))
        assert (task.name, task.skipped) == ("agreement", 0)
        assert [pair.texts for pair in task.pairs] == [
            ("The cat near the dogs sees", "The cat near the dogs see"),
            ("The cats see", "The cats sees"),
            ("The dogs that the cats near the dogs see it", "The dogs that the cats near the dogs sees it"),
            ("the dog sees", "the dog see"),
            ("the dog sees", "the dog see"),
        ]
        assert [pair.conditions for pair in task.pairs] == [
            ("incongruent", "singular_plural"),
            ("plural",),
            ("congruent", "plural_plural_plural"),
            (),
            ("easy",),
        ]
        assert read_minimal_pairs(tmp_path) == task  # a folder with a task.json

    def test_sentences_in_two_orders(self, tmp_path):
        text = 'Which sentence has the correct adjective order: a " big red cat " b " red big cat " ?'
        other = 'Which sentence has the correct adjective order: a " red old dog " b " old red dog " ?'
        examples = [
            {"input": text, "target_scores": {"a": 1, "b": 0}},
            {"input": other, "target_scores": {"a": 0, "b": 1}},
        ]
        task = read_minimal_pairs(write(tmp_path, examples, name="hyperbaton.json"))
        assert [pair.texts for pair in task.pairs] == [("big red cat", "red big cat"), ("old red dog", "red old dog")]

    def test_what_is_no_pair_is_counted(self, tmp_path):
        examples = [
            agreement("the dog", "sees", "see"),
            {"input": "the dog", "target_scores": {"sees": 1}},
            {"input": "the dog", "target_scores": {"sees": 1, "see": 1}},
            {"input": "the dog", "target": "sees"},
            {"input": 'only " one sentence ', "target_scores": {"a": 1, "b": 0}},
        ]
        task = read_minimal_pairs(write(tmp_path, examples))
        assert (len(task.pairs), task.skipped) == (1, 4)

    @pytest.mark.parametrize(
        ("name", "content", "read", "message"),
        [
            ("other", "", "missing.json", r"no file .*pip download .*never train"),
            ("other", "", "", r"contains no task\.json.*pip download"),
            ("broken.json", "{", "broken.json", "is not JSON"),
            ("broken.json", "{", "", r"contains broken\.json: name one"),
            ("list.json", "[1]", "list.json", "no list of examples"),
            ("task.json", '{"examples": [{"input": "2+2", "target": "4"}]}', "", "None of the 1 examples"),
        ],
    )
    def test_files_that_do_not_do_say_what_would(self, tmp_path, name, content, read, message):
        (tmp_path / name).write_text(content)
        with pytest.raises(MeasurementError, match=message):
            read_minimal_pairs(tmp_path / read)


@pytest.mark.parametrize(
    ("tokenizer", "goes_on", "begins"),
    [
        # WordPiece marks what goes on.
        (build_word_tokenizer(WORDS), ["##s", "##a"], ["s", "the", "[SEP]"]),
        # Byte-level pairs mark what begins.
        (build_byte_tokenizer(merged=("dog",)), ["d", "7"], ["Ġdog", "Ġd", "Ġ", ".", "Ċ"]),
        (BYTES, ["a", "z"], [" ", ".", "\n", "</s>", "<extra_id_5>"]),
    ],
)
def test_tokens_that_go_on_with_a_word(tokenizer, goes_on, begins):
    flags = continues_word(tokenizer, len(tokenizer) + 3)
    for tokens, expected in ((goes_on, True), (begins, False)):
        assert [bool(flags[tokenizer.convert_tokens_to_ids(token)]) for token in tokens] == [expected] * len(tokens)
    assert not flags[len(tokenizer) :].any()


class TestCausalScores:
    @pytest.mark.parametrize("most", [1, TOKENS_PER_BATCH])
    def test_scores_agree_with_a_loop_by_hand(self, tiny_llama, monkeypatch, most):
        monkeypatch.setattr("hf_posenc.metrics.minimal_pairs.TOKENS_PER_BATCH", most)
        tokenizer, model = BYTES, tiny_llama(vocab_size=len(BYTES))
        # Texts of equal length share a batch, also if they are of different pairs.
        texts = [("a cows sees", "a cows see"), ("a cat sees", "a cat see"), ("a dog is it", "a dog are it")]
        shared_characters = (len("a cows see"), len("a cat see"), len("a dog "))
        with torch.no_grad():
            scores = causal_scores(model, tokenizer, encode_pairs(tokenizer, texts))
        for pair, shared, row in zip(texts, shared_characters, scores, strict=True):
            for text, score in zip(pair, row, strict=True):
                ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
                with torch.no_grad():
                    log_probs = model(ids).logits[0].double().log_softmax(-1)
                expected = sum(float(log_probs[place - 1, ids[0, place]]) for place in range(shared, len(text)))
                # Whatever is no letter or digit ends the word.
                letters = [index for index in range(3, 259) if chr(index - 3).isalnum() and index - 3 < 128]
                accented = [index for index in range(3, 259) if index - 3 >= 128 and chr(index - 3).isalnum()]
                ends = log_probs[-1].exp().sum() - log_probs[-1, letters + accented].exp().sum()
                assert float(score) == pytest.approx(expected + float(ends.log()), abs=1e-4)  # float32 logits

    def test_texts_without_a_shared_start_follow_the_token_that_begins_or_ends_a_text(self, tiny_llama):
        tokenizer, model = BYTES, tiny_llama(vocab_size=len(BYTES))
        pairs = encode_pairs(tokenizer, [("cat", "dog")])
        with torch.no_grad():
            scores = causal_scores(model, tokenizer, pairs)
            ids = torch.tensor([[tokenizer.eos_token_id, *pairs[0][0][:-1]]])
            log_probs = model(ids).logits[0].double().log_softmax(-1)
        followed = sum(float(log_probs[place, ids[0, place + 1]]) for place in range(3))
        assert float(scores[0, 0]) < followed  # the end of the word costs something more
        assert float(scores[0, 0]) == pytest.approx(followed, abs=3)
        with pytest.raises(MeasurementError, match="neither a bos_token nor an eos_token"):
            causal_scores(model, build_byte_tokenizer(), [([70], [71])])


class TestMaskedScores:
    def test_scores_agree_with_masking_by_hand(self, masked):
        model, tokenizer = masked
        texts = [("the cat approves it", "the cat approve it"), ("the cat sees it", "the cat see it")]
        tokens = [[tokenizer.convert_ids_to_tokens(ids) for ids in pair] for pair in encode_pairs(tokenizer, texts)]
        assert tokens[0][0] == ["[CLS]", "the", "cat", "approve", "##s", "it", "[SEP]"]
        with torch.no_grad():
            scores = masked_scores(model, tokenizer, encode_pairs(tokenizer, texts))

        def log_prob(words, masked, place):
            shown = ["[MASK]" if index in masked else word for index, word in enumerate(words)]
            ids = torch.tensor([tokenizer.convert_tokens_to_ids(shown)])
            with torch.no_grad():
                logits = model(ids).logits[0, place]
            return float(logits.double().log_softmax(-1)[tokenizer.convert_tokens_to_ids(words[place])])

        split = tokens[0][0]
        expected = log_prob(split, {3, 4}, 3) + log_prob(split, {4}, 4)
        assert float(scores[0, 0]) == pytest.approx(expected, abs=1e-4)
        assert float(scores[0, 1]) == pytest.approx(log_prob(tokens[0][1], {3}, 3), abs=1e-4)
        assert float(scores[1, 0]) == pytest.approx(log_prob(tokens[1][0], {3}, 3), abs=1e-4)


class TestAccuracy:
    def test_a_model_that_learned_the_grammar_passes_and_one_that_agrees_with_the_nearest_noun_does_not(
        self, tiny_llama, pairs
    ):
        tokenizer = build_word_tokenizer(WORDS)
        tokenizer.add_special_tokens({"eos_token": "[SEP]"})
        for nearest in (False, True):
            model = tiny_llama(vocab_size=len(tokenizer))
            sentences = []
            for pair in pairs.pairs:
                plural = pair.texts[0].split()[4 if nearest else 1].endswith("s")
                sentences.append(pair.prefix + ("see" if plural else "sees"))
            ids = torch.tensor([tokenizer(sentence)["input_ids"] for sentence in sentences])
            train(model, [{"input_ids": ids, "labels": ids}] * 60)
            result = minimal_pairs_accuracy(model, tokenizer, pairs)
            (scheme,) = result.labels
            assert result.value(scheme, "accuracy", condition="congruent") == 1
            assert result.value(scheme, "accuracy", condition="incongruent") == (0 if nearest else 1)
            assert result.value(scheme, "pairs", condition=ALL) == 4
            assert conditions(result) == [
                "all", "congruent", "incongruent",
                "plural_plural", "singular_singular", "plural_singular", "singular_plural",
            ]  # fmt: skip

    def test_a_choice_of_pairs_depends_on_the_seed_alone(self, masked, pairs):
        model, tokenizer = masked
        chosen = [minimal_pairs_accuracy(model, tokenizer, pairs, samples=2, seed=seed) for seed in (1, 1, 2, 3, 4)]
        assert chosen[0] == chosen[1]
        assert chosen[0].settings["scoring"] == "masked"
        assert (chosen[0].settings["pairs"], chosen[0].settings["of"]) == (2, 4)
        kinds = {tuple(conditions(result)) for result in chosen}
        assert len(kinds) > 1
        assert "2 of 4 pairs, seed 1" in chosen[0].table()
        assert "2 examples of the file" in chosen[0].table()

    def test_equally_likely_is_a_tie_and_not_right(self, masked, pairs):
        model, tokenizer = masked
        model.cls.predictions.decoder.weight.data.zero_()
        model.cls.predictions.decoder.bias.data.zero_()
        result = minimal_pairs_accuracy(model, tokenizer, pairs)
        assert result.value("native", "ties", condition=ALL) == 4
        assert result.value("native", "accuracy", condition=ALL) == 0

    def test_a_text_past_the_stock_table_has_its_reason(self):
        tokenizer = BYTES
        model = tiny("GPT2LMHeadModel", vocab_size=len(tokenizer), n_positions=16)
        task = MinimalPairsTask("long", (MinimalPair("a cat near a dog", "sees", "see"),))
        result = minimal_pairs_accuracy(model.eval(), tokenizer, task, ["native", "alibi"])
        assert "past the 16 positions" in result.subject("native").error
        assert result.value("alibi", "accuracy", condition=ALL) is not None

    def test_what_cannot_be_measured(self, masked, tiny_llama, pairs):
        model, tokenizer = masked
        broken = build_bert(tokenizer)
        broken.cls.predictions.decoder.bias.data[0] = float("nan")
        encoder_decoder = tiny("T5ForConditionalGeneration").eval()
        same = MinimalPairsTask("x", (MinimalPair("the", "%", "&"),))
        for arguments, options, message in (
            ((model, tokenizer, pairs), {"samples": 0}, "samples is 0"),
            ((model, tokenizer, same), {}, "the same tokens"),
            ((model, build_word_tokenizer(WORDS), pairs), {}, "no mask token"),
            ((tiny_llama(vocab_size=10), tokenizer, pairs), {}, "10 embeddings"),
            ((broken, tokenizer, pairs), {}, "not finite"),
            ((encoder_decoder, BYTES, pairs), {}, "encoder-decoder"),
        ):
            with pytest.raises((MeasurementError, UnsupportedError), match=message):
                minimal_pairs_accuracy(*arguments, **options)
