"""What the modules below `eval/modules` accept as a model and its tokenizer."""

from __future__ import annotations

from typing import Any


def model_and_tokenizer(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """Loads what is given by hub id or folder, and takes what is loaded as it is.

    Args:
        model: a transformers model, or its hub id or folder; loaded with the Auto class that keeps its head.
        tokenizer: a tokenizer, or its hub id or folder; by default the one that belongs to `model`.

    Raises:
        ValueError: if `model` is an object and no tokenizer is given.
        hf_posenc.cli.errors.UsageError: if one of them cannot be found.
    """
    from hf_posenc.cli.loading import load_model, load_tokenizer

    if tokenizer is None:
        if not isinstance(model, str):
            raise ValueError(
                f"A loaded {type(model).__name__} does not say which tokenizer it was trained with. Pass tokenizer=, "
                f"or the model as a hub id or folder."
            )
        tokenizer = model
    loaded = load_model(model) if isinstance(model, str) else model
    return loaded, load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
