"""Tokenizers as llama.cpp's metadata, and the check that llama.cpp gives the same tokens."""

from __future__ import annotations

import json
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gguf import TokenType

from hf_posenc.errors import UnsupportedError, warn_user
from hf_posenc.export.gguf.file import GgufForm, write_file
from hf_posenc.export.gguf.run import tokenize
from hf_posenc.export.models import unknown_tokens

#: llama.cpp's rules for splitting a text before byte-level BPE, in the order in which they are tried.
_SPLITS = (
    "gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken", "deepseek-llm", "deepseek-coder", "falcon", "bloom",
    "chatglm-bpe",
)  # fmt: skip
_KOREAN, _HINDI, _LONG = "한국어 문장", "हिन्दी में लिखा", "a" * 101
#: Strings on which rules for splitting differ: digits, contractions, spaces, scripts, symbols.
_AWKWARD = (
    "The dog chased another dog.", " leading", "trailing ", "two  spaces   three\tand a tab",
    "line\nbreak\n\n\nlast\r\n",
    "I'm we'LL they've don't IT'S", "12 345 6789 1234567890 3.14 1,000", "x1y22z333 v2.0",
    "MixedCase HTTPServer iPhone",
    "naïve café São Tomé", "Ελληνικά и русский", "日本語の文章です。", _KOREAN, _HINDI, "نص عربي", _LONG,
    "🙂👍🏽 emoji👨‍👩‍👧‍👦", "!!??...---___", "def f(x):\n    return x**2  # ok\n", "a@b.c https://example.org/?q=1&r=%20",
    "\u00a0non-breaking\u2003em", "e\u0301 combining", "\x00\x01\x7f", "½ ² Ⅷ ①", "", " ", "\n", "don’t “quote” — dash",
)  # fmt: skip
#: Text that llama.cpp reads differently with every WordPiece tokenizer, and with every one that strips accents, by the
#: string that shows it.
_WORD_PIECE = {
    _LONG: "words of more than 100 letters, which WordPiece reads as unknown",
}
_STRIPPED = {
    _KOREAN: "Korean, of which it drops letters",
    _HINDI: "Hindi and other scripts with vowel signs, which it drops",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
#: The mark of a piece inside a word in WordPiece, and that of the first piece of a word in llama.cpp.
_INSIDE, _START = "##", "\u2581"
_TO_ONNX = "Export to 'onnx', which is run with the transformers tokenizer."
#: Score of an embedding without a token.
_UNUSED_SCORE = -10000.0


def vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Returns a tokenizer as metadata, without the prefix "tokenizer.".

    llama.cpp has a fixed list of rules for splitting a text into words. The first rule that gives the same tokens on a
    set of awkward strings is taken. Known differences of llama.cpp that no rule can avoid are a warning.

    Args:
        tokenizer: a fast tokenizer of transformers.
        size: number of rows of the model's embeddings.

    Raises:
        UnsupportedError: if there is no tokenizer, or llama.cpp has none that gives the same tokens.
    """
    if tokenizer is None:
        raise UnsupportedError(
            "A GGUF file contains the tokenizer, and none was given. Save it in the folder of the model, or pass it: "
            "export_model(model, folder, to='gguf', tokenizer=tokenizer)."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} has no tokenizer.json, which the vocabulary is read from. Load it with "
            "AutoTokenizer.from_pretrained (a fast tokenizer). A tokenizer of bytes, such as ByT5's, has no such file: "
            "llama.cpp cannot run the model."
        )
    entries = _entries(tokenizer, size)
    texts = _texts(tokenizer)
    expected = [tokenizer(text)["input_ids"] for text in texts]
    differences = []
    for kind, metadata, known in _kinds(tokenizer, json.loads(backend.to_str()), entries):
        tokens = _tokens({**entries, **metadata}, texts, size)
        differing = [place for place, ids in enumerate(expected) if tokens[place] != ids]
        wrong = [place for place in differing if texts[place] not in known]
        if not wrong:
            if differing:
                warn_user(
                    "llama.cpp tokenizes some texts differently than this tokenizer: "
                    f"{'; '.join(known[texts[place]] for place in differing)}. For such text, tokenize with "
                    "transformers and give llama.cpp the tokens, or export to 'onnx'."
                )
            return {**entries, **metadata}
        place = min(wrong, key=lambda index: len(texts[index]))
        differences.append(
            f"- {kind}: {len(wrong)} of {len(texts)} strings differ; {texts[place]!r} is {expected[place][:12]} in "
            f"the tokenizer and {tokens[place][:12]} in llama.cpp"
        )
    raise UnsupportedError(
        f"llama.cpp has no tokenizer that gives the same tokens as this {type(tokenizer).__name__}:\n"
        + "\n".join(differences)
        + f"\nThe weights could be written, but texts would be tokenized differently. {_TO_ONNX}"
    )


def _entries(tokenizer: Any, size: int) -> dict[str, Any]:
    """Tokens, their types, special tokens and the chat template: the same for all kinds of tokenizers."""
    if problem := unknown_tokens(tokenizer, size):
        raise UnsupportedError(problem)
    tokens = [f"[PAD{place}]" for place in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for token, place in tokenizer.get_vocab().items():
        tokens[place], types[place] = token, int(TokenType.NORMAL)
    for place, added in tokenizer.added_tokens_decoder.items():
        tokens[place] = added.content
        types[place] = int(TokenType.CONTROL if added.special else TokenType.USER_DEFINED)
    entries: dict[str, Any] = {"ggml.tokens": tokens, "ggml.token_type": types}
    for name, key in _SPECIAL.items():
        token_id = getattr(tokenizer, f"{name}_token_id", None)
        if token_id is not None:
            entries[f"ggml.{key}_token_id"] = int(token_id)
    sample = tokenizer("a")["input_ids"]
    entries["ggml.add_bos_token"] = sample[:1] == [tokenizer.bos_token_id]
    entries["ggml.add_eos_token"] = sample[-1:] == [tokenizer.eos_token_id]
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        entries["chat_template"] = tokenizer.chat_template
    return entries


def _kinds(
    tokenizer: Any, description: dict[str, Any], entries: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """The tokenizers of llama.cpp that may be right, with a name for messages, and the awkward strings on which they
    are known to differ. Refuses a kind that this export does not write.
    """
    model = description["model"]
    kind, parts = model.get("type"), json.dumps([description.get("pre_tokenizer"), description.get("decoder")])
    if kind == "BPE" and "ByteLevel" in parts:
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        if not merges:
            raise UnsupportedError(
                f"The tokenizer {type(tokenizer).__name__} has no merges: it reads single bytes. llama.cpp loads a "
                f"byte-level BPE only with merges. {_TO_ONNX}"
            )
        for split in _SPLITS:
            yield f"gpt2 with {split}", {"ggml.model": "gpt2", "ggml.pre": split, "ggml.merges": merges}, {}
        return
    if kind == "WordPiece" and model["continuing_subword_prefix"] == _INSIDE:
        bounds = {"bos": tokenizer.cls_token_id, "eos": tokenizer.sep_token_id}
        pieces = {f"ggml.{name}_token_id": place for name, place in bounds.items() if place is not None}
        pieces |= {"ggml.model": "bert", "ggml.tokens": _marked(tokenizer, entries["ggml.tokens"])}
        changes = [*product((True, False), repeat=2)]
        normalizer = description.get("normalizer") or {}
        if normalizer.get("type") == "BertNormalizer":
            lower, strip = normalizer["lowercase"], normalizer["strip_accents"]
            changes = [(lower, lower if strip is None else strip)]
        for lowercase, strip_accents in changes:
            options = {"ggml.normalizer.lowercase": lowercase, "ggml.normalizer.strip_accents": strip_accents}
            name = f"bert with lowercase={lowercase} and strip_accents={strip_accents}"
            yield name, {**pieces, **options}, {**_WORD_PIECE, **(_STRIPPED if strip_accents else {})}
        return
    if kind == "Unigram" and not model["byte_fallback"]:
        scores = [score for _, score in model["vocab"]]
        padded = scores + [_UNUSED_SCORE] * (len(entries["ggml.tokens"]) - len(scores))
        pieces = {"ggml.model": "t5", "ggml.scores": padded, **_charsmap(description.get("normalizer"))}
        for prefix, merged in product((True, False), repeat=2):
            spaces = {"ggml.add_space_prefix": prefix, "ggml.remove_extra_whitespaces": merged}
            name = f"t5 with{'' if prefix else 'out'} a first space, {'merging' if merged else 'keeping'} spaces"
            yield name, {**pieces, **spaces}, {}
        return
    raise UnsupportedError(
        f"The tokenizer {type(tokenizer).__name__} is {kind!r}, which cannot be written. Supported are byte-level BPE "
        f"(as in GPT-2, Llama 3, Qwen2 and SmolLM2), WordPiece (BERT) and Unigram without bytes (T5). {_TO_ONNX}"
    )


def _marked(tokenizer: Any, tokens: list[str]) -> list[str]:
    """llama.cpp marks the first piece of a word, and WordPiece all others."""
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return [
        token if token in special else token.removeprefix(_INSIDE) if token.startswith(_INSIDE) else _START + token
        for token in tokens
    ]


def _charsmap(normalizer: dict[str, Any] | None) -> dict[str, bytes]:
    """The map of characters of a SentencePiece model, at any place among the normalizers."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    maps = [step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"]
    return {"ggml.precompiled_charsmap": b64decode(maps[0])} if maps and maps[0] else {}


