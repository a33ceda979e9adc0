"""The text of the study: this repository's own pages and code, which every copy of the kit has."""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.errors import BenchmarkError
from training.data.tokens import TokenStream
from training.study.corpus import Corpus

_ROOT = Path(__file__).resolve().parents[2]
_KINDS = (("docs", "*.md"), ("hf_posenc", "*.py"), ("training", "*.py"))
#: One file of so many is kept for validation.
_HELD_OUT = 16


def repository_text(tokenizer: PreTrainedTokenizerBase, most_files: int | None = None) -> Corpus:
    """Tokens of the repository's files, one document each, closed by the end token; held out are whole files.

    Args:
        tokenizer: with an end token.
        most_files: read no more than so many.

    Raises:
        BenchmarkError: if this is no checkout of the repository.
    """
    files = [file for folder, kind in _KINDS for file in sorted((_ROOT / folder).rglob(kind))]
    # In an order that has nothing to do with what is in them.
    files.sort(key=lambda file: hashlib.sha256(file.relative_to(_ROOT).as_posix().encode()).digest())
    files = files[:most_files]
    if len(files) < _HELD_OUT:
        raise BenchmarkError(
            f"{_ROOT} holds {len(files)} pages and modules: the study reads those of a checkout of the repository. Run "
            "the kit in one."
        )
    held_out = TokenStream.of_texts(_tokens(files[::_HELD_OUT], tokenizer))
    others = TokenStream.of_texts(_tokens([file for number, file in enumerate(files) if number % _HELD_OUT], tokenizer))
    return Corpus.of(others, held_out, "pages and code of this repository", tokenizer)


def _tokens(files: list[Path], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    texts = [file.read_text(encoding="utf-8") for file in files]
    found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [[*tokens, tokenizer.eos_token_id] for tokens in found]
