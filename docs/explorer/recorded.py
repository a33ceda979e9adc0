"""What the library computes for the schemes whose formulas are not written again in JavaScript.

Every scheme is run at the place of the page: one attention layer of 4 heads of 64 dimensions over a hidden size of 64,
with the random weights and words of `model.js`. The numbers can therefore be compared with those that the page computes
itself. `make_data.py` writes them to `data/recorded.json`.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import MeasurementError
from hf_posenc.metrics.dog import SENTENCE
from hf_posenc.metrics.properties.decay import rotation_frequencies
from hf_posenc.metrics.statistics import relative_l2
from hf_posenc.plots.schemes.arrangement import mapped_positions
from hf_posenc.plots.schemes.subject import Subject, equal_query_key_logits, subject_of
from hf_posenc.plots.schemes.vectors import encoded_dimensions
from hf_posenc.schemes import BuildContext, SchemeConfig, SchemeParts, get_scheme
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.logits import positional_logits
from hf_posenc.schemes.parts import HIDDEN, DistanceBias
from hf_posenc.schemes.positions import Positions, integer_range
from hf_posenc.schemes.rotary.contextual import ContextualRotation
from hf_posenc.schemes.validation import kind_of

#: The place of the page when it opens.
HIDDEN_SIZE, HEADS, HEAD_DIM = 64, 4, 64
#: Positions of curves and of maps of dimensions, tokens of a map of pairs, and places of a side of a grid.
LENGTH, MAP, SIDE = 64, 28, 11
#: The place of the two equal words in the sentence.
FIRST, SECOND = 1, 4
#: Layers of an arrangement of layers, and how far apart those with full attention are.
LAYERS, PERIOD = 12, 4
MODES = {"both": False, "causal": True}
#: The bias of hidden pairs in the pictures.
NO_WEIGHT = -20.0
#: Examples of one scheme, at most.
MOST_EXAMPLES = 3
#: The options of the first example, where a scheme needs some or its defaults show nothing in 64 positions.
FIRST_OPTIONS: dict[str, dict[str, Any]] = {
    "attention_sinks": {"sinks": 2, "window": 12},
    "blended": {"old": "rope", "new": "alibi", "strength": 0.5},
    "hierarchical": {"segment_length": 8},
    "llama4_scale": {"floor_scale": 16},
    "log_n_scale": {"training_length": 16},
    "low_rank_relative": {"window": 32},
    "position_clamp": {"maximum": 15},
    "position_shift": {"offset": 32},
    "randomized": {"max_position": 256},
    "schedule": {"layers": ("rope", "rope", "alibi", "none")},
    "ssmax": {"training_length": 16},
}
#: Examples beyond those of the options with choices.
MORE_EXAMPLES: dict[str, tuple[dict[str, Any], ...]] = {
    "attention_sinks": ({"inner": "alibi", "sinks": 2, "window": 12},),
    "blended": (
        {"old": "rope", "new": "alibi", "strength": 0.9},
        {"old": "sinusoidal", "new": "rope", "strength": 0.5},
    ),
    "cope": ({"num_positions": 8},),
    "disentangled": ({"max_distance": 8},),
    "forget_gate": ({"gate": "bias_only", "decay_times": (2.0, 64.0)}, {"initial_bias": 3.0}),
    "grape": ({"initial_rate": 0.1},),
    "hierarchical": ({"segment_length": 8, "within": "learned"},),
    "interleaved": ({"inner": "alibi", "every": 2},),
    "local_global": ({"local": "alibi", "global_": "rope"},),
    "log_cpb": ({"window": 8},),
    "low_rank_relative": ({"rank": 2, "window": 32},),
    "position_clamp": ({"inner": "alibi", "maximum": 15}, {"inner": "sinusoidal", "maximum": 15}),
    "position_shift": ({"inner": "sinusoidal", "offset": 32},),
    "randomized": ({"inner": "alibi", "max_position": 256},),
    "resonance": ({"theta": 100.0},),
    "shaw": ({"max_distance": 4},),
    "transformer_xl": ({"clamp_length": 8},),
    "wavelet": ({"num_scales": 2},),
}
#: Options that change the order of numbers, or how a table is fitted to another size, but no picture of the page.
_NO_EXAMPLE = {"layout", "interpolation", "columns_first", "class_entries"}


def needs_scheme(config_class: type[SchemeConfig]) -> bool:
    """Whether a scheme is made of other schemes."""
    kinds = [kind_of(one) for one in dataclasses.fields(config_class)]
    return config_class.combinator or any("SchemeConfig" in kind for kind in kinds)


def entry(name: str, choices: dict[str, list[Any]]) -> dict[str, Any]:
    """All examples of a scheme, by label.

    Args:
        name: of the scheme.
        choices: the values of every option that has choices.
    """
    examples: dict[str, Any] = {}
    for options in _examples(name, choices):
        config = get_scheme(name).from_options(options)
        label = ", ".join(f"{key}={_text(value)}" for key, value in options.items()) or "default options"
        try:
            found = {"layers": _layers(config)} if isinstance(config, LayeredConfig) else _example(config)
        except ValueError:
            continue
        # A variation that changes nothing here would only make the list longer.
        if found not in [{key: one[key] for key in one if key != "options"} for one in examples.values()]:
            examples[label] = {"options": _json(options), **found}
        if len(examples) == MOST_EXAMPLES:
            break
    if not examples:
        raise MeasurementError(f"The scheme {name!r} cannot be built at the place of the explorer: give FIRST_OPTIONS.")
    return examples


def _examples(name: str, choices: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """The options of the examples that are tried, the first one first."""
    first = FIRST_OPTIONS.get(name, {})
    yield first
    yield from MORE_EXAMPLES.get(name, ())
    for option, values in choices.items():
        if option not in _NO_EXAMPLE:
            yield from ({**first, option: value} for value in values)


def _text(value: Any) -> str:
    return "+".join(map(_text, value)) if isinstance(value, tuple | list) else str(value)


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _layers(config: LayeredConfig) -> list[str]:
    kinds = ["full_attention" if (layer + 1) % PERIOD == 0 else "sliding_attention" for layer in range(LAYERS)]
    count = len(layers) if (layers := getattr(config, "layers", None)) else LAYERS
    return [config.for_layer(layer, kinds[layer]).name for layer in range(count)]


@torch.no_grad()
def _example(config: SchemeConfig) -> dict[str, Any]:
    """The numbers of one example in a bidirectional and in a causal model, as far as it can be in both."""
    found: dict[str, Any] = {}
    note, reads = "", False
    for mode, causal in MODES.items():
        try:
            subject = subject_of(
                config, BuildContext(HIDDEN_SIZE, HEADS, HEAD_DIM, causal=causal, max_positions=LENGTH)
            )
        except ValueError:
            continue
        found[mode] = {**_sentence(subject), **_pictures(subject)}
        note, reads = subject.note.replace("`", ""), reads_words(subject)
    if not found:
        raise MeasurementError(f"The scheme {config.label} fits neither kind of model.")
    if "both" in found and found["both"]["maps"] == found.get("causal", {}).get("maps"):
        # The page hides the later keys itself.
        del found["causal"]["maps"]
    return {**({"note": note} if note else {}), **({"reads_words": True} if reads else {}), **found}


def reads_words(subject: Subject) -> bool:
    """Whether the effect of a position depends on the words: whether another text gives another bias."""
    bias = subject.parts.logit_bias
    if bias is None or isinstance(bias, DistanceBias):
        return False
    seen = torch.ones(LENGTH, LENGTH).tril().bool() if subject.context.causal else torch.ones(LENGTH, LENGTH).bool()
    one, other = (_bias(subject, text)[:, seen] for text in ("word", "other"))
    return not torch.allclose(one, other, rtol=1e-3, atol=1e-3)


def layer(parts: SchemeParts, inputs: Tensor, weights: dict[str, Tensor], causal: bool) -> dict[str, Tensor]:
    """One self-attention layer over `(length, hidden)`, in float64 but for the numbers of the parts.

    Args:
        parts: of a scheme.
        inputs: the vectors of the words.
        weights: `query`, `key`, `value` of `(heads, head_dim, hidden)` and `output` of `(heads, hidden, head_dim)`.
        causal: whether later words are hidden.
    """
    length, heads = len(inputs), len(weights["query"])
    where = positions(length)
    added = parts.additive(where)[0].double() if parts.additive is not None else torch.zeros_like(inputs)
    states = inputs + added
    query, key, value = (torch.einsum("hdc,lc->hld", weights[name], states) for name in ("query", "key", "value"))
    hidden = states.float().unsqueeze(0)
    logits = positional_logits(parts, query.unsqueeze(0), key.unsqueeze(0), where, hidden)[0].double()
    everything = torch.ones(length, length, dtype=torch.bool)
    mask = everything.tril() if causal else everything
    attention = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    outputs = torch.einsum("hcd,hld->lc", weights["output"], attention @ value) / heads**0.5
    return {"added": added, "logits": logits, "attention": attention, "outputs": outputs, "mask": mask}


def positions(length: int) -> Positions:
    """A text of `length` tokens, in which every eighth token ends a segment."""
    ids = integer_range(0, length)
    return Positions(ids, torch.tensor([[length]]), token_ids=(ids + 1) % 8)


def _sentence(subject: Subject) -> dict[str, Any]:
    """The layer on the sentence of the page: the attention by head, and the distance of the two equal words."""
    words = [word.lower() for word in SENTENCE.split()]
    inputs = torch.stack([word_vector(word) for word in words])
    found = layer(subject.parts, inputs, layer_weights(HEADS), subject.context.causal)
    distance = relative_l2(found["outputs"][FIRST], found["outputs"][SECOND])
    return {"distance": _rounded(distance), "attention": packed(found["attention"], 16)}


def _inputs(text: str = "word") -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and hidden states of a text of random words, as the layer makes them."""
    hidden = torch.stack([word_vector(f"{text} {place}") for place in range(LENGTH)]).float()
    weights = layer_weights(HEADS)
    query, key = (torch.einsum("hdc,lc->hld", weights[kind].float(), hidden) for kind in ("query", "key"))
    return query.unsqueeze(0), key.unsqueeze(0), hidden.unsqueeze(0)


