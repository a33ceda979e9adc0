"""How much the trained models of a study change their predictions if all positions move by one.

python docs/study/moved_positions.py outputs/reference --output docs/study/moved_positions.csv
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from docs.study.kept_models import write_measurement
from hf_posenc.metrics.forward import run
from hf_posenc.preserve import evaluation_mode


def divergence_by_position(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The mean divergence between the predictions at a token before and after all positions move up by one.

    A piece of text with half of the tokens stands at every place that the trained length has for it, apart from the
    last: the last position of a text has no target, so that its vector is not trained. The divergence is Kullback and
    Leibler's, of the distributions of the next token at the last half of the piece. A relative scheme has 0, up to
    rounding.

    Args:
        model: a causal model that takes `position_ids`.
        tokens: `(texts, length)` token ids; `length` is the trained length.

    Returns:
        `(length - 1,)` float64 in nats, by the position that the token has before it moves; NaN for positions that
        less than half of the places of the piece give a token.

    Raises:
        UnsupportedError: if the model takes no `position_ids`.
    """
    length = tokens.shape[1]
    piece, tail = length // 2, length // 4
    texts = tokens[:, :piece]
    summed, count = torch.zeros(length - 1, dtype=torch.float64), torch.zeros(length - 1)
    before = None
    with evaluation_mode(model):
        for start in range(length - piece):
            ids = torch.arange(start, start + piece).expand_as(texts)
            logits = run(model, texts, position_ids=ids).logits[:, -tail:]
            after = functional.log_softmax(logits.double(), dim=-1)
            if before is not None:
                moved = slice(start - 1 + piece - tail, start - 1 + piece)
                summed[moved] += (before.exp() * (before - after)).sum(-1).mean(0)
                count[moved] += 1
            before = after
    return (summed / count).where(count >= tail // 2, torch.nan)


def moved_rows(model: PreTrainedModel, tokens: Tensor) -> pd.DataFrame:
    """`divergence_by_position` as one row per position."""
    divergence = divergence_by_position(model, tokens)
    measured = divergence.isfinite().nonzero().flatten()
    values = [float(f"{value:.4g}") for value in divergence[measured].tolist()]
    return pd.DataFrame({"position": measured.tolist(), "divergence": values})


main = partial(write_measurement, "moved_positions", (__doc__ or "").partition("\n")[0], moved_rows)


if __name__ == "__main__":
    sys.exit(main())
