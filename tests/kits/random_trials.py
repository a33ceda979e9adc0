"""Random schemes in random text models, each compared with itself in other ways of computing the same logits.

    python -m tests.kits.random_trials 500 --first 0

A trial draws an architecture, a scheme with random options, and perhaps a second scheme or a single layer. A difference
counts if the stock model computes the same logits in both ways. A trial repeats with its number.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import random
import sys
import tempfile
import traceback
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.utils import logging

from hf_posenc import PositionEncodingError, list_schemes, patch_model, unpatch_model
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import get_scheme
from tests.architectures.population import Pair, default_pairs
from tests.architectures.tiny import tiny_model
from tests.kits.decoding import decoded

LENGTH, PADDING = 14, 3
#: The largest difference, relative to the largest logit.
BOUND = 2e-4
#: They need a grid, or several segments.
_LEFT_OUT = frozenset(("mrope", "rope_nd", "swin", "hierarchical"))
#: Options whose random values would rarely fit a head of 8 or 16 numbers and a text of 14 tokens.
_SAMPLES: dict[str, tuple[Any, ...]] = {
    "rotary_dim": (2, 4, 8), "num_positions": (32, 64), "max_position": (40, 64), "axes": (1,),
    "layout": ("auto", "half", "interleaved"), "evaluation": ("identity",), "theta": (10.0, 500.0, 1e4),
    "base": (10.0, 500.0, 1e4), "initial_std": (0.05, 0.5),
    **dict.fromkeys(("max_distance", "buckets", "window", "max_distance_ahead", "num_buckets"), (2, 4, 8, 16)),
}  # fmt: skip
#: A function of a model, ids and their logits, which returns logits and what they have to equal.
Way = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def random_scheme(draw: random.Random, depth: int = 0) -> SchemeConfig:
    """A scheme with some options that are not the defaults. Options may be schemes."""
    while True:
        kind = get_scheme(
            draw.choice([name for name in list_schemes() if name not in _LEFT_OUT]) if depth < 3 else "rope"
        )
        hints = typing.get_type_hints(kind)
        given = {
            option.name: _value(draw, option, hints[option.name], depth)
            for option in dataclasses.fields(kind)
            if option.default is dataclasses.MISSING or draw.random() < 0.35
        }
        try:
            return kind(**{name: value for name, value in given.items() if value is not dataclasses.MISSING})
        except (ValueError, TypeError):
            continue  # Options that do not fit together.


def _value(draw: random.Random, option: dataclasses.Field[Any], kind: Any, depth: int) -> Any:
    """A value of an option, or `MISSING`."""
    if isinstance(kind, types.UnionType):
        (kind,) = (inner for inner in typing.get_args(kind) if inner is not types.NoneType)
        if draw.random() < 0.4:
            return None
    limits = option.metadata.get("limits", {})
    least = limits.get("minimum", limits.get("above", 0))
    if option.name in _SAMPLES and kind in (int, float, str):
        return draw.choice(_SAMPLES[option.name])
    if "choices" in limits:
        return draw.choice(limits["choices"])
    if kind is bool:
        return draw.random() < 0.5
    if kind is int:
        value = draw.randint(
            int(least), min(int(limits.get("maximum", 10**9)), int(least) + draw.choice((1, 3, 8, 20)))
        )
        return value + value % 2 if "even" in limits else value
    if kind is float:
        most = min(float(limits.get("maximum", 4.0)), 4.0)
        return draw.uniform(max(float(least), 0.01), max(most, 0.02))
    return (
        random_scheme(draw, depth + 1)
        if isinstance(kind, type) and issubclass(kind, SchemeConfig)
        else dataclasses.MISSING
    )


def _stir(model: Any, seed: int) -> None:
    """Moves the parameters of the scheme, some of which have no effect at first."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.position_encoding.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator).to(weight) * 0.3)


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits


