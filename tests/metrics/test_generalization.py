import re
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from hf_posenc import UnknownNameError
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.generalization import (
    IGNORED,
    SYNTHETIC_TASKS,
    Example,
    SyntheticExamples,
    encode_example,
    get_task,
    held_out_examples,
)
from hf_posenc.metrics.generalization.examples import is_held_out, is_split
from tests.metrics.conftest import build_byte_tokenizer, build_word_tokenizer

TASKS = sorted(SYNTHETIC_TASKS)
SUM = r"[1-9]\d{6}\+[1-9]\d{6}="


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


class TestTasks:
    @pytest.mark.parametrize(
        ("name", "prompt", "answer"),
        [
            ("repeated_copy", r"([a-z])\1{6}=", lambda prompt: prompt[:-1]),
            ("copy", r"[a-z]{7}=", lambda prompt: prompt[:-1]),
            ("reverse", r"[a-z]{7}=", lambda prompt: "".join(reversed(prompt[:-1]))),
            ("sorting", r"[a-z]{7}=", lambda prompt: "".join(sorted(prompt[:-1]))),
            ("addition", SUM, lambda prompt: str(sum(map(int, prompt[:-1].split("+"))))),
            ("reversed_addition", SUM, lambda prompt: str(sum(map(int, prompt[:-1].split("+"))))[::-1]),
            ("parity", r"[01]{7}=", lambda prompt: str(sum(map(int, prompt[:-1])) % 2)),
            ("passkey", r"(?=[a-z]*#\d{4}[a-z]*=).{12}=", lambda prompt: prompt[prompt.index("#") + 1 :][:4]),
            ("needle", r"([a-zA-Z]\d\d){7}\?[a-zA-Z]=", lambda prompt: prompt[prompt.index(prompt[-2]) + 1 :][:2]),
        ],
    )
    def test_problems_are_solved_as_by_hand(self, name, prompt, answer):
        generator = np.random.default_rng(0)
        drawn = [SYNTHETIC_TASKS[name].example(7, generator) for _ in range(200)]
        for example in drawn:
            assert re.fullmatch(prompt, example.prompt)
            assert example.answer == answer(example.prompt)
        assert len({example.prompt for example in drawn}) > (20 if name == "repeated_copy" else 100)

    @pytest.mark.parametrize("name", TASKS)
    def test_every_task_is_consistent_with_what_it_says_of_itself(self, name):
        task = SYNTHETIC_TASKS[name]
        assert task.name == name
        assert "arXiv:" in task.draw.__doc__
        assert max(task.test_lengths) >= 2 * max(task.train_lengths)
        assert min(task.test_lengths) <= max(task.train_lengths)  # what was learned is tested too
        for length in sorted({*task.train_lengths, *task.test_lengths}):
            generator = np.random.default_rng(length)
            examples = [task.example(length, generator) for _ in range(100)]
            sizes = [len(example.prompt + example.answer) for example in examples]
            # An addition of one digit rarely has a carry; every other size is the same for all.
            assert task.character_count(length) - 1 <= max(sizes) <= task.character_count(length)
            assert all(example.prompt.count("=") == 1 and example.prompt.endswith("=") for example in examples)
            assert all("=" not in example.answer for example in examples)

    @pytest.mark.parametrize("name", TASKS)
    def test_lengths_are_split_from_the_first_with_256_prompts(self, name):
        task, generator = SYNTHETIC_TASKS[name], np.random.default_rng(0)
        for length in range(1, 10):
            # Each of 256 prompts is missed by 20 * 256 draws with probability exp(-20).
            drawn = set()
            for _ in range(20 * 256):
                drawn.add(task.example(length, generator).prompt)
                if len(drawn) == 256:
                    break
            assert is_split(task, length) == (len(drawn) == 256)

    def test_parity_and_the_split_are_unrelated(self):
        task = SYNTHETIC_TASKS["parity"]
        counts = Counter(example.answer for example in held_out_examples(task, 30, 400, seed=0))
        assert 150 < counts["1"] < 250  # 5 standard deviations of 10

    def test_lengths_that_no_task_has_and_names_of_none(self):
        for length in (0, -1, 1.5, True, "3"):
            with pytest.raises(MeasurementError, match="whole number above 0"):
                SYNTHETIC_TASKS["copy"].example(length, np.random.default_rng(0))
        with pytest.raises(MeasurementError, match="at most 52"):
            held_out_examples(SYNTHETIC_TASKS["needle"], 53, 1, seed=0)
        with pytest.raises(UnknownNameError, match="Did you mean 'reverse'"):
            get_task("revers")


