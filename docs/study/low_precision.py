"""What the trained models of a study lose if they, or their positional numbers alone, are held in low precision.

python docs/study/low_precision.py outputs/reference --output docs/study/low_precision.csv
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from docs.study.kept_models import write_measurement
from hf_posenc.errors import UnsupportedError
from hf_posenc.metrics.language_modeling.token_losses import token_losses
from hf_posenc.metrics.quantization import quantized_positions

#: Where the text stands. From the second position on, bfloat16 has one integer in four.
POSITIONS = (0, 512)
_WHOLE = {"model bfloat16": torch.bfloat16, "model float16": torch.float16}


def precision_rows(model: PreTrainedModel, tokens: Tensor) -> pd.DataFrame:
    """The loss in float32 and its change in low precision, for what is `held_in` it.

    "model ..." is the whole model, weights and activations, with the text at position 0. The others are the variants of
    `quantized_positions`, with the text at `POSITIONS`; a scheme that has no such numbers has no such rows.
    """
    exact = _mean_loss(model, tokens)
    rows: list[tuple[str, int, float, float | None]] = [
        ("model float32", 0, exact, 0.0),
        *(
            (name, 0, loss, loss - exact)
            for name, dtype in _WHOLE.items()
            for loss in [_mean_loss(copy.deepcopy(model).to(dtype), tokens)]
        ),
    ]
    try:
        records = quantized_positions(model, tokens, tokens, positions=POSITIONS, causal=True)
    except UnsupportedError as error:
        print(f"{type(model).__name__}: positional numbers are not measured alone: {error}", file=sys.stderr)
        records = []
    values = {(record.quantity, record.at["held in"], record.at["position"]): record.value for record in records}
    for (quantity, held, position), loss in values.items():
        if quantity == "loss" and loss is not None:
            change = values.get(("change", held, position))
            rows.append((str(held), int(str(position)), loss, 0.0 if held == "float32" else change))
    return pd.DataFrame(rows, columns=["held_in", "position", "loss", "change"]).round({"loss": 5, "change": 6})


def _mean_loss(model: PreTrainedModel, tokens: Tensor) -> float:
    return float(token_losses(model, tokens, tokens, causal=True).double().nanmean())


main = partial(write_measurement, "low_precision", (__doc__ or "").partition("\n")[0], precision_rows)


if __name__ == "__main__":
    sys.exit(main())