def _texts(tokenizer: Any) -> list[str]:
    """The awkward strings, and text around added tokens. llama.cpp does not compose characters (NFC), so strings are
    compared as a tokenizer that does so reads them.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    composes = normalizer is not None and type(normalizer).__name__ == "NFC"
    texts = [normalizer.normalize_str(text) if composes else text for text in _AWKWARD]
    # llama.cpp cuts added tokens out of a text as they are: it strips no spaces around them, and finds them in words.
    added = tokenizer.added_tokens_decoder.values()
    unlike = [token.content for token in added if token.lstrip or token.rstrip or token.single_word]
    plain = [*tokenizer.all_special_tokens, *(token.content for token in added)]
    between = list(dict.fromkeys(token for token in [*unlike, *plain[:8]] if token))
    return [*texts, *(f"One{token}two {token} three" for token in between)]


def _tokens(entries: dict[str, Any], texts: list[str], size: int) -> list[list[int]]:
    """The tokens that llama.cpp gives, by a file with one small layer."""
    width, matrix, vector = 32, torch.zeros(32, 32), torch.ones(32)
    tensors = {"token_embd.weight": torch.zeros(size, width), "output_norm.weight": vector}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        tensors[f"blk.0.{name}.weight"] = matrix
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}.weight"] = vector
    sizes: dict[str, int | float | str | bool] = {
        "block_count": 1, "context_length": 256, "embedding_length": width, "feed_forward_length": width,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": size,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vocabulary.gguf")
        write_file(file, GgufForm("llama", sizes, tensors, carrier=""), entries, "f16", "vocabulary")
        return tokenize(file, texts)
