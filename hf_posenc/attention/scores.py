"""Biases and maps for attention modules outside the attention interface of transformers.

While the forward of such a module runs, a `TorchFunctionMode` intercepts the torch functions it calls: the first
product of queries and keys uses the mapped ones, and the bias is added before the softmax over keys. The module's own
code does everything else, and no forward is copied. The bias receives the factor by which the module multiplies the
product: some modules scale their queries, some their keys, some their scores, and some nothing. The bias also receives
the factors of the queries and of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_posenc.attention.block_attention import merge_mask

TensorPair = tuple[Tensor, Tensor]
#: (query, key), each `(..., length, head_dim)` -> the same, mapped.
PairMap = Callable[[Tensor, Tensor], TensorPair]
Factor = float | Tensor
#: (factor of `query . key`, factor that the queries contain, that of the keys) -> the bias, `(batch or 1, heads,
#: query_len, key_len)` float32.
BiasSource = Callable[[Factor, Factor, Factor], Tensor]

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
_SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
_DOT_PRODUCT_ATTENTION = functional.scaled_dot_product_attention


class ScoresMode(TorchFunctionMode):
    """Applies a q-k map and a bias to the attention that runs inside it.

    Args:
        head_dim: width of a head, used to recognise a product of queries and keys.
        pair_map: the q-k map, or `None`.
        bias: the bias, or `None`.
    """

    def __init__(self, head_dim: int, pair_map: PairMap | None, bias: BiasSource | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.pair_map = pair_map
        self.bias = bias
        self.score_shape: tuple[int, int] | None = None
        self.biased = False
        #: The product of queries and keys, or the result of later operations on it, and its factor so far.
        self.scores: Any = None
        self.factor: Factor = 1.0
        self.query_factor: Factor = 1.0
        self.key_factor: Factor = 1.0
        #: The tensors that were multiplied with one number before the product, by id, and that number.
        self._scaled: dict[int, tuple[Tensor, Factor]] = {}

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
        if self.bias is None or self.biased:
            return func(*args, **kwargs)
        if func in _SOFTMAX and args[0].shape[-2:] == torch.Size(self.score_shape):
            self.biased = True
            return func(args[0] + self._bias_like(args[0]), *args[1:], **kwargs)
        result = func(*args, **kwargs)
        given = (*args, *kwargs.values())
        if any(value is self.scores for value in given):
            self._follow(func, given, result)
        return result

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a torch function; with mapped queries and keys if it multiplies them."""
        if func in _PRODUCTS and self._is_score_product(args[0], args[1].transpose(-1, -2)):
            query, key = self._map(args[0], args[1].transpose(-1, -2), *args[:2])
            return func(query, key.transpose(-1, -2), *args[2:], **kwargs)
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
            if id(args[0]) in self._scaled:
                self._scaled[id(result)] = (result, factor)
        elif len(args) > 1 and _is_number(args[1]):
            if func in _MULTIPLICATIONS:
                self._scaled[id(result)] = (result, factor * args[1])
            elif func in _DIVISIONS:
                self._scaled[id(result)] = (result, factor / args[1])

    def _factor_of(self, tensor: Tensor) -> Factor:
        return self._scaled[id(tensor)][1] if id(tensor) in self._scaled else 1.0

    def _follow(self, func: Any, given: tuple[Any, ...], result: Any) -> None:
        """Records the scores after a torch function, and the factor if it is a multiplication or division."""
        if func in _MULTIPLICATIONS:
            self.factor = self.factor * (given[1] if given[0] is self.scores else given[0])
        elif func in _DIVISIONS and given[0] is self.scores:
            self.factor = self.factor / given[1]
        if isinstance(result, Tensor) and result.numel() == self.scores.numel():
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
        return (query, key) if self.pair_map is None else self.pair_map(query, key)

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
        if self.bias is not None:
            query_length, key_length = self.score_shape or (0, 0)
            bias = self.bias(self.factor, self.query_factor, self.key_factor)
            mask = given.get("attn_mask")
            if given.pop("is_causal", False):
                mask = torch.ones(query_length, key_length, dtype=torch.bool, device=bias.device).tril()
            given["attn_mask"] = merge_mask(mask, bias, given["query"].dtype)
            self.biased = True
        return _DOT_PRODUCT_ATTENTION(**given)

    def _bias_like(self, scores: Tensor) -> Tensor:
        assert self.bias is not None
        bias = self.bias(self.factor, self.query_factor, self.key_factor).to(scores.dtype)
        if scores.dim() == 3:
            # Batch and heads share one axis, batch-major.
            return bias.expand(scores.shape[0] // bias.shape[1], -1, -1, -1).flatten(0, 1)
        return bias


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
