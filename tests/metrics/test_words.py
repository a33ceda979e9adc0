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


@pytest.mark.parametrize(
    ("tokenizer", "sentence", "word", "tokens", "places"),
    [
        ("word", SENTENCE, "dog", ("dog",), ((2,), (5,))),
        ("word", "The fox chased another fox", "fox", ("f", "##o", "##x"), ((2, 3, 4), (7, 8, 9))),
        # A tokenizer without case takes a capital for the same.
        ("word", "Dog chased another dog", "dog", ("dog",), ((1,), (4,))),
        # Only whole words count.
        ("word", "The cat ran after another dogcat cat", "cat", ("cat",), ((2,), (10,))),
        # The space before a word may be part of its token.
        ("byte", SENTENCE, "dog", ("Ġdog",), None),
        # Three bytes, in a script without spaces.
        ("byte", "一只狗追另一只狗", "狗", ("ç", "ĭ", "Ĺ"), ((6, 7, 8), (21, 22, 23))),
    ],
)
def test_both_occurrences_are_found(request, any_speed, tokenizer, sentence, word, tokens, places):
    pair = tokenize_pair(any_speed(request.getfixturevalue(f"{tokenizer}_tokenizer")), sentence, word)
    assert pair.input_ids.shape == (1, len(pair.tokens))
    for occurrence in (pair.first, pair.second):
        assert tuple(pair.tokens[index] for index in occurrence) == tokens
    assert (pair.first, pair.second) == places if places else pair.first < pair.second


@pytest.mark.parametrize("sentence", ["dog chased another dog", "The Dog chased another dog"])
def test_occurrences_of_different_tokens_are_refused(byte_tokenizer, any_speed, sentence):
    with pytest.raises(MeasurementError, match=r"different tokens.*both follow a space"):
        tokenize_pair(any_speed(byte_tokenizer), sentence, "dog")


@pytest.mark.parametrize(
    ("sentence", "word", "message"),
    [
        ("The dog chased another cat", "dog", "The word 'dog' must occur twice"),
        ("", "dog", "The word 'dog' must occur twice"),
        ("The dogs chased another dog", "dog", "The word 'dog' must occur twice"),
        (SENTENCE, " ", "empty"),
    ],
)
def test_a_sentence_without_the_word_twice_is_refused(word_tokenizer, sentence, word, message):
    with pytest.raises(MeasurementError, match=message):
        tokenize_pair(word_tokenizer, sentence, word)
