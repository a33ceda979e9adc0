"""Biases and maps for attention modules outside the attention interface of transformers.

While the forward of such a module runs, a `TorchFunctionMode` intercepts the torch functions it calls: the first
product of queries and keys uses the mapped ones, and the bias is added before the softmax over keys. The module's own
code does everything else, and no forward is copied. The bias receives the factor by which the module multiplies the
product: some modules scale their queries, some their keys, some their scores, and some nothing. The bias also receives
the factors of the queries and of the keys.

A module may compute attention in several parts, such as blocks of queries. Only the first one would have the scheme, so
this is refused, unless the scheme has done its work before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_posenc.attention.block_attention import merge_mask
from hf_posenc.errors import UnsupportedError

TensorPair = tuple[Tensor, Tensor]
#: (query, key), each `(..., length, head_dim)` -> the same, mapped; the given tensors themselves if nothing changes.
PairMap = Callable[[Tensor, Tensor], TensorPair]
Factor = float | Tensor
#: (factor of `query . key`, factor that the queries contain, that of the keys) -> the bias, `(batch or 1, heads,
#: query_len, key_len)` float32.
BiasSource = Callable[[Factor, Factor, Factor], Tensor]

#: The names of the operands of these functions. They may be given by name.
_OPERANDS = ("input", "other", "mat2", "tensor2")
_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
_ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm}
_MULTIPLICATIONS = {torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.multiply_}
_DIVISIONS = {
    *(torch.div, torch.divide, torch.true_divide),
    *(Tensor.div, Tensor.div_, Tensor.divide, Tensor.divide_, Tensor.true_divide, Tensor.true_divide_),
}
#: Functions whose result holds the numbers of their first argument in another shape or order.
_RESHAPES = {
    *(torch.reshape, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.flatten, torch.unflatten),
    *(Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.contiguous, Tensor.unsqueeze),
    *(Tensor.squeeze, Tensor.flatten, Tensor.unflatten, Tensor.to, Tensor.float, Tensor.type_as),
}
_TRANSPOSITIONS = {
    *(torch.transpose, torch.swapaxes, torch.swapdims, torch.permute, Tensor.mT.__get__, Tensor.permute),  # type: ignore[attr-defined]
    *(Tensor.transpose, Tensor.swapaxes, Tensor.swapdims),
}
#: Functions that choose some of the keys.
_SELECTIONS = {torch.topk, torch.sort, torch.argsort, torch.kthvalue} | {
    *(Tensor.topk, Tensor.sort, Tensor.argsort, Tensor.kthvalue),
}
_SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
_DOT_PRODUCT_ATTENTION = functional.scaled_dot_product_attention


class ScoresMode(TorchFunctionMode):
    """Applies a q-k map and a bias to the attention that runs inside it.

    Args:
        owner: the name of the module's class, for messages.
        head_dim: width of a head, used to recognise a product of queries and keys.
        pair_map: the q-k map, or `None`.
        bias: the bias, or `None`.
    """

    def __init__(self, owner: str, head_dim: int, pair_map: PairMap | None, bias: BiasSource | None) -> None:
        super().__init__()
        self.owner = owner
        self.head_dim = head_dim
        self.pair_map = pair_map
        self.bias = bias
        self.score_shape: tuple[int, int] | None = None
        self.biased = False
        #: Whether the scheme changes the first product or its softmax, and has to change others too.
        self.changes_part = bias is not None
        #: Number of axes of the scores in the first softmax, or of the heads in the call of a kernel; 0 before it.
        self._axes = 0
        #: Whether the last two axes of the scores have been exchanged.
        self._turned = False
        #: The product of queries and keys, or the result of later operations on it, and its factor so far.
        self.scores: Any = None
        self.factor: Factor = 1.0
        self.query_factor: Factor = 1.0
        self.key_factor: Factor = 1.0
        #: The tensors that were multiplied with one number before the product, and that number.
        self._scaled: list[tuple[Tensor, Factor]] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Intercepts nothing within: code that the module calls, but is not its own, may multiply too."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercepts one torch call."""
        kwargs = kwargs or {}
        if self.score_shape is None:
            result = self._product(func, args, kwargs)
            if self.score_shape is None:
                self._note_factor(func, args, result)
            else:
                self.scores = result
                self._scaled.clear()
            return result
        given = _given(args, kwargs)
        if func is _DOT_PRODUCT_ATTENTION or (func in _SOFTMAX and self._is_over_keys(given[0])):
            axis = kwargs.get("dim", args[1] if func in _SOFTMAX and len(args) > 1 else None)
            self._refuse_other_parts(func, turned=self._turned or axis not in (None, -1, given[0].dim() - 1))
            self._axes = given[0].dim()
            if self.bias is not None and func in _SOFTMAX and not self.biased:
                self.biased = True
                rest = {name: value for name, value in kwargs.items() if name not in _OPERANDS}
                return func(given[0] + self._bias_like(given[0], given[0].dtype), *args[1:], **rest)
        result = func(*args, **kwargs)
        if any(value is self.scores for value in given):
            if func in _SELECTIONS and self.bias is not None and not self.biased:
                raise UnsupportedError(
                    f"{self.owner} selects keys by their scores ({func.__name__}) before its softmax, where a bias is "
                    "added, so the bias would have no part in the selection. Use a scheme without a bias."
                )
            self._follow(func, given, result)
        return result

    def _is_over_keys(self, scores: Tensor) -> bool:
        """Whether a tensor, of which a softmax is taken, has the scores of a part: at first those of the product."""
        assert self.score_shape is not None
        if self._axes:
            return scores.dim() == self._axes and scores.shape[-1] == self.score_shape[1]
        return scores.shape[-2:] == torch.Size(self.score_shape)

    def _refuse_other_parts(self, func: Any, *, turned: bool) -> None:
        """Refuses a second part, or scores of keys times queries, whose rows are not those of the queries."""
        if self.changes_part and (self._axes or func is _DOT_PRODUCT_ATTENTION):
            raise in_parts(self.owner)
        if self.changes_part and turned:
            raise UnsupportedError(
                f"{self.owner} multiplies keys by queries, and then transposes the scores or takes the softmax over "
                "another axis than the last. Multiply queries by keys."
            )

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a torch function; with mapped queries and keys if it multiplies them."""
        if func in _PRODUCTS:
            query, key, *_ = _given(args, kwargs)
            if key.dim() < 2 or not self._is_score_product(query, key.transpose(-1, -2)):
                return func(*args, **kwargs)
            query, key = self._map(query, key.transpose(-1, -2), query, key)
            rest = {name: value for name, value in kwargs.items() if name not in _OPERANDS}
            return func(query, key.transpose(-1, -2), *args[2:], **rest)
        if func in _ADDED_PRODUCTS:
            return self._added_product(func, args, kwargs)
        if func is torch.einsum and isinstance(args[0], str):
            return self._einsum(args, kwargs)
        if func is _DOT_PRODUCT_ATTENTION:
            return self._dot_product_attention(args, kwargs)
        return func(*args, **kwargs)

    def _note_factor(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Records tensors that have been multiplied with a number. They may be queries or keys."""
        if not (args and isinstance(args[0], Tensor) and isinstance(result, Tensor)):
            return
        factor = self._factor_of(args[0])
        if func in _RESHAPES:
            self._scaled.append((result, factor))
        elif len(args) > 1 and _is_number(args[1]):
            if func in _MULTIPLICATIONS:
                self._scaled.append((result, factor * args[1]))
            elif func in _DIVISIONS:
                self._scaled.append((result, factor / args[1]))

    def _factor_of(self, tensor: Tensor) -> Factor:
        # Not by id, which older versions of torch cannot trace.
        for known, factor in reversed(self._scaled):
            if known is tensor:
                return factor
        return 1.0

    def _follow(self, func: Any, given: tuple[Any, ...], result: Any) -> None:
        """Records the scores after a torch function, and the factor if it is a multiplication or division."""
        if func in _MULTIPLICATIONS:
            self.factor = self.factor * (given[1] if given[0] is self.scores else given[0])
        elif func in _DIVISIONS and given[0] is self.scores:
            self.factor = self.factor / given[1]
        if isinstance(result, Tensor) and result.numel() == self.scores.numel():
            before, after = self.scores.stride()[-2:], result.stride()[-2:]
            if func in _TRANSPOSITIONS and before == after[::-1] != after:
                self._turned = not self._turned
            self.scores = result

    def _is_score_product(self, query: Any, key: Any) -> bool:
        tensors = isinstance(query, Tensor) and isinstance(key, Tensor)
        if not tensors or isinstance(query, torch.nn.Parameter) or isinstance(key, torch.nn.Parameter):
            return False
        return query.dim() >= 3 and query.dim() == key.dim() and query.shape[-1] == key.shape[-1] == self.head_dim

    def _map(self, query: Tensor, key: Tensor, *given: Tensor) -> TensorPair:
        """The mapped query and key. `given` are the two as the module has passed them, which may have factors."""
        self.query_factor, self.key_factor = map(self._factor_of, given)
        self.score_shape = (query.shape[-2], key.shape[-2])
        if self.pair_map is None:
            return query, key
        mapped = self.pair_map(query, key)
        self.changes_part = self.changes_part or mapped[0] is not query or mapped[1] is not key
        return mapped

    def _added_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "batch1", "batch2")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key = given["batch1"], given["batch2"].transpose(-1, -2)
        if not self._is_score_product(query, key):
            return func(*args, **kwargs)
        query, key = self._map(query, key, query, given["batch2"])
        self.factor = given.get("alpha", 1.0)
        rest = {name: value for name, value in given.items() if name not in names}
        return torch.baddbmm(given["input"], query, key.transpose(-1, -2), **rest)

    def _einsum(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        equation, operands = args[0], args[1:]
        if len(operands) == 1 and isinstance(operands[0], tuple | list):
            operands = tuple(operands[0])
        axes = _score_axes(equation) if len(operands) == 2 else None
        if axes is not None:
            (query_time, query_width), (key_time, key_width) = axes
            query = operands[0].movedim((query_time, query_width), (-2, -1))
            key = operands[1].movedim((key_time, key_width), (-2, -1))
            if self._is_score_product(query, key):
                query, key = self._map(query, key, *operands)
                operands = (
                    query.movedim((-2, -1), (query_time, query_width)),
                    key.movedim((-2, -1), (key_time, key_width)),
                )
        return torch.einsum(equation, *operands, **kwargs)

    def _dot_product_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        scale = given.get("scale")
        self.factor = given["query"].shape[-1] ** -0.5 if scale is None else scale
        query, key = given["query"], given["key"]
        given["query"], given["key"] = self._map(query, key, query, key)
        self._axes = query.dim()
        if self.bias is not None:
            query_length, key_length = self.score_shape or (0, 0)
            bias = self._bias_like(given["query"])
            mask = given.get("attn_mask")
            if given.pop("is_causal", False):
                mask = torch.ones(query_length, key_length, dtype=torch.bool, device=bias.device).tril()
            given["attn_mask"] = merge_mask(mask, bias, given["query"].dtype)
            self.biased = True
        return _DOT_PRODUCT_ATTENTION(**given)

    def _bias_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The bias in the shape of scores or of the heads of a kernel."""
        assert self.bias is not None
        bias = self.bias(self.factor, self.query_factor, self.key_factor).to(dtype)
        if like.dim() > 4 or (like.dim() == 4 and bias.shape[1] not in (1, like.shape[1])):
            raise UnsupportedError(
                f"{self.owner} computes scores of the shape {tuple(like.shape)}, and the bias of the scheme has "
                f"{bias.shape[1]} heads. Compute the scores of all heads in one tensor, (batch, heads, queries, keys)."
            )
        if like.dim() == 3:
            # Batch and heads share one axis, batch-major.
            return bias.expand(like.shape[0] // bias.shape[1], -1, -1, -1).flatten(0, 1)
        return bias


def in_parts(owner: str) -> UnsupportedError:
    """The error for a module whose other parts would lack the scheme."""
    return UnsupportedError(
        f"{owner} computes its attention in several parts (blocks of queries, rows of a batch, or heads), and only the "
        "first of them would have the position encoding. Compute the attention of all queries, rows and heads at once."
    )


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a torch function, its operands first."""
    return (*args, *(kwargs[name] for name in _OPERANDS if name in kwargs), *kwargs.values())


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float)


def _score_axes(equation: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """((query time, query width), (key time, key width)) axes of a two-operand product, or `None`."""
    if "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    if inputs.count(",") != 1:
        return None
    first, second = inputs.split(",")
    contracted = [letter for letter in first if letter in second and letter not in output]
    query_only = [letter for letter in first if letter not in second and letter in output]
    key_only = [letter for letter in second if letter not in first and letter in output]
    if not (len(contracted) == len(query_only) == len(key_only) == 1):
        return None
    width = contracted[0]
    return (first.index(query_only[0]), first.index(width)), (second.index(key_only[0]), second.index(width))
