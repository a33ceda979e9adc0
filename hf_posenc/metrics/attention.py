"""Attention distance and entropy: how far back each layer attends, and how widely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hf_posenc.metrics.evaluation import digest, evaluation_result, measure_schemes
from hf_posenc.metrics.forward import check_vocabulary, run
from hf_posenc.metrics.language_modeling.token_losses import text_windows
from hf_posenc.preserve import attention_implementation
from hf_posenc.report.records import Quantity, Record, Result
from hf_posenc.schemes.config import SchemeConfig


def attention_test(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str] | None = None,
    schemes: Sequence[str | SchemeConfig] | None = None,
    *,
    length: int = 128,
    max_windows: int | None = 4,
    seed: int = 0,
) -> Result:
    """Measures the distance and the entropy of attention in every layer, on windows of a text.

    Args:
        model: any transformers model, patched or not; left unchanged. For an encoder-decoder, the encoder is measured.
        tokenizer: its tokenizer.
        texts: documents to read; by default a short English text.
        schemes: the schemes to measure, one after the other; see `measure_schemes`.
        length: tokens per window.
        max_windows: maximum number of windows, evenly spread over the text; `None` reads all of it.
        seed: seed of new scheme weights.

    Returns:
        For each scheme and `layer`, counted from 1, the mean over heads, queries and windows of the `distance` in
        tokens and of the `entropy` in nats.

    Raises:
        UnknownNameError: for an unknown scheme, before the model is changed.
        MeasurementError: if the text is shorter than one window, or the tokenizer is that of another model.
        UnsupportedError: if the model returns no attention weights.
    """
    windows = text_windows(tokenizer, texts, length, max_windows)
    check_vocabulary(model, int(windows.min()), int(windows.max()))

    places = torch.arange(length)
    apart = (places.unsqueeze(0) - places.unsqueeze(1)).abs().double()

    def measure(patched: Any) -> list[Record]:
        figures = []
        for window in windows.split(1):
            read = run(patched, window, attention_mask=torch.ones_like(window), wanted="attentions").attentions
            layers = (weights.cpu().double() for weights in read)
            summed = ((layer * apart, torch.special.entr(layer)) for layer in layers)
            figures.append([[float(each.sum(-1).mean()) for each in pair] for pair in summed])
        means = torch.tensor(figures, dtype=torch.float64).mean(0)
        return [
            Record("", quantity, value, {"layer": layer}, count=windows.shape[0])
            for layer, values in enumerate(means.tolist(), start=1)
            for quantity, value in zip(("distance", "entropy"), values, strict=True)
        ]

    # Fused kernels do not return the weights.
    with attention_implementation(model, "eager"):
        measured = measure_schemes(model, schemes, measure, seed=seed)
    return evaluation_result(
        "attention",
        f": distance and entropy of attention, {windows.shape[0]} windows of {length} tokens",
        model,
        measured,
        (
            Quantity("distance", "distance", "distance: mean number of tokens between a query and what it attends to."),
            Quantity("entropy", "entropy", "entropy: of the weights of a query, in nats; log(keys) if uniform."),
        ),
        rows=("layer",),
        settings={"data": digest(windows), "windows": windows.shape[0], "length": length, "seed": seed},
    )