class TestTrainingExamples:
    @pytest.mark.parametrize("name", TASKS)
    def test_an_item_depends_on_seed_and_index_alone(self, tokenizer, name):
        first = SyntheticExamples(name, None, 3, tokenizer, size=100)
        again = SyntheticExamples(name, None, 3, tokenizer, size=1_000)
        expected = [first[index] for index in range(20)]
        for index in reversed(range(20)):
            assert all(torch.equal(expected[index][key], again[index][key]) for key in expected[index])
        other = SyntheticExamples(name, None, 4, tokenizer, size=100)
        assert [other.example(index) for index in range(100)] != [first.example(index) for index in range(100)]

    def test_every_block_of_items_holds_every_length_once(self, tokenizer):
        examples = SyntheticExamples("copy", [2, 4, 9], 0, tokenizer, size=300)
        lengths = [len(examples.example(index).answer) for index in range(300)]
        assert all(sorted(lengths[start : start + 3]) == [2, 4, 9] for start in range(0, 300, 3))
        assert len({tuple(lengths[start : start + 3]) for start in range(0, 300, 3)}) == 6  # in every order

    @pytest.mark.parametrize("name", TASKS)
    def test_nothing_that_is_tested_was_trained_on(self, tokenizer, name):
        task = SYNTHETIC_TASKS[name]
        examples = SyntheticExamples(task, None, 0, tokenizer, size=1_500)
        trained = {examples.example(index).prompt for index in range(1_500)}
        for length in task.train_lengths:
            tested = held_out_examples(task, length, 100, seed=1)
            assert len({example.prompt for example in tested}) == len(tested) >= (20 if is_split(task, length) else 2)
            if is_split(task, length):
                assert not trained & {example.prompt for example in tested}

    def test_the_split_takes_an_eighth_of_many_prompts_and_tests_few_completely(self):
        task, few = SYNTHETIC_TASKS["copy"], SYNTHETIC_TASKS["repeated_copy"]
        generator = np.random.default_rng(0)
        held = sum(is_held_out(task, 5, task.example(5, generator)) for _ in range(4_000))
        assert 400 < held < 600  # 500 expected, standard deviation 21
        assert not is_split(few, 5)
        assert len(held_out_examples(few, 5, 100, seed=0)) == 26

    def test_rows_are_padded_to_one_length(self, tokenizer):
        examples = SyntheticExamples("copy", [1, 3], 0, tokenizer, size=10)
        assert examples.row_length == 3 + 1 + 3 + 1  # text, separator, text, end
        for index in range(10):
            item, example = examples[index], examples.example(index)
            used = len(example.prompt + example.answer) + 1
            assert {len(row) for row in item.values()} == {8}
            assert item["attention_mask"].tolist() == [1] * used + [0] * (8 - used)
            assert (item["input_ids"][used:] == tokenizer.pad_token_id).all()
            assert (item["labels"][used:] == IGNORED).all()
            assert item["labels"][used - 1] == tokenizer.eos_token_id

    def test_what_no_items_have(self, tokenizer):
        # It is not cut.
        with pytest.raises(MeasurementError, match="row_length=8 or more"):
            SyntheticExamples("copy", [3], 0, tokenizer, row_length=7)[0]
        for index in (2, -1):
            with pytest.raises(IndexError):
                SyntheticExamples("copy", None, 0, tokenizer, size=2)[index]
        with pytest.raises(MeasurementError, match="size is 0"):
            SyntheticExamples("copy", None, 0, tokenizer, size=0)
        with pytest.raises(MeasurementError, match="No lengths"):
            SyntheticExamples("copy", [], 0, tokenizer)


class TestEncoding:
    def test_labels_are_the_answer_and_the_end(self, tokenizer):
        ids, labels = encode_example(tokenizer, Example("ab=", "ba"))
        assert ids == [*tokenizer("ab=ba", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert labels == [IGNORED] * 3 + ids[3:]

    def test_the_answer_is_the_same_tokens_after_every_prompt(self):
        tokenizer = build_byte_tokenizer(merged=("dog",))
        tokenizer.add_special_tokens({"eos_token": "<end>"})
        for prompt in ("a=", "a= "):
            ids, labels = encode_example(tokenizer, Example(prompt, "dog"))
            answer = [*tokenizer("dog")["input_ids"], tokenizer.eos_token_id]
            assert [label for label in labels if label != IGNORED] == answer
            assert len(ids) == len(labels)

    def test_a_start_token_is_kept_where_the_tokenizer_sets_one(self, tokenizer):
        from tokenizers import processors

        starting = build_byte_tokenizer()
        starting.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
        assert encode_example(starting, Example("ab=", "c"))[0][0] != starting.bos_token_id
        starting.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", starting.bos_token_id)]
        )
        ids, labels = encode_example(starting, Example("ab=", "c"))
        assert ids.count(starting.bos_token_id) == 1
        assert ids[0] == starting.bos_token_id
        assert labels[0] == IGNORED
        rows = SyntheticExamples("copy", [4], 0, starting)
        assert rows.row_length == len(encode_example(starting, rows.example(0))[0])

    def test_tokenizers_that_do_not_do(self, tokenizer):
        with pytest.raises(MeasurementError, match="cannot encode"):
            encode_example(build_word_tokenizer(), Example("a+b=", "c"))
        with pytest.raises(MeasurementError, match="no eos_token"):
            encode_example(build_byte_tokenizer(), Example("ab=", "c"))
