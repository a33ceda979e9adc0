"""The same tokens in the same model at other positions: its inputs, and a check that they do what they should."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.call.cache import is_cache
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.patching.place.lengths import rows_of_tables
from hf_posenc.preserve import evaluation_mode, isolated_rng

#: Inputs that are not inputs of a forward with other positions.
_NOT_GIVEN = ("labels", "num_items_in_batch")
#: Inputs that state the documents of a flattened batch, or earlier tokens.
_REFUSED = ("cu_seq_lens_q", "cu_seq_lens_k")
#: Differences of rounding, in units of the spread of the logits, and as a share of what one position changes.
_ROUNDED, _SHARE = 1e-3, 0.2
#: Differences that count as zero, in the same units.
_NOTHING = 1e-6


def document_starts(positions: Tensor, real: Tensor) -> Tensor:
    """`(batch, length)` bool: where a run of consecutive positions begins, or where padding begins."""
    starts = torch.ones_like(real)
    starts[:, 1:] = (positions.diff(dim=-1) != 1) | (real[:, 1:] != real[:, :-1])
    return starts


def mask_of_documents(documents: Tensor, dtype: torch.dtype, *, causal: bool = True) -> Tensor:
    """`(batch, 1, length, length)`: 0, or the lowest number of the dtype where a token would see another document.

    Args:
        documents: `(batch, length)`, a number for each document of a row.
        dtype: of the mask.
        causal: whether it also hides later tokens.
    """
    hidden = documents[:, None, :, None] != documents[:, None, None, :]
    if causal:
        hidden = hidden | torch.ones_like(hidden[0, 0]).triu(1)
    return hidden.to(dtype) * torch.finfo(dtype).min


def spread_distance(first: Tensor, second: Tensor) -> float:
    """The largest difference, in units of the spread of the second."""
    if not len(first):
        return 0.0
    second = second.float()
    return float((first.float() - second).abs().max() / second.std().clamp(min=1e-9))


@dataclass(frozen=True)
class View:
    """A batch with its standard positions.

    Args:
        given: the inputs of a forward, without labels, with an explicit attention mask. Without one, transformers would
            treat each jump of the positions as the start of another document.
        positions: `(batch, length)` int64.
        real: `(batch, length)` bool, false for padding.
    """

    given: dict[str, Any]
    positions: Tensor
    real: Tensor


class PositionViews:
    """Forwards of a causal language model at positions other than its own.

    Args:
        model: the model, or a PEFT model around it.

    Raises:
        UnsupportedError: for a model that takes no `position_ids`, or has an encoder.
    """

    def __init__(self, model: nn.Module) -> None:
        target = unwrapped(model)
        name = type(target).__name__
        if getattr(target.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{name} is an encoder-decoder. Changed positions are only for causal language models: load one with "
                "AutoModelForCausalLM."
            )
        taken = inspect.signature(type(target).forward).parameters
        if "position_ids" not in taken:
            raise UnsupportedError(
                f"{name} takes no position_ids, so its tokens cannot be given other positions. Use a model whose "
                "forward takes them, such as Llama, Qwen3, GPT-2 or GPT-NeoX."
            )
        self.model, self.target = model, target
        self._uncached = {"use_cache": False} if "use_cache" in taken else {}
        self._checked = False

    def refuse_wrapping(self) -> None:
        """Refuses positions that do not always increase.

        Raises:
            UnsupportedError: if a part of the scheme finds the documents of a row by its positions.
        """
        if any(getattr(module, "finds_documents", False) for module in self.target.modules()):
            encoding = current_encoding(self.target)
            raise UnsupportedError(
                f"{'The scheme' if encoding is None else repr(encoding.config.name)} treats every decrease of the "
                "positions as the start of another document, and with shift='cyclic' positions decrease within a "
                "document. Use shift='skip'."
            )

    def limit(self) -> int | None:
        """The number of positions that the model has; `None` without a limit."""
        encoding = current_encoding(self.target)
        return self._native_limit if encoding is None else encoding.reach().length

    @cached_property
    def _native_limit(self) -> int | None:
        return rows_of_tables(self.target)

    def of(self, inputs: Mapping[str, Any], logits: Tensor) -> View:
        """A batch with its standard positions. The first one that has two tokens is used to check the model.

        Args:
            inputs: of the model, including "labels".
            logits: `(batch, length, vocabulary)`, what the model returned for them.

        Raises:
            UnsupportedError: for forms of inputs that cannot be perturbed, or if the check fails.
        """
        view = self._view(inputs, logits)
        if not self._checked:
            self._checked = self._check(inputs, view)
        return view

    def logits(self, view: View, positions: Tensor) -> Tensor:
        """`(batch, length, vocabulary)` of a batch at `(batch, length)` positions."""
        return self.model(**(self._uncached | view.given | {"position_ids": positions})).logits

    def _view(self, inputs: Mapping[str, Any], logits: Tensor) -> View:
        implementation = str(getattr(self.target.config, "_attn_implementation", ""))
        if "flash_attention" in implementation:
            raise UnsupportedError(
                f"{implementation} splits a row where positions jump, so tokens behind a jump would not see those "
                'before it. Load the model with attn_implementation="sdpa", which runs the same kernels on a GPU.'
            )
        passed = ((name, value) for name, value in inputs.items() if value is not None)
        refused = [name for name, value in passed if name in _REFUSED or is_cache(value)]
        if refused:
            raise UnsupportedError(
                f"The inputs have {refused[0]}, which already determines the positions. Give plain rows, (batch, "
                "length), or documents whose position_ids restart."
            )
        batch, length = inputs["labels"].shape
        if tuple(logits.shape[:2]) != (batch, length):
            raise UnsupportedError(
                f"The labels are {(batch, length)} and the logits are {tuple(logits.shape[:2])}: the model adds tokens "
                "of its own (prompt tuning) or leaves some out, whose positions are unknown."
            )
        device = logits.device
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=device).unsqueeze(0)
        if positions.dim() != 2 or positions.is_floating_point():
            raise UnsupportedError(
                f"The position_ids are {positions.dtype} of shape {tuple(positions.shape)}. Only positions along one "
                "axis, integers (batch, length), can be perturbed."
            )
        positions = positions.to(device).long().expand(batch, length)
        mask = inputs.get("attention_mask")
        real = torch.ones(batch, length, dtype=torch.bool, device=device)
        if mask is None:
            mask = self._mask(positions, real)
        elif not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            raise UnsupportedError("The attention_mask is not a tensor (batch, length) or (batch, 1, length, length).")
        elif mask.dim() == 2:
            real = mask.to(device).bool()
            if bool((real[:, 1:] & ~real[:, :-1]).any()):
                raise UnsupportedError(
                    "Some rows have padding before real tokens, whose standard positions differ between models. Pad "
                    'behind the text: tokenizer.padding_side = "right".'
                )
        given = {name: value for name, value in inputs.items() if name not in _NOT_GIVEN}
        return View(given | {"attention_mask": mask}, positions, real)

    def _mask(self, positions: Tensor, real: Tensor) -> Tensor:
        """A mask for rows without one: of ones, or of pairs if positions restart, which separates documents."""
        starts = document_starts(positions, real)
        if not bool(starts[:, 1:].any()):
            return torch.ones_like(positions)
        return mask_of_documents(starts.cumsum(-1), self.target.dtype)

    def _check(self, inputs: Mapping[str, Any], view: View) -> bool:
        """Compares logits at standard and at moved positions, in evaluation mode, and refuses an unsuitable model.

        Returns whether the batch has a document of two tokens to compare.
        """
        starts = document_starts(view.positions, view.real) | ~view.real
        inside = (~starts).nonzero()
        if not len(inside):
            return False
        # A token in the middle of those that have one before them in their document. From there on, the document moves
        # one position away, or nearer if the model has no more positions.
        row, slot = inside[len(inside) // 2].tolist()
        documents = starts[row].cumsum(-1)
        before = torch.arange(len(documents), device=starts.device) < slot
        behind = (documents == documents[slot]) & view.real[row] & ~before
        limit, last = self.limit(), int(view.positions[row, behind].max())
        others = view.positions.clone()
        others[row] += behind * (1 if limit is None or last + 1 < limit else -1)
        with isolated_rng(0), evaluation_mode(self.model):
            plain = {name: value for name, value in inputs.items() if name not in _NOT_GIVEN}
            usual = self.model(**(self._uncached | plain)).logits
            same, moved = (self.logits(view, positions) for positions in (view.positions, others))
            tokens = view.given.get("input_ids")
            changed = None
            if tokens is not None:
                tokens = tokens.clone()
                tokens[row, slot - 1] = (tokens[row, slot - 1] + 1) % same.shape[-1]
                changed = self.logits(replace(view, given=view.given | {"input_ids": tokens}), others)
        name, effect = type(self.target).__name__, spread_distance(moved[row, behind], same[row, behind])
        if effect <= _NOTHING:
            encoding = current_encoding(self.target)
            scheme = "its own scheme" if encoding is None else f"the scheme {encoding.config.name!r}"
            raise UnsupportedError(
                f"Changing position_ids has no effect in this {name}: {scheme} does not read them, or its parameters "
                "have no effect yet. Train with standard positions."
            )
        tolerance = max(_ROUNDED, _SHARE * effect)
        if spread_distance(same[view.real], usual[view.real]) > tolerance:
            raise UnsupportedError(
                f"{name} gives different logits with the same positions and an explicit attention mask, so its views "
                "would differ in more than their positions. In a model with sliding-window attention, or one that does "
                "not separate documents by position_ids, documents that share a row cannot be kept apart in both "
                "views: use one document per row (in the training scripts: --packing concatenate). A model whose "
                "positions do not begin at 0 needs position_ids in its inputs."
            )
        if spread_distance(moved[row, before], same[row, before]) > tolerance:
            raise UnsupportedError(
                f"In this {name}, tokens change with the positions of later ones: it is not causal. Changed positions "
                "are only for causal language models."
            )
        if changed is not None and spread_distance(changed[row, behind], moved[row, behind]) <= _NOTHING:
            raise UnsupportedError(
                f"In this {name}, tokens behind a jump of the positions do not see those before it: its attention "
                f"({self.target.config._attn_implementation}) treats the jump as the start of another document. Load "
                'the model with attn_implementation="sdpa".'
            )
        return True