def ways(pair: Pair, seed: int) -> Iterator[tuple[str, Way, Way]]:
    """The ways by name, each with the one that has to hold in the stock model."""
    decodes, padding = pair.kind == "causal", torch.ones(2, PADDING, dtype=torch.long)
    real = torch.ones(2, LENGTH, dtype=torch.long)
    mask = torch.cat((padding * 0, real) if decodes else (real, padding * 0), 1)
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    pieces = [5, 1, 1, 3, 1, 2, 1]

    def row(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        return _logits(model(ids[1:])), full[1:]

    def padded(model: Any, ids: Tensor, full: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((padding, ids) if decodes else (ids, padding), 1)
        return _logits(model(both, attention_mask=mask, **given))[mask.bool()].view(full.shape), full

    # Many stock models count padding unless they are told the positions.
    told = functools.partial(padded, position_ids=counted) if decodes else padded

    def saved(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder, attn_implementation=model.config._attn_implementation)
        return _logits(loaded.eval()(ids)), full

    def behind_padding(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        both, cache = torch.cat((padding, ids), 1), DynamicCache(config=model.config)
        given = {"attention_mask": mask, "position_ids": counted}
        return decoded(model, both, cache, [PADDING + 2, *pieces[1:], 3], **given)[:, PADDING:], full

    def with_gaps(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.randint(1, 4, real.shape, generator=torch.Generator().manual_seed(seed))
        given = {"attention_mask": real, "position_ids": steps.cumsum(1) - 1}
        return decoded(model, ids, DynamicCache(config=model.config), pieces, **given), _logits(model(ids, **given))

    def packed(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        restarting = torch.cat((torch.arange(6), torch.arange(LENGTH - 6))).unsqueeze(0)
        apart = [_logits(model(part, use_cache=False)) for part in ids[:1].split((6, LENGTH - 6), 1)]
        return _logits(model(ids[:1], position_ids=restarting, use_cache=False)), torch.cat(apart, 1)

    def static(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        return decoded(model, ids, StaticCache(config=model.config, max_cache_len=20), pieces), full

    def in_steps(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        return decoded(model, ids, DynamicCache(config=model.config), pieces), full

    def beams(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        given = {"min_new_tokens": 4, "max_new_tokens": 4, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
        with_cache, without = (model.generate(ids, use_cache=cached, **given) for cached in (True, False))
        return with_cache.float(), without.float()

    def eager(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        other = copy.deepcopy(model)
        other.set_attn_implementation("eager")
        return _logits(other(ids)), full

    def copied(model: Any, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        return _logits(copy.deepcopy(model)(ids)), full

    yield "padding", padded, told
    of_all: dict[str, Way] = {"one row": row, "saved": saved, "copied": copied, "eager": eager}
    if decodes:
        of_all |= {"decoded": in_steps, "padding and decoded": behind_padding, "padding with positions": told}
        of_all |= {"gaps": with_gaps, "static": static, "packed": packed, "beams": beams}
    yield from ((name, way, way) for name, way in of_all.items())


def is_refusal(error: BaseException) -> bool:
    """Whether an error gives a reason: its class is one of ours, or a statement of ours raises it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = "hf_posenc" in Path(last.filename).parts[-4:] and (last.line or "").startswith("raise")
    return raised or isinstance(error, PositionEncodingError)


def _is_equal(value: float | str) -> bool:
    return isinstance(value, float) and value <= BOUND


def _holds(value: float | str) -> bool:
    """Whether a way computes the same, or is refused with a reason."""
    return _is_equal(value) or (isinstance(value, str) and not value.startswith("-"))


def _difference(way: Callable[..., tuple[Tensor, Tensor]], *subject: Any) -> float | str:
    """A relative difference; the reason of a refusal; or the error of a crash, which begins with a dash."""
    try:
        ours, expected = way(*subject)
    except Exception as error:  # Anything else than a refusal is what the trials look for.
        return str(error) if is_refusal(error) else f"- {type(error).__name__}: {error}"
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@torch.no_grad()
def trial(number: int) -> tuple[str, dict[str, float | str]]:
    """Runs one trial.

    Returns:
        What was tried, or why it cannot be. Also the difference, or the error, of each way that should be equal.
    """
    draw = random.Random(number)
    pair = draw.choice([pair for pair in default_pairs() if pair.kind in ("causal", "masked")])
    try:
        model: Any = tiny_model(pair)
    except ImportError as error:
        return f"not built: {error}", {}
    torch.manual_seed(number)
    ids = torch.randint(5, min(60, model.get_input_embeddings().weight.shape[0]), (2, LENGTH))
    stock = _difference(lambda: (_logits(model(ids)),) * 2)
    if isinstance(stock, str) or model.config.is_encoder_decoder:
        return f"no text model: {pair.name}", {}
    kept, expected = copy.deepcopy(model), _logits(model(ids))
    schemes = [random_scheme(draw) for _ in range(draw.choice((1, 1, 2)))]
    scheme: Any = schemes[0] if len(schemes) == 1 else schemes
    where = {"layers": [0]} if draw.random() < 0.2 else {}
    what = f"{number}: {pair.name}, {scheme}, {where}"
    found: dict[str, float | str]
    try:
        patch_model(model, scheme, **where)
    except Exception as error:
        found = {} if torch.equal(_logits(model(ids)), expected) else {"refused, but changed": 1.0}
        return f"refused: {what}: {error}", found if is_refusal(error) else {"patch": repr(error)}
    _stir(model, number)
    found = {}
    full = _difference(lambda: (_logits(model(ids)),) * 2)
    if isinstance(full, str):
        return f"refused: {what}: {full}", {"call": full} if full.startswith("-") else {}
    logits = _logits(model(ids))
    for name, way, of_stock in ways(pair, number):
        value = _difference(way, model, ids, logits)
        if _holds(value) or not _is_equal(_difference(of_stock, kept, ids, expected)):
            continue
        # In float64 nothing but an error is left of a difference.
        exact = copy.deepcopy(model).double()
        exact.set_experts_implementation("eager")
        if not _is_equal(_difference(way, exact, ids, _logits(exact(ids)))):
            found[name] = value
    unpatch_model(model)
    if not torch.equal(_logits(model(ids)), expected):
        found["undone"] = 1.0
    return what, found


def main() -> int:
    """The command line. Returns 1 if a trial has found a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, help="number of trials")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for number in range(options.first, options.first + options.count):
        what, found = trial(number)
        kind = what.partition(":")[0]
        counts["different" if found else kind if not kind.isdigit() else "equal"] += 1
        for name, value in found.items():
            print(f"{what}\n    {name}: {value}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