def _bias(subject: Subject, text: str = "word") -> Tensor:
    """`(heads, length, length)`: what the bias adds to the logits of a text of random words."""
    query, key, hidden = _inputs(text)
    parts = dataclasses.replace(subject.parts, logit_scale=None)
    plain = dataclasses.replace(parts, logit_bias=None)
    biased, without = (positional_logits(one, query, key, positions(LENGTH), hidden)[0] for one in (parts, plain))
    bias = biased - without
    return bias.where(bias > HIDDEN / 2, NO_WEIGHT)


def _equal(subject: Subject) -> Tensor:
    """`(heads, length, length)`: the mean product of a query with an equal key, in units of its square.

    The mean is over all directions, which an orthogonal basis gives exactly where the map is linear.
    """
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=generator)).Q * HEAD_DIM**0.5
    parts = dataclasses.replace(subject.parts, logit_scale=None)
    if not _turns_by_words(subject):
        parts = dataclasses.replace(parts, logit_bias=None)
    same = basis[:, None, None].expand(-1, HEADS, LENGTH, -1)
    hidden = _inputs()[2].expand(HEAD_DIM, -1, -1)
    return positional_logits(parts, same, same, positions(LENGTH), hidden).mean(0) * HEAD_DIM**-0.5


def _turns_by_words(subject: Subject) -> bool:
    return isinstance(subject.parts.logit_bias, ContextualRotation)


