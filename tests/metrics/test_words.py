import pytest

from hf_posenc.metrics import MeasurementError, tokenize_pair

SENTENCE = "The dog chased another dog"


class SlowTokenizer:
    """A tokenizer without offsets, around a fast one that has them."""

    is_fast = False

    def __init__(self, fast):
        self.fast = fast
        self.encode = fast.encode
        self.convert_ids_to_tokens = fast.convert_ids_to_tokens

    def __call__(self, text, **options):
        assert not options
        return self.fast(text)


@pytest.fixture(params=["fast", "slow"])
def any_speed(request):
    return (lambda tokenizer: tokenizer) if request.param == "fast" else SlowTokenizer


def test_one_token_per_word(word_tokenizer, any_speed):
    pair = tokenize_pair(any_speed(word_tokenizer), SENTENCE, "dog")
    assert pair.tokens == ("[CLS]", "the", "dog", "chased", "another", "dog", "[SEP]")
    assert (pair.first, pair.second) == ((2,), (5,))
    assert pair.input_ids.shape == (1, 7)


def test_words_of_several_tokens(word_tokenizer, any_speed):
    pair = tokenize_pair(any_speed(word_tokenizer), "The fox chased another fox", "fox")
    assert pair.tokens[2:5] == ("f", "##o", "##x")
    assert (pair.first, pair.second) == ((2, 3, 4), (7, 8, 9))


def test_a_tokenizer_without_case_takes_a_capital_for_the_same(word_tokenizer, any_speed):
    pair = tokenize_pair(any_speed(word_tokenizer), "Dog chased another dog", "dog")
    assert (pair.first, pair.second) == ((1,), (4,))


def test_the_space_before_a_word_may_be_part_of_its_token(byte_tokenizer, any_speed):
    pair = tokenize_pair(any_speed(byte_tokenizer), SENTENCE, "dog")
    assert [pair.tokens[index] for index in (*pair.first, *pair.second)] == ["Ġdog", "Ġdog"]
    assert pair.first != pair.second


@pytest.mark.parametrize("sentence", ["dog chased another dog", "The Dog chased another dog"])
def test_occurrences_of_different_tokens_are_refused(byte_tokenizer, any_speed, sentence):
    with pytest.raises(MeasurementError, match=r"different tokens.*both follow a space"):
        tokenize_pair(any_speed(byte_tokenizer), sentence, "dog")


def test_only_whole_words_count(word_tokenizer):
    pair = tokenize_pair(word_tokenizer, "The cat ran after another dogcat cat", "cat")
    assert [pair.tokens[index] for index in pair.first + pair.second] == ["cat", "cat"]
    assert pair.second[0] == len(pair.tokens) - 2


def test_scripts_without_spaces(byte_tokenizer):
    pair = tokenize_pair(byte_tokenizer, "一只狗追另一只狗", "狗")
    assert len(pair.first) == len(pair.second) == 3  # bytes
    assert pair.first[0] < pair.second[0]


@pytest.mark.parametrize("sentence", ["The dog chased another cat", "", "The dogs chased another dog"])
def test_a_sentence_without_the_word_twice_is_refused(word_tokenizer, sentence):
    with pytest.raises(MeasurementError, match="The word 'dog' must occur twice"):
        tokenize_pair(word_tokenizer, sentence, "dog")


def test_an_empty_word_is_refused(word_tokenizer):
    with pytest.raises(MeasurementError, match="empty"):
        tokenize_pair(word_tokenizer, SENTENCE, " ")
