"""Giving every layer of a stack of text the same tokens in two orders, to see what depends on their positions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.patching.anatomy.short_runs import distance, exchanged, tokens_of
from hf_posenc.patching.anatomy.sites import AttentionLayer, Stack

#: The tokens of the second row. The last one sees the others, even in a causal model, if `sees_all`.
ORDER = [1, 0, 2]
_LENGTH = len(ORDER)
#: Makes a difference of logits larger than the rounding of half precision.
_AMPLIFICATION = 8.0


class TokenOrder:
    """Observes a run of one stack on two rows, which hold the same tokens in two orders.

    In front of every layer, and of its attention, the second row becomes the first in the other order, because
    the layers before may have told tokens apart by what they see. Without positions, attention then computes the same
    for the last token, and a bidirectional one for all.

    Args:
        stack: the stack, in which no scheme and no native mechanism is active.
        strict: whether any difference of embeddings counts. Otherwise they may depend on the tokens before them.

    Attributes:
        problem: what depends on positions; empty if nothing does.
    """

    def __init__(self, stack: Stack, *, strict: bool) -> None:
        self.stack = stack
        self.strict = strict
        self.problem = ""
        self._embedded = self._in_order = False

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Context manager in which the layers of the stack are observed."""
        with ExitStack() as handles:
            stack = self.stack
            paths = filter(None, (_layer_path(attention.path) for attention in stack.attentions))
            layers = {id(layer): layer for layer in map(stack.module.get_submodule, paths)}
            if stack.first_layer is not None:
                layers[id(stack.first_layer)] = stack.first_layer
            for layer in layers.values():
                handles.enter_context(layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True))
            for attention in stack.attentions:
                reorder = functools.partial(self._reorder_attention, attention)
                check = functools.partial(self._check_output, attention)
                handles.enter_context(attention.module.register_forward_pre_hook(reorder, with_kwargs=True))
                handles.enter_context(attention.module.register_forward_hook(check, with_kwargs=True))
            yield

    def _enter_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        rows = self._rows((*args, *kwargs.values()))
        # Only the layer that runs first gets embeddings. In a model that loops, it need not be the first of the list.
        if rows is not None and not self._embedded and self._is_positional(rows, self.strict):
            self._note("the input of its first layer depends on the position of tokens")
        self._embedded = True
        self._in_order = rows is not None
        return self._reordered(args, kwargs)

    def _reorder_attention(self, attention: AttentionLayer, module: nn.Module, args: Any, kwargs: Any) -> Any:
        rows = self._rows((*args, *kwargs.values()))
        if self._in_order and rows is not None and self._is_positional(rows, strict=False):
            self._note(f"the input of {attention.path} depends on the position of tokens")
        self._in_order = False  # Another attention of the same layer gets what this one has seen.
        return self._reordered(args, kwargs, _AMPLIFICATION)

    def _check_output(
        self, attention: AttentionLayer, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        rows = self._rows(output)
        if rows is None or has_convolution(module) or not sees_all(attention, self.stack):
            return
        # A model may run the layers of a decoder in both directions, and say so in their attributes.
        causal = attention.causal or bool(kwargs.get("is_causal"))
        causal = causal or any(map(_hides_later_keys, (*args, *kwargs.values())))
        first = rows[0, -1:] if causal else rows[0, -_LENGTH:][ORDER]
        if _differ(first, rows[1, -first.shape[0] :]):
            self._note(f"the output of {attention.path} ({_code_of(module)}) depends on the order of tokens")

    def _is_positional(self, rows: Tensor, strict: bool) -> bool:
        """Whether the vectors of the same tokens differ between the rows, and not because they saw other tokens."""
        several, rest = divmod(rows.shape[1], _LENGTH)
        # A module may have made several vectors of each token.
        ways = [rows[:, -_LENGTH:]] + ([] if rest else [rows.unflatten(1, (_LENGTH, several)).flatten(2)])
        return all(_differ(own[0][ORDER], own[1]) and (strict or not _differ(own[0, -1], own[1, -1])) for own in ways)

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _rows(self, values: Any) -> Tensor | None:
        """`(2, length, hidden)`: the first tensor, batch first; `None` if it has another shape."""
        rows = tokens_of(self.stack, values)[1]
        known = rows is not None and rows.is_floating_point() and rows.shape[0] == 2 and rows.shape[1] >= _LENGTH
        return rows if known else None

    def _reordered(self, args: tuple[Any, ...], kwargs: dict[str, Any], factor: float = 1.0) -> Any:
        """The arguments, in which the second row of the hidden states is the first in the other order."""
        found, rows = tokens_of(self.stack, (*args, *kwargs.values()))
        if found is None or rows is None or self._rows(found) is None:
            return None
        before = rows.shape[1] - _LENGTH
        row = rows[0] * factor if torch.finfo(rows.dtype).bits < 32 else rows[0]
        changed = found.clone(memory_format=torch.contiguous_format)
        view = tokens_of(self.stack, changed)[1]
        assert view is not None
        view.copy_(torch.stack([row, row[[*range(before), *(before + place for place in ORDER)]]]))
        return exchanged(found, changed, args, kwargs)


def in_both_orders(arguments: dict[str, Any], length: int) -> dict[str, Any]:
    """The arguments of a run on one row of `length` tokens, with the row in the other order below it."""
    return {name: _in_both_orders(name, value, length) for name, value in arguments.items()}


def _in_both_orders(name: str, value: Any, length: int) -> Any:
    if not isinstance(value, Tensor) or value.shape[:1] != (1,) or (value.dim() == 2 and value.is_floating_point()):
        return value  # A vector applies to both rows.
    other = value
    if name in ("input_ids", "decoder_input_ids", "inputs_embeds", "query_embeds", "hidden_states"):
        # One question with one choice has another axis before that of the tokens.
        axis = 1 if value.shape[1] == length else 2
        other = value.index_select(axis, torch.tensor(ORDER, device=value.device))
    return torch.cat([value, other])


def sees_all(attention: AttentionLayer, stack: Stack) -> bool:
    """Whether a token sees the two before it. A shorter window shows which tokens are next to it."""
    names = ("sliding_window", "window_size")
    stated = [getattr(one, name) for one in (attention.module, stack.config) for name in names if hasattr(one, name)]
    return not (stated and isinstance(stated[0], int) and 0 < stated[0] < _LENGTH)


def has_convolution(attention: nn.Module) -> bool:
    """Whether an attention module mixes neighbouring tokens by a convolution. Its weights may be computed."""
    return any(
        one.kernel_size[0] > 1 if isinstance(one, nn.Conv1d | nn.Conv2d) else "Convolution" in type(one).__name__
        for one in attention.modules()
    )


def _hides_later_keys(mask: Any) -> bool:
    """Whether an argument is a mask `(batch, heads, queries, keys)` that hides the last key from the first query."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] < _LENGTH:
        return False
    last = mask[..., 0, -1]
    return bool((~last).all() if mask.dtype == torch.bool else (last < -1.0).all())


def _differ(one: Tensor, other: Tensor) -> bool:
    return distance(one, other) > 0


def _layer_path(path: str) -> str:
    """`layers.0` for an attention at `layers.0.self_attn`; empty if layers are not in a list."""
    names = path.split(".")
    place = next((place for place, name in enumerate(names) if name.isdigit()), None)
    return "" if place is None or place + 1 == len(names) else ".".join(names[: place + 1])


def _code_of(module: nn.Module) -> str:
    """The class of a module, and where its forward is defined if that is elsewhere."""
    forward, kind = type(module).forward, type(module)
    defined = f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}"
    return (
        kind.__name__
        if defined == f"{kind.__module__}.{kind.__qualname__}.forward"
        else (f"{kind.__name__} with the forward {defined}")
    )
