"""The table of comparisons that tutorials quote, with the same schemes in small models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from docs.study.claims import Measure
from docs.study.table_numbers import Runs, markdown, mean_of, mean_paired, never_reached, ranged, shown

#: The loss, in nats per token, to which the steps of masked models are counted.
MASKED = 2.50
#: The longest that algorithms are trained on: letters, and the digits of a number.
_LETTERS, _DIGITS = 10, 6

_LOSS = Measure("")
_LOSS_AT_HALF_RATE = replace(_LOSS, study="reference_half_rate")
_MASKED_LOSS = Measure("", study="reference_masked", task="masked")
_MASKED_STEPS = replace(_MASKED_LOSS, quantity="steps", at=MASKED)
_REVERSE = Measure("", "accuracy", _LETTERS, "reference_marian", "reverse")
_ADDITION = replace(_REVERSE, at=_DIGITS, task="reversed_addition")

#: How each number is called, and its digits.
_CALLED: Mapping[Measure, tuple[str, int]] = {
    _LOSS: ("causal, loss", 3),
    _LOSS_AT_HALF_RATE: ("the same, with half of the rate", 3),
    _MASKED_LOSS: ("masked, loss", 3),
    _MASKED_STEPS: (f"masked, steps to {MASKED:.2f}", 0),
    _REVERSE: ("encoder-decoder, reverse, right answers", 2),
    _ADDITION: ("encoder-decoder, addition, right answers", 2),
}


#: What is quoted, and the pairs of schemes that it is about here, as labels of the studies. The unpatched BERT has a
#: table of learned positions, and the unpatched Marian has sinusoids.
_QUOTED: Mapping[str, Sequence[tuple[str, str, Measure]]] = {
    "Learned and sinusoidal positions: BLEU 25.7 and 25.8 (arXiv:1706.03762, table 3, E and base)": (
        ("learned", "sinusoidal", _LOSS),
        ("learned", "sinusoidal", _LOSS_AT_HALF_RATE),
        ("native", "sinusoidal", _MASKED_LOSS),
        ("learned", "native", _REVERSE),
        ("learned", "native", _ADDITION),
    ),
    "RoPE and sinusoidal positions: BLEU 27.5 and 27.3 (arXiv:2104.09864, table 1)": (
        ("rope", "native", _REVERSE),
        ("rope", "native", _ADDITION),
    ),
    "A BERT with RoPE learns faster than with learned positions (arXiv:2104.09864, figure 3)": (
        ("rope", "native", _MASKED_STEPS),
        ("rope", "sinusoidal", _MASKED_STEPS),
    ),
}


def quoted_table(runs: Runs) -> str:
    """The values of both schemes of each pair, and their difference by seed."""
    rows = []
    for text, pairs in _QUOTED.items():
        for first, second, measure in pairs:
            values = [replace(measure, scheme=scheme).values(runs) for scheme in (first, second)]
            common = sorted(values[0].keys() & values[1].keys())
            if common:
                called, digits = _CALLED[measure]
                means = [shown(mean_of(by_seed[seed] for seed in common), digits) for by_seed in values]
                difference = ranged(mean_paired(*values), digits)
                if measure.quantity == "steps" and never_reached(runs, replace(measure, scheme=second)):
                    means[1], difference = "not reached", f"below {difference.split()[0]}"
                rows.append((text, f"`{first}` and `{second}`", called, *means, difference, str(len(common))))
                text = ""
    head = ("quoted", "here", "value", "first", "second", "difference", "seeds")
    return markdown(head, rows, texts=3)
