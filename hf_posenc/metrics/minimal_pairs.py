"""Grammar in minimal pairs: does a model give the right text of a pair the higher probability?"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.evaluation import digest, evaluation_result, measure_schemes
from hf_posenc.metrics.forward import check_vocabulary, logits_of, predicts_next_token, refuse_encoder_decoder
from hf_posenc.metrics.statistics import wilson_interval
from hf_posenc.report.records import Quantity, Record, Result
from hf_posenc.schemes.config import SchemeConfig

HOW_TO_GET = (
    "The files are in the source archive of the package bigbench (358 MB): `pip download --no-deps --no-binary :all: "
    "bigbench==1.0.0`, then `tar -xzf bigbench-1.0.0.tar.gz --wildcards '*/subject_verb_agreement/*' "
    "'*/hyperbaton/*'`, which puts them into bigbench-1.0.0/bigbench/benchmark_tasks. They are test data: never train "
    "on them, and do not copy them into a repository."
)

_QUOTED = re.compile(r'"\s*(.*?)\s*"')


@dataclass(frozen=True)
class MinimalPair:
    """Two texts that differ in one place, one of which is right.

    Args:
        prefix: the beginning of both; may be empty.
        right: the continuation that is grammatical.
        wrong: the other continuation.
        conditions: the groups in which the pair is counted.
    """

    prefix: str
    right: str
    wrong: str
    conditions: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, str]:
        """The right text and the wrong one, in full."""
        space = " " if self.prefix and not self.prefix.endswith(" ") else ""
        return f"{self.prefix}{space}{self.right}".strip(), f"{self.prefix}{space}{self.wrong}".strip()


@dataclass(frozen=True)
class MinimalPairsTask:
    """The pairs of one file.

    Args:
        name: name of the task in the file.
        pairs: the pairs, in the order of the file.
        skipped: number of examples in the file that are not a pair of a right and a wrong text.
    """

    name: str
    pairs: tuple[MinimalPair, ...]
    skipped: int = 0


def read_minimal_pairs(path: str | Path) -> MinimalPairsTask:
    """Reads a task file of BIG-bench (Srivastava et al., arXiv:2206.04615), in place.

    Two kinds are supported. Subject-verb agreement (Lakretz et al., arXiv:2006.11098, and others) has a prefix and two
    verbs. If `comment` gives the numbers of its nouns (`"singular_plural"`), the pair belongs to that condition. It
    also belongs to `"incongruent"` if a noun differs in number from the others, which makes it an attractor, and
    otherwise to `"congruent"`. Hyperbaton has two sentences in quotation marks, with the same words in two orders.

    Args:
        path: the JSON file, or a folder that contains it as `task.json`.

    Raises:
        MeasurementError: if the file does not exist or contains no pairs.
    """
    file = _task_file(Path(path))
    try:
        task = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MeasurementError(f"{file} is not JSON: {error}") from error
    examples = task.get("examples") if isinstance(task, dict) else None
    if not isinstance(examples, list) or not examples:
        raise MeasurementError(f"{file} has no list of examples, so it is not a JSON task of BIG-bench. {HOW_TO_GET}")
    pairs = tuple(pair for example in examples if (pair := _pair(example)) is not None)
    if not pairs:
        raise MeasurementError(
            f"None of the {len(examples)} examples of {file} is a minimal pair, which needs an input and target_scores "
            f"for two texts, one with score 1 and one with 0. The first example: {str(examples[0])[:200]}"
        )
    return MinimalPairsTask(str(task.get("name", file.stem)), pairs, len(examples) - len(pairs))


def _task_file(path: Path) -> Path:
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.json")))
        if not (path / "task.json").is_file():
            listed = f"It contains {inside}: name one of them." if inside else HOW_TO_GET
            raise MeasurementError(f"The folder {path} contains no task.json. {listed}")
        path = path / "task.json"
    if not path.is_file():
        raise MeasurementError(f"There is no file {path}. {HOW_TO_GET}")
    return path


def _pair(example: Any) -> MinimalPair | None:
    """Returns the pair in an example, or `None` if there is none."""
    if not isinstance(example, dict) or not isinstance(example.get("input"), str):
        return None
    scores = example.get("target_scores")
    if not isinstance(scores, dict) or [score for score in scores.values() if score in (0, 1)] not in ([0, 1], [1, 0]):
        return None
    right, wrong = sorted(scores, key=lambda target: -scores[target])
    if {right, wrong} == {"a", "b"}:
        quoted = _QUOTED.findall(example["input"])
        if len(quoted) != 2:
            return None
        return MinimalPair("", *(quoted if right == "a" else quoted[::-1]))
    comment = example.get("comment")
    comment = comment if isinstance(comment, str) else ""
    numbers = set(comment.split("_"))
    conditions: tuple[str, ...] = (comment,) if comment else ()
    if "_" in comment and numbers <= {"singular", "plural"}:
        conditions = ("congruent" if len(numbers) == 1 else "incongruent", comment)
    return MinimalPair(example["input"], right, wrong, conditions)


#: The condition to which every pair belongs.
ALL = "all"


def minimal_pairs_accuracy(
    model: Any,
    tokenizer: Any,
    task: str | Path | MinimalPairsTask,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
) -> Result:
    """Measures how often a language model gives the right text of a minimal pair the higher probability.

    A causal model scores a pair by log-probabilities (`causal_scores`), a masked one by pseudo-log-likelihoods
    (`masked_scores`). The kind of a model is measured. The model is left unchanged, also after an error.

    Args:
        model: a causal or masked language model, patched or not.
        tokenizer: its tokenizer.
        task: the path of a BIG-bench file (see `read_minimal_pairs`), or a task that was read from one.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        samples: number of pairs to score, drawn without replacement; `None` scores all.
        seed: seed of new scheme weights and of the draw of pairs, which is the same for every scheme and model.

    Returns:
        For each scheme and `condition` (`"all"` for every pair), the `accuracy` with its 95 % Wilson interval, and the
        numbers of `pairs` and of `ties`. If the architecture cannot take a scheme, or the scheme cannot represent a
        text this long, the `error` of its subject has the reason.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if the task cannot be read, or the tokenizer cannot be used with it.
        UnsupportedError: for an encoder-decoder, or a model without logits.
    """
    refuse_encoder_decoder(model)
    if not isinstance(task, MinimalPairsTask):
        task = read_minimal_pairs(task)
    pairs, of = list(task.pairs), len(task.pairs)
    if samples is not None and samples < of:
        if samples < 1:
            raise MeasurementError(f"samples is {samples}; a measurement needs at least one pair.")
        pairs = [pairs[index] for index in sorted(np.random.default_rng(seed).permutation(of)[:samples])]
    tokens = encode_pairs(tokenizer, [pair.texts for pair in pairs])
    check_vocabulary(model, *(max(side) for pair in tokens for side in pair))
    causal = predicts_next_token(model, torch.tensor([max((side for pair in tokens for side in pair), key=len)]))
    score = causal_scores if causal else masked_scores

    def measure(model: Any) -> list[Record]:
        return _by_condition(pairs, score(model, tokenizer, tokens))

    scoring = "causal" if causal else "masked"
    chosen = f"{len(pairs)} of {of} pairs, seed {seed}" if len(pairs) < of else f"{of} pairs"
    skipped = f"{task.skipped} examples of the file are not a pair of a right and a wrong text and were skipped."
    return evaluation_result(
        "minimal_pairs",
        f", minimal pairs {task.name!r} ({scoring} scoring, {chosen})",
        model,
        measure_schemes(model, schemes, measure, seed=seed),
        (
            Quantity("pairs", "pairs", style="count"),
            Quantity("accuracy", "accuracy", "Chance is 0.5. A tie is not right.", style="fraction"),
            Quantity("ties", "ties", style="count"),
        ),
        rows=("condition",),
        settings={
            "data": digest(*itertools.chain.from_iterable(pair.texts for pair in pairs)),
            "task": task.name,
            "scoring": scoring,
            "pairs": len(pairs),
            "of": of,
            "seed": seed,
        },
        remarks=(skipped,) if task.skipped else (),
    )


def _by_condition(pairs: Sequence[MinimalPair], scores: Tensor) -> list[Record]:
    right, tied = (scores[:, 0] > scores[:, 1]).tolist(), (scores[:, 0] == scores[:, 1]).tolist()
    groups: dict[str, list[int]] = {ALL: list(range(len(pairs)))}
    # Congruent and incongruent come before the conditions that they consist of.
    conditions = [(index, pair.conditions) for index, pair in enumerate(pairs)]
    named = [(depth, names, name, index) for index, names in conditions for depth, name in enumerate(names)]
    for _, _, name, index in sorted(named):
        groups.setdefault(name, []).append(index)
    records = []
    for name, group in groups.items():
        count, at = len(group), {"condition": name}
        hits = sum(right[index] for index in group)
        low, high = wilson_interval(hits, count)
        records += [
            Record("", "pairs", count, at),
            Record("", "accuracy", hits / count, at, low, high, count),
            Record("", "ties", sum(tied[index] for index in group), at),
        ]
    return records


#: Tokens per forward call. It bounds memory, because logits are as wide as the vocabulary.
TOKENS_PER_BATCH = 1024

_SPACE_MARKS = ("Ġ", "▁", " ")
#: Byte-level BPE writes the bytes 0 to 32 and 127 (spaces and control characters) as the letters in this range.
_BYTE_LEVEL_SPACES = ("\u0100", "\u0121")

#: The two texts of a pair as tokens, the right one first.
TokenPair = tuple[list[int], list[int]]


def encode_pairs(tokenizer: Any, texts: Sequence[tuple[str, str]]) -> list[TokenPair]:
    """Tokenizes the texts, with the special tokens that the tokenizer puts around a text.

    Raises:
        MeasurementError: if both texts of a pair have the same tokens, or a text has none.
    """
    pairs: list[TokenPair] = []
    for right, wrong in texts:
        tokens = tuple(list(tokenizer(text)["input_ids"]) for text in (right, wrong))
        if tokens[0] == tokens[1] or not all(tokens):
            raise MeasurementError(
                f"{type(tokenizer).__name__} gives the same tokens for {right!r} and {wrong!r}: "
                f"{tokenizer.convert_ids_to_tokens(tokens[0])}. Use a tokenizer that distinguishes the two."
            )
        pairs.append((tokens[0], tokens[1]))
    return pairs


def causal_scores(model: Any, tokenizer: Any, pairs: Sequence[TokenPair]) -> Tensor:
    """Log-probability of what each text does not share with the other, and of the end of its last word.

    The shared beginning is equally likely in both and is omitted. The end of the last word counts, because a tokenizer
    may encode one verb as the beginning of the other (`approve`, `approve` `s`), which could then never be less likely
    (Pimentel and Meister, arXiv:2406.14561; Oh and Schuler, arXiv:2406.10851). If the first tokens already differ, both
    texts follow the token that begins or ends a text, as in lm-evaluation-harness.

    Returns `(pairs, 2)` float64, the right text first.
    """
    end = tokenizer.eos_token_id
    jobs: list[tuple[list[int], int]] = []
    for pair in pairs:
        # An end token from the tokenizer would come between the word and its end, which is scored here.
        right, wrong = (tokens[:-1] if end is not None and tokens[-1:] == [end] else tokens for tokens in pair)
        shared = _shared_start(right, wrong)
        start = [] if shared else [_start_token(tokenizer)]
        jobs += [(start + tokens, max(shared, 1)) for tokens in (right, wrong)]
    goes_on = continues_word(tokenizer, _vocabulary(model))
    scores = torch.empty(len(jobs), dtype=torch.float64)
    for indices in _equally_long([tokens for tokens, _ in jobs]):
        ids = torch.tensor([jobs[index][0] for index in indices])
        first = min(jobs[index][1] for index in indices)
        log_probs = _log_probs(model, ids)[:, first - 1 :].cpu()
        followed = log_probs[:, :-1].gather(2, ids[:, first:, None])[..., 0]
        ends = log_probs[:, -1].masked_fill(goes_on, -torch.inf).logsumexp(dim=-1)
        for row, index in enumerate(indices):
            scores[index] = followed[row, jobs[index][1] - first :].double().sum() + ends[row].double()
    return scores.view(-1, 2)


def masked_scores(model: Any, tokenizer: Any, pairs: Sequence[TokenPair]) -> Tensor:
    """Pseudo-log-likelihood of the words in which two texts differ (Salazar et al., arXiv:1910.14659).

    Each token of these words is predicted with itself and those to its right masked, because a token of the same word
    reveals the others (Kauf and Ivanova, arXiv:2305.10588, "PLL-word-l2r", here for all differing words at once).

    Returns `(pairs, 2)` float64, the right text first.
    """
    if tokenizer.mask_token_id is None:
        raise MeasurementError(
            f"{type(tokenizer).__name__} has no mask token, but the model is not causal and can only be scored with "
            f"masked tokens. Set tokenizer.mask_token to the one that the model was trained with."
        )
    goes_on = continues_word(tokenizer, _vocabulary(model)).tolist()
    inputs: list[list[int]] = []
    wanted: list[tuple[int, int, int]] = []
    for number, pair in enumerate(pairs):
        start, tail = _differing_words(pair, goes_on)
        for side, tokens in enumerate(pair):
            stop = len(tokens) - tail
            for place in range(start, stop):
                inputs.append([*tokens[:place], *[tokenizer.mask_token_id] * (stop - place), *tokens[stop:]])
                wanted.append((2 * number + side, place, tokens[place]))
    scores = torch.zeros(2 * len(pairs), dtype=torch.float64)
    for indices in _equally_long(inputs):
        log_probs = _log_probs(model, torch.tensor([inputs[index] for index in indices])).cpu()
        for row, index in enumerate(indices):
            text, place, token = wanted[index]
            scores[text] += log_probs[row, place, token].double()
    return scores.view(-1, 2)


def continues_word(tokenizer: Any, vocabulary: int) -> Tensor:
    """Returns which of `vocabulary` tokens continue the word before them, bool.

    The others begin a word, are punctuation, or end the text. WordPiece marks tokens that continue (`##s`), byte-level
    BPE and SentencePiece those that begin (`Ġthe`, `▁the`). With bytes or characters, every letter continues.
    """
    special = set(tokenizer.all_special_ids)
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(min(vocabulary, len(tokenizer)))))]
    byte_level = any(token.startswith("Ġ") for token in tokens)
    marked = [token.startswith("##") and len(token) > 2 for token in tokens]
    if not any(marked) or any(token.startswith(_SPACE_MARKS[:2]) for token in tokens):
        first, last = _BYTE_LEVEL_SPACES
        marked = [
            token[:1].isalnum()
            and not token.startswith(_SPACE_MARKS)
            and not (byte_level and first <= token[:1] <= last)
            for token in tokens
        ]
    flags = torch.zeros(vocabulary, dtype=torch.bool)
    flags[: len(tokens)] = torch.tensor([mark and index not in special for index, mark in enumerate(marked)])
    return flags


def _differing_words(pair: TokenPair, goes_on: Sequence[bool]) -> tuple[int, int]:
    """Returns the number of tokens before, and after, the whole words in which two texts differ."""
    right, wrong = pair
    start = _shared_start(right, wrong)
    tail = _shared_start(right[start:][::-1], wrong[start:][::-1])
    # A token that continues a word belongs to it, and so does the token before it.
    while start > 0 and any(
        (start < len(tokens) - tail and goes_on[tokens[start]]) or start == len(tokens) - tail for tokens in pair
    ):
        start -= 1
    while tail > 0 and goes_on[right[len(right) - tail]]:
        tail -= 1
    return start, tail


def _shared_start(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens at the start that both share."""
    return len(list(itertools.takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False))))


def _start_token(tokenizer: Any) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise MeasurementError(
        f"Two texts differ from their first token on, and {type(tokenizer).__name__} has neither a bos_token nor an "
        f"eos_token that they could follow. Set tokenizer.bos_token."
    )


def _vocabulary(model: Any) -> int:
    table = model.get_output_embeddings() or model.get_input_embeddings()
    return int(table.weight.shape[0])


def _equally_long(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns indices of rows that share a forward call. They are equally long, so nothing is padded."""
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        length = len(rows[index])
        if not batches or len(rows[batches[-1][0]]) != length or (len(batches[-1]) + 1) * length > TOKENS_PER_BATCH:
            batches.append([])
        batches[-1].append(index)
    return batches


def _log_probs(model: Any, ids: Tensor) -> Tensor:
    """Returns `(batch, length, vocabulary)` float32."""
    logits = logits_of(model, ids).float()
    if bool(logits.isnan().any()):
        raise MeasurementError(f"The logits of {type(model).__name__} are NaN, so nothing can be scored.")
    return logits.log_softmax(dim=-1)