def _pictures(subject: Subject) -> dict[str, Any]:
    """Lines over the distance from the query in the middle, or at the end of a causal model; and maps."""
    parts, query = subject.parts, LENGTH - 1 if subject.context.causal else (LENGTH - 1) // 2
    curves, maps = [], []
    if parts.additive is not None:
        vectors = parts.additive(positions(LENGTH))[0].double()
        curves.append(_curve("added", -query, (vectors @ vectors[query] / HIDDEN_SIZE).unsqueeze(0)))
        maps.append(_map("added", vectors.unsqueeze(0)))
    if parts.query_key_map is not None or _turns_by_words(subject):
        equal = _equal(subject)
        curves.append(_curve("rotation", -query, equal[:, query]))
        if rotation_frequencies(parts, LENGTH) is not None:
            cosine = encoded_dimensions(subject, LENGTH)["cosine"]
            maps.append(_map("rotation", cosine[:, : cosine.shape[1] // 2].unsqueeze(0)))
        else:
            maps.append(_map("equal", equal[:, :MAP, :MAP]))
    if parts.logit_bias is not None and not _turns_by_words(subject):
        bias = _bias(subject)
        curves.append(_curve("bias", -query, bias[:, query]))
        maps.append(_map("bias", bias[:, :MAP, :MAP]))
    if axes := max((_axes(part) for part in parts), default=0):
        maps.append(_map("grid", _grid(subject, axes)))
    if parts.logit_scale is not None:
        curves.append(_curve("scale", 0, parts.logit_scale(positions(LENGTH))[0].double().expand(-1, LENGTH)))
    own = torch.arange(LENGTH)
    moved = {title: line for title, line in mapped_positions(subject, LENGTH).items() if not torch.equal(line, own)}
    if moved:
        lines = packed(torch.stack([line.double() for line in moved.values()]), 16)
        curves.append({"name": "positions", "start": 0, **lines, "titles": list(moved)})
    return {"curves": curves, "maps": maps}


def _curve(name: str, start: int, lines: Tensor) -> dict[str, Any]:
    """A curve with one line per head, or one line where all heads are alike."""
    return {"name": name, "start": start, **packed(_apart(lines), 16)}


def _axes(part: Any) -> int:
    """How many coordinates a part reads; 0 where it reads none."""
    found = next((int(one.axes) for one in part.modules() if isinstance(getattr(one, "axes", None), int)), 2)
    return found if part.reads_coordinates else 0


def _grid(subject: Subject, axes: int) -> Tensor:
    """`(heads, side, side)`: the logit of a query in the centre of a grid and an equal key at each of its places.

    The mean over all places is subtracted, because a softmax does not see it.
    """
    ids = torch.arange(SIDE**2).unsqueeze(0)
    coordinates = torch.zeros(axes, 1, SIDE**2, dtype=torch.int64)
    coordinates[-2], coordinates[-1] = ids // SIDE, ids % SIDE
    where = Positions(ids, torch.tensor([[SIDE**2]]), coordinates=coordinates)
    logits = equal_query_key_logits(subject, where, 24).mean(0)[:, SIDE**2 // 2]
    return (logits - logits.mean(-1, keepdim=True)).unflatten(-1, (SIDE, SIDE))


def _map(name: str, matrices: Tensor) -> dict[str, Any]:
    """Maps by head, or one map where all heads are alike."""
    return {"name": name, **packed(_apart(matrices), 8)}


def _apart(heads: Tensor) -> Tensor:
    """The numbers by head, of the first head only where all heads are alike."""
    return heads[:1] if torch.allclose(heads, heads[:1].expand_as(heads), rtol=1e-4, atol=1e-6) else heads


def packed(values: Tensor, bits: int) -> dict[str, Any]:
    """Numbers as little-endian integers in base64, which is a quarter of their text.

    Args:
        values: of any shape.
        bits: of one number, 8 where it becomes a colour and 16 where it is drawn or written. The largest integer stands
            for the largest magnitude.
    """
    most = 2 ** (bits - 1) - 1
    largest = _rounded(float(values.abs().max()))
    integers = (values.double() / (largest or 1.0) * most).round().clamp(-most, most)
    kind = {8: "<i1", 16: "<i2"}[bits]
    cells = base64.b64encode(integers.numpy().astype(kind).tobytes()).decode()
    return {"shape": list(values.shape), "bits": bits, "largest": largest, "cells": cells}


def unpacked(value: dict[str, Any]) -> Tensor:
    """The numbers that `packed` has written."""
    integers = np.frombuffer(base64.b64decode(value["cells"]), f"<i{value['bits'] // 8}")
    scale = value["largest"] / (2 ** (value["bits"] - 1) - 1)
    return torch.tensor(integers.astype(float) * scale).reshape(value["shape"])


def _rounded(value: float) -> float:
    """Four significant digits, and 0 for what is rounding."""
    return 0.0 if abs(value) < 1e-6 else float(f"{value:.4g}")


def word_vector(key: str) -> Tensor:
    """`(hidden,)`: the vector of a word, as in model.js."""
    return normals(f"word {key}", HIDDEN_SIZE)


def layer_weights(heads: int) -> dict[str, Tensor]:
    """The weights of the layer of model.js, as `layer` takes them."""
    shapes = dict.fromkeys(("query", "key", "value"), (HEAD_DIM, HIDDEN_SIZE)) | {"output": (HIDDEN_SIZE, HEAD_DIM)}
    if heads not in _WEIGHTS:
        _WEIGHTS[heads] = {
            kind: torch.stack([_matrix(f"{kind} {head}", *shape) for head in range(heads)])
            for kind, shape in shapes.items()
        }
    return _WEIGHTS[heads]


_WEIGHTS: dict[int, dict[str, Tensor]] = {}


def _matrix(name: str, rows: int, columns: int) -> Tensor:
    return torch.stack([normals(f"{name} {row}", columns) for row in range(rows)]) / math.sqrt(columns)


def normals(text: str, count: int) -> Tensor:
    """`count` numbers from N(0, 1), the same as those of numbers.js for the same text."""
    uniform = _uniform(_hash(text))
    return torch.tensor(
        [math.sqrt(-2 * math.log(1 - next(uniform))) * math.cos(2 * math.pi * next(uniform)) for _ in range(count)],
        dtype=torch.float64,
    )


def _hash(text: str) -> int:
    value = 0x811C9DC5
    for character in text:
        value = (value ^ ord(character)) * 0x01000193 & 0xFFFFFFFF
    value = (value ^ value >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ value >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


def _uniform(state: int) -> Iterator[float]:
    while True:
        state = state + 0x6D2B79F5 & 0xFFFFFFFF
        mixed = (state ^ state >> 15) * (state | 1) & 0xFFFFFFFF
        mixed ^= mixed + ((mixed ^ mixed >> 7) * (mixed | 61) & 0xFFFFFFFF) & 0xFFFFFFFF
        yield (mixed ^ mixed >> 14) / 4294967296
