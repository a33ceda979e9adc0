from __future__ import annotations

import numpy as np
import pandas
import pytest

from training import compare
from training.errors import SettingsError
from training.study.corpus import load_corpus, unigram_cross_entropy
from training.study.settings import StudySettings


def settings(source, **changes) -> StudySettings:
    options = {"validation_fraction": 0.25} | changes
    return StudySettings(dataset_name=str(source), **options)


def test_split_is_by_whole_documents_and_loses_nothing(texts, tokenizer):
    corpus = load_corpus(settings(texts), tokenizer, 16, 64)
    end = tokenizer.eos_token
    parts = {name: tokenizer.decode(getattr(corpus, name).tokens).split(end)[:-1] for name in ("train", "validation")}
    written = sorted(path.read_text() for path in texts.iterdir())
    assert sorted(parts["train"] + parts["validation"]) == written
    assert len(parts["validation"]) == 2 == corpus.summary["validation_documents"]


def test_split_depends_on_the_seed_alone(texts, tokenizer):
    first, again, other = (load_corpus(settings(texts, split_seed=seed), tokenizer, 16, 64) for seed in (1, 1, 2))
    assert first.summary["digest"] == again.summary["digest"] != other.summary["digest"]


def test_a_table_of_texts(tmp_path, tokenizer):
    texts = ["First document, with some words in it, " * 4, "Second document, with other words in it, " * 4]
    pandas.DataFrame({"body": texts}).to_csv(tmp_path / "data.csv", index=False)
    corpus = load_corpus(settings(tmp_path / "data.csv", text_column="body"), tokenizer, 16, 64)
    assert len(corpus.train) + len(corpus.validation) == sum(len(text) + 1 for text in texts)


def test_too_small_corpus_says_how_many_tokens_there_are(tmp_path, tokenizer, capsys):
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text("short text")
    with pytest.raises(SettingsError, match=r"11 tokens in 1 document.*needs 64"):
        load_corpus(settings(tmp_path), tokenizer, 16, 64)
    out = tmp_path / "out"
    assert compare.main([f"--dataset_name={tmp_path}", f"--output_dir={out}"]) == 2
    assert "shorter --train_length" in capsys.readouterr().err
    assert not (out / "results.json").exists()


def test_the_paragraphs_of_a_single_text_are_its_documents(tmp_path, tokenizer):
    (tmp_path / "only.txt").write_text("\n\n".join(f"word{number}" for number in range(300)))
    (tmp_path / "blank.txt").write_text("  \n")
    corpus = load_corpus(settings(tmp_path), tokenizer, 16, 64)
    assert (corpus.train.documents, corpus.validation.documents) == (225, 75)


@pytest.mark.parametrize("text", ["  \n", "word" * 500])
def test_a_text_that_cannot_be_divided(tmp_path, tokenizer, text):
    (tmp_path / "only.txt").write_text(text)
    with pytest.raises(SettingsError, match=r"document\(s\) with text, but validation needs another one"):
        load_corpus(settings(tmp_path), tokenizer, 16, 64)


def test_unigram_cross_entropy_of_a_known_distribution():
    train = np.array([0] * 59 + [1] * 29 + [2] * 9, dtype=np.int32)
    expected = -(np.log(0.6) + np.log(0.3)) / 2
    assert unigram_cross_entropy(train, np.array([0, 1]), vocabulary=3) == pytest.approx(expected)
