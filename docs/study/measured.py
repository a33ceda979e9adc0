"""Tables of what was measured on the trained models themselves, from the CSV files in docs/study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from docs.study.table_numbers import NOT_RUN, Runs, markdown, mean_of, ranged, ranked, shown
from hf_posenc import RopeConfig

FOLDER = Path(__file__).resolve().parent
#: Losses in float32 this close are the same: the scheme does not depend on where a text stands.
_SAME = 1e-3
#: What is held in low precision, by the heading of its column.
_HELD = {
    "bfloat16": "model bfloat16",
    "float16": "model float16",
    "ids bfloat16": "ids bfloat16",
    "encodings bfloat16": "encodings bfloat16",
    "encodings int8": "encodings int8",
    "keys int8": "keys int8 after",
    "keys int4": "keys int4 after",
}


def frequencies_table(runs: Runs) -> str:
    """The share of each frequency in what the heads of the trained RoPE could use."""
    rope = _by_scheme("frequencies").get("rope")
    if rope is None:
        return NOT_RUN
    shares = rope.groupby(["pair", "seed"]).share.mean().unstack()
    rows = []
    for pair in shares.index:
        turn = 2 * np.pi * RopeConfig().theta ** (pair / len(shares))
        rows.append((str(pair), f"{turn:,.0f}", shown(mean_of(100 * shares.loc[pair]), 1), str(len(shares.columns))))
    return markdown(("pair", "tokens per turn", "share (%)", "seeds"), rows)


def moved_table(runs: Runs) -> str:
    """How much the predictions change if all positions move by one, by scheme."""
    rows = []
    for scheme, of_scheme in _by_scheme("moved_positions").items():
        by_position = of_scheme.groupby("position").divergence.mean()
        largest = by_position.idxmax()
        where = f"{largest} to {largest + 1}" if by_position[largest] >= _SAME else ""
        figures = (f"{value:.3f}" for value in (by_position.mean(), by_position.median(), by_position[largest]))
        rows.append((by_position.mean(), (f"`{scheme}`", *figures, where, str(of_scheme.seed.nunique()))))
    head = ("scheme", "mean", "median", "largest", "from position", "seeds")
    return ranked(head, rows)


def precision_table(runs: Runs) -> str:
    """What schemes lose in low precision: the change of the loss in thousandths of a nat."""
    rows = []
    for scheme, of_scheme in _by_scheme("low_precision").items():
        values = of_scheme.set_index(["held_in", "position", "seed"]).sort_index()
        exact = values.loc["model float32"].loss.groupby("position").mean()[0]
        places = values.loc["float32"].loss.groupby("position").mean() if "float32" in values.index else pd.Series()
        # A text far from the start says something about a scheme only if the model can read it there.
        place = max((at for at, loss in places.items() if abs(loss - exact) < _SAME), default=0)
        cells = []
        for held in _HELD.values():
            at = (held, 0 if held.startswith("model") else place)
            # All ids of a text at position 0 are exact, so that rounding them says nothing.
            known = at in values.index and (place > 0 or not held.startswith("ids"))
            cells.append(ranged(mean_of(1000 * values.loc[at].change), 1) if known else "")
        rows.append((exact, (f"`{scheme}`", f"{exact:.3f}", *cells, str(place), str(of_scheme.seed.nunique()))))
    head = ("scheme", "loss (nats)", *_HELD, "position", "seeds")
    return ranked(head, rows)


def _by_scheme(name: str) -> dict[Any, pd.DataFrame]:
    """The rows of a CSV file by scheme; empty without the file."""
    path = FOLDER / f"{name}.csv"
    return dict(iter(pd.read_csv(path).groupby("scheme"))) if path.is_file() else {}
