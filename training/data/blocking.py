"""Batches of rows. Arguments that separate the documents in a row are found by running the model, not from its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posenc import PositionEncodingError, UnsupportedError
from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.preserve import evaluation_mode
from hf_posenc.recipes.position_views import PositionViews, mask_of_documents, spread_distance
from training.arguments import DataArguments
from training.errors import SettingsError, settings_errors

#: Allowed differences between a packed row and its separate documents, as a share of the difference without blocking.
#: They are rounding errors of sums in another order, in float32 and in half precision.
_EXACT, _ROUNDED = 1e-2, 2e-1


@dataclass(frozen=True)
class Batches:
    """Collates `PackedRows`, with the arguments that separate the documents in a row.

    Args:
        position_ids: whether positions restart in every document. Decoders of transformers use them to find the
            documents, if there is no mask.
        mask: whether a mask of pairs is needed, with 0 or the lowest number of `dtype`.
        first_position: the position of a document's first token (RoBERTa: one after its padding token's id).
        causal: whether the mask also hides later tokens.
        dtype: dtype of the mask.
        documents: whether a row has separate documents. If it is one text, only positions that differ from the places
            need arguments.
    """

    position_ids: bool = True
    mask: bool = False
    first_position: int = 0
    causal: bool = True
    dtype: torch.dtype = torch.float32
    documents: bool = field(default=True, repr=False)

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns `input_ids` and `labels`, `(batch, block_size)`, and `arguments`."""
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        places, positions = batch.pop("places"), batch.pop("positions", None)
        return batch | self.arguments(places, positions)

    def arguments(self, places: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        """Returns `position_ids`, `(batch, length)`, and a mask, `(batch, 1, length, length)`, as far as they are used.

        Args:
            places: the places of `PackedRows`, `(batch, length)`.
            positions: positions of the same shape that differ from the places. There is always a mask for them,
                because a decoder would take each skip for the start of another document.
        """
        if not self.documents:
            return (
                {} if positions is None else {"position_ids": positions, "attention_mask": torch.ones_like(positions)}
            )
        read = places if positions is None else positions
        arguments = {"position_ids": read + self.first_position} if self.position_ids else {}
        if self.mask or positions is not None:
            arguments["attention_mask"] = mask_of_documents((places == 0).cumsum(-1), self.dtype, causal=self.causal)
        return arguments


def packed_batches(model: Any, data: DataArguments, causal: bool, vocabulary: int) -> Batches:
    """Returns the collator of packed rows for a model, after testing it on the model."""
    check_reads(model, data.block_size, causal, vocabulary)
    documents = data.packing == "documents"
    batches = find_batches(model, data.block_size, causal, vocabulary) if documents else Batches(documents=False)
    if data.pose_length is not None:
        _check_skips(model, batches, data.block_size, data.pose_length, vocabulary)
    return batches


def _check_skips(model: Any, batches: Batches, block_size: int, length: int, vocabulary: int) -> None:
    """Raises for a model that ignores its positions, or has too few of them, and runs a row up to the last one."""
    what = f"--pose_length {length} cannot be used with this {type(model).__name__}"
    with settings_errors(what, PositionEncodingError, IndexError, RuntimeError):
        views = PositionViews(model)
        limit = views.limit()
        if limit is not None and limit < length:
            raise UnsupportedError(
                f"it has {limit} positions. Give at most {limit}, or a scheme or a model with more positions."
            )
        tokens = _tokens(model, block_size, vocabulary)
        places = torch.arange(block_size, device=tokens.device)[None]
        with evaluation_mode(model):
            last = _logits(model, tokens, **batches.arguments(places, places + (length - block_size) * (places > 0)))
        views.of({"input_ids": tokens, "labels": tokens} | batches.arguments(places), last)


def find_batches(model: Any, block_size: int, causal: bool, vocabulary: int) -> Batches:
    """Finds the arguments with which this model, with its scheme and its attention, separates documents, so that a
    packed row gives the same logits as its separate documents.

    It tries all kinds of arguments on a row of `block_size` tokens, with documents of several lengths. Two of them have
    only one token. It also runs each document separately.
    """
    # One token, most of the row (longer than the attention window, if there is one), one token, the rest.
    rest = max(1, min(5, block_size // 4))
    lengths = [length for length in (1, block_size - 2 - rest, 1, rest) if length > 0] if block_size > 2 else [1, 1]
    tokens = _tokens(model, block_size, vocabulary)
    places = torch.cat([torch.arange(length) for length in lengths])[None].to(tokens.device)
    padding = getattr(model.config, "pad_token_id", None)
    with evaluation_mode(model):
        alone = torch.cat([_logits(model, document) for document in tokens.split(lengths, dim=1)], dim=1)
        unblocked = spread_distance(_logits(model, tokens), alone)
        if unblocked <= 1e-4:
            raise SettingsError(
                "Packing documents changes nothing in this model, because its attention has no effect yet, so it "
                "cannot be checked whether documents are separated. Use --packing concatenate."
            )
        tolerance = unblocked * (_EXACT if alone.dtype == torch.float32 else _ROUNDED)
        tried = []
        for first in [0] if padding is None else [0, padding + 1]:
            for positions, mask in ((True, False), (True, True), (False, True)):
                if (mask or causal) and (positions or not first):
                    batches = Batches(positions, mask, first, causal, model.dtype)
                    try:
                        distance = spread_distance(_logits(model, tokens, **batches.arguments(places)), alone)
                        outcome = f"off by {distance:.1e}; without blocking, off by {unblocked:.1e}"
                    except PositionEncodingError as error:
                        raise SettingsError(
                            f"Documents cannot share a row here: {error} Use --packing concatenate."
                        ) from error
                    except (TypeError, ValueError, RuntimeError, IndexError) as error:
                        distance, outcome = float("inf"), f"{type(error).__name__}: {error}"
                    if distance <= tolerance:
                        return batches
                    tried.append(f"{batches}: {outcome}")
        raise SettingsError(
            f"{type(model).__name__} cannot separate documents in one row ({'; '.join(tried)}). Use --packing "
            "concatenate, where attention and positions continue through the row."
        )


def check_reads(model: Any, block_size: int, causal: bool, vocabulary: int) -> None:
    """Runs one row through the model before the training."""
    tokens = _tokens(model, block_size, vocabulary)
    with evaluation_mode(model):
        try:
            _logits(model, tokens)
        except (PositionEncodingError, IndexError, RuntimeError) as error:
            raise SettingsError(
                f"{type(model).__name__} cannot read a row of {block_size} tokens: {error} Use a shorter --block_size, "
                "another scheme, or a model for longer inputs (from scratch: --config_overrides)."
            ) from error
    if causal and not predicts_next_token(model, tokens):
        raise SettingsError(
            f"{type(model).__name__} sees the token to predict: it attends in both directions. Train it with "
            "run_mlm.py, or use a causal model (for BERT and similar: --config_overrides is_decoder=true)."
        )


def _tokens(model: Any, length: int, vocabulary: int) -> Tensor:
    """Returns random tokens, `(1, length)`. None is padding, because some models give it no position."""
    padding = getattr(model.config, "pad_token_id", None)
    drawn = torch.randint(vocabulary - 1, (1, length), generator=torch.Generator().manual_seed(0))
    if padding is not None and 0 <= padding < vocabulary:
        drawn = drawn + (drawn >= padding)
    return drawn.to(model.device)


def _logits(model: Any, tokens: Tensor, **arguments: Tensor) -> Tensor:
    # Without a cache, as in training. With one, decoders do not look for documents.
    uncached = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    logits: Tensor = model(input_ids=tokens, **uncached, **arguments).logits
    return logits
