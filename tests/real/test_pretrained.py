"""Trained weights: the native scheme in place of the stock mechanism gives the same model."""

import contextlib
import math
import pydoc_data.topics

import pytest
import torch

from hf_posenc import native_scheme, patch_model, unpatch_model

pytestmark = pytest.mark.assets

WINDOW = 256
#: Enough for schemes that start as the stock one: every length gives the same.
PASSAGE = 128


@contextlib.contextmanager
def patched(model, scheme, **options):
    """The model with another scheme, which is undone afterwards."""
    patch_model(model, scheme, **options)
    try:
        yield
    finally:
        unpatch_model(model)


def perplexity(model, input_ids):
    """Of `input_ids`, `(1, tokens)`."""
    with torch.no_grad():
        return math.exp(model(input_ids, labels=input_ids, use_cache=False).loss.item())


SENTENCES = [
    "A man is eating food.",
    "A man eats a meal.",
    "The stock market fell today.",
    "The dog bites the man.",
    "The man bites the dog.",
]


def embed(model, tokenizer):
    """Mean-pooled unit vectors, `(sentences, hidden)`."""
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.fixture(scope="module")
def smollm2(smollm2_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text(smollm2_folder):
    """A window of the language reference that ships with Python."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    prose = "\n\n".join(pydoc_data.topics.topics[name] for name in ("objects", "naming", "exceptions"))
    return tokenizer(prose, return_tensors="pt")["input_ids"][:, :WINDOW]


@pytest.fixture(scope="module")
def stock(smollm2, text):
    return perplexity(smollm2, text)


@pytest.fixture(scope="module")
def stock_of_passage(smollm2, text):
    return perplexity(smollm2, text[:, :PASSAGE])


@pytest.fixture(scope="module")
def minilm(minilm_folder):
    from transformers import AutoModel

    return AutoModel.from_pretrained(minilm_folder).eval()


@pytest.fixture(scope="module")
def tokenizer(minilm_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm_folder)


class TestSmolLM2:
    def test_the_weights_are_trained_and_the_scheme_is_known(self, smollm2, text, stock):
        assert text.shape == (1, WINDOW)
        assert stock < 20
        assert native_scheme(smollm2).to_dict()["theta"] == 100_000.0

    def test_rope_at_another_theta_does_not(self, smollm2, text, stock):
        with patched(smollm2, "rope", theta=10_000.0):
            assert perplexity(smollm2, text) > 1.02 * stock

    def test_without_positions_the_perplexity_is_several_times_worse_and_undone_the_same_again(
        self, smollm2, text, stock
    ):
        before = smollm2(text[:, :32]).logits
        with patched(smollm2, "none"):
            assert perplexity(smollm2, text) > 4 * stock
        assert perplexity(smollm2, text) == stock
        assert torch.equal(smollm2(text[:, :32]).logits, before)

    @pytest.mark.parametrize(
        ("scheme", "options"),
        [
            *((name, {"theta": 100_000.0}) for name in ("rope", "string", "mrope", "learned_rope")),
            ("self_extend", {"group": 1, "window": 8}),
            ("rerope", {"factor": 1.0, "window": 8}),
            ("position_scale", {"factor": 1}),
        ],
    )
    def test_what_starts_as_its_own_rope_gives_the_stock_perplexity(
        self, smollm2, text, stock_of_passage, scheme, options
    ):
        with patched(smollm2, scheme, **({} if "theta" in options else {"inner": native_scheme(smollm2)}), **options):
            assert perplexity(smollm2, text[:, :PASSAGE]) == pytest.approx(stock_of_passage, rel=5e-5)

    def test_grouping_far_positions_costs_a_trained_model_little_and_squeezing_all_of_them_much(
        self, smollm2, text, stock
    ):
        """Self-Extend needs no training, linear interpolation does (arXiv:2401.01325, arXiv:2306.15595).

        Measured: stock 15.13; self_extend 1.009 times that, rerope 1.011, dual_chunk 1.042, position_scale by 1/4 6.67.
        """
        found = {}
        for name, options in (
            ("self_extend", {"group": 8, "window": 64}),
            ("rerope", {"window": 64}),
            ("dual_chunk", {"chunk_size": 96, "local_size": 16}),
            ("position_scale", {"factor": 0.25}),
        ):
            with patched(smollm2, name, inner=native_scheme(smollm2), **options):
                found[name] = perplexity(smollm2, text)
        assert 1.0 < found["self_extend"] / stock < 1.02
        assert 1.0 < found["rerope"] / stock < 1.03
        assert 1.0 < found["dual_chunk"] / stock < 1.05
        assert found["position_scale"] > 4 * stock


class TestMiniLM:
    def test_the_weights_are_trained(self, minilm, tokenizer):
        vectors = embed(minilm, tokenizer)
        assert vectors[0] @ vectors[1] > 0.85
        assert vectors[0] @ vectors[2] < 0.1
        assert native_scheme(minilm).name == "learned"

    def test_its_own_scheme_gives_the_stock_embeddings(self, minilm, tokenizer):
        stock = embed(minilm, tokenizer)
        with patched(minilm, native_scheme(minilm)):
            torch.testing.assert_close(embed(minilm, tokenizer), stock, atol=1e-5, rtol=0)

    def test_without_positions_word_order_is_gone_and_undone_it_is_back(self, minilm, tokenizer):
        stock = embed(minilm, tokenizer)
        assert stock[3] @ stock[4] < 0.9999
        with patched(minilm, "none"):
            blind = embed(minilm, tokenizer)
        # Sentences with the same words in another order are now equal, and every embedding has changed.
        assert blind[3] @ blind[4] > 1 - 1e-5
        assert ((stock * blind).sum(-1) < 0.99).all()
        assert torch.equal(embed(minilm, tokenizer), stock)
