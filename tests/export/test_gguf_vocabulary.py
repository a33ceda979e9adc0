"""Tokenizers in GGUF files: the same tokens in llama.cpp, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from hf_posenc import UnsupportedError
from hf_posenc.export.export_model import export_model
from hf_posenc.export.gguf.vocabulary import vocabulary
from tests.export.gguf_cases import VOCABULARY, byte_tokenizer, tiny_llama, unigram_tokenizer, word_piece_tokenizer
from tests.models import word_tokenizer

pytest.importorskip("xllamacpp")


@pytest.fixture(autouse=True)
def few_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule that is tried takes a run of llama.cpp."""
    monkeypatch.setattr("hf_posenc.export.gguf.vocabulary._SPLITS", ("gpt-2", "smollm"))


def bytes_after(*steps: object) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=len(steps) == 1)]
    )


def test_the_rule_for_splitting_is_found() -> None:
    assert vocabulary(byte_tokenizer(), VOCABULARY)["ggml.pre"] == "gpt-2"
    digits = bytes_after(pre_tokenizers.Digits(individual_digits=True))
    assert vocabulary(byte_tokenizer(digits), VOCABULARY)["ggml.pre"] == "smollm"


def test_special_tokens_and_the_chat_template() -> None:
    found = vocabulary(byte_tokenizer(pad_token="</s>", chat_template="{{ messages }}"), VOCABULARY)
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"], found["ggml.padding_token_id"]) == (0, 1, 1)
    assert found["chat_template"] == "{{ messages }}"
    assert found["ggml.add_bos_token"] is False
    assert len(found["ggml.tokens"]) == len(found["ggml.token_type"]) == VOCABULARY
    assert found["ggml.token_type"][:3] == [3, 3, 1]
    assert found["ggml.tokens"][-1] == f"[PAD{VOCABULARY - 1}]"
    assert found["ggml.token_type"][-1] == 5


def changed(tokenizer: Any, **parts: object) -> Any:
    """A tokenizer with other parts behind it."""
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    return tokenizer


def with_added_token(**rule: bool) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("cat", **rule)])
    return tokenizer


PAIRS = pre_tokenizers.Split(Regex(".{1,2}"), "isolated")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda: byte_tokenizer(bytes_after(PAIRS, PAIRS)),
            r"gives the same tokens.*gpt-2: \d+ of \d+ strings differ; .*'onnx'",
        ),
        (lambda: changed(byte_tokenizer(), normalizer=normalizers.Lowercase()), "strings differ"),
        (partial(word_tokenizer, ["<unk>", "a"]), "'WordLevel', which cannot be written. Supported are byte-level BPE"),
        *(
            (partial(with_added_token, **{rule: True}), "no tokenizer that gives the same tokens")
            for rule in ("lstrip", "rstrip", "single_word")
        ),
        (lambda: changed(word_piece_tokenizer(), pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "strings differ"),
        (lambda: changed(byte_tokenizer(), model=models.BPE({"a": 0}, [])), "has no merges.*Export to 'onnx'"),
        # Then the tokenizer reads a line break as a space, and llama.cpp does not.
        (partial(unigram_tokenizer, normalized=False), r"'\\n' is \[1\] in the tokenizer"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(build: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){reason}"):
        vocabulary(build(), VOCABULARY)


def test_more_tokens_than_embeddings_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"but the model has 200 embeddings.*Call model.resize_token_embeddings"):
        vocabulary(byte_tokenizer(), 200)


def test_an_export_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"contains the tokenizer.*tokenizer=tokenizer"):
        export_model(tiny_llama(), tmp_path / "out", to="gguf")


@pytest.mark.parametrize(
    ("options", "lowercase", "strip_accents"),
    [({}, True, True), ({"do_lower_case": False}, False, False), ({"strip_accents": False}, True, False)],
    ids=["uncased", "cased", "accents"],
)
def test_word_pieces(options: dict[str, bool], lowercase: bool, strip_accents: bool) -> None:
    found = vocabulary(word_piece_tokenizer(**options), VOCABULARY)
    assert found["ggml.model"] == "bert"
    assert (found["ggml.normalizer.lowercase"], found["ggml.normalizer.strip_accents"]) == (lowercase, strip_accents)
    assert found["ggml.tokens"][:10] == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *("▁the", "▁dog", "▁do", "g", "s"),
    ]
    assert (found["ggml.bos_token_id"], found["ggml.seperator_token_id"]) == (2, 3)


def test_text_that_llama_cpp_reads_in_other_word_pieces_is_a_warning() -> None:
    hangul = "ᄒ ##ᅡ ##ᆫ ##ᄀ ##ᅮ ##ᆨ ##ᄋ ##ᅥ ᄆ ##ᅮ ##ᆫ ##ᄌ ##ᅡ ##ᆼ ##ᄌ"
    with pytest.warns(UserWarning, match="differently than this tokenizer: .*Korean"):
        assert vocabulary(word_piece_tokenizer(hangul), VOCABULARY)["ggml.model"] == "bert"
    # A tokenizer that keeps accents does not take Korean apart.
    assert vocabulary(word_piece_tokenizer(hangul, strip_accents=False), VOCABULARY)["ggml.model"] == "bert"


def test_unigram_pieces_have_scores_and_a_map_of_characters() -> None:
    found = vocabulary(unigram_tokenizer(), VOCABULARY)
    assert found["ggml.model"] == "t5"
    assert found["ggml.add_eos_token"] is True
    assert found["ggml.scores"][4:6] == [-3.0, -3.5]
    assert found["ggml.scores"][-1] == -10000.0
    assert len(found["ggml.scores"]) == VOCABULARY
    assert found["ggml.precompiled_charsmap"].endswith(b" \0fi\0")


def test_a_lost_map_of_characters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posenc.export.gguf.vocabulary._charsmap", lambda _: {})
    with pytest.raises(UnsupportedError, match="strings differ"):
        vocabulary(unigram_tokenizer(), VOCABULARY)
