"""Adds a bias to the logits of each attention backend.

`attention_with` returns attention with a bias that calls the function that the model has chosen, so kernels, soft caps,
attention sinks and dropout do not change. How the bias is added depends on its form (`hf_posenc.attention.forms`):

===============  ===========================  ==========================  =====================  =================
form             sdpa                         flex_attention              flash                  eager, others
===============  ===========================  ==========================  =====================  =================
distance         blocks; views on a CPU       a look-up per pair          folded if linear       a matrix
separable        folded into queries, keys    a look-up per pair          folded                 a matrix
sum of the two   blocks of a bias             two look-ups per pair       refused                a matrix
rows             blocks; a matrix in graphs   a matrix                    refused                a matrix
===============  ===========================  ==========================  =====================  =================

With sdpa, short inputs get a matrix, whose kernel is launched sooner (`hf_posenc.attention.blockwise.Sizes`). On
accelerators, layers share one matrix of a fixed distance bias at most lengths. With sdpa on a CPU, and with
flex_attention, keys that cannot change the result of a query are skipped (`hf_posenc.attention.windows`).

If sdpa is called with dropout or a soft cap, transformers' own function gets the bias in blocks. Flash kernels do not
support training a learned bias: see `hf_posenc.attention.fused_attention`.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posenc.attention.block_attention import (
    AttentionCall,
    attend_with_mask,
    autocast_inputs,
    block_attention,
    for_kernel,
    merge_mask,
    rows_without_keys,
    single_query_attention,
    without_empty_rows,
)
from hf_posenc.attention.block_windows import narrowed
from hf_posenc.attention.blockwise import SIZES
from hf_posenc.attention.by_blocks import attention_by_blocks
from hf_posenc.attention.divided import divided_attention
from hf_posenc.attention.folding import attend_with_wide_values, fold
from hf_posenc.attention.forms import (
    BiasForm,
    FusedForm,
    RowsForm,
    has_shared_rows,
    mask_of_rows,
    masked_rows,
    with_mask,
)
from hf_posenc.attention.fused_attention import folds, fused_attention
from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.weights import exporting

Function = Callable[..., Any]
#: `(module, query, key, value) -> (output, probabilities or None)`.
Attention = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]
#: The maximum size, in bytes, of a bias matrix for backends that need one. Increase it to allow larger matrices.
DENSE_LIMIT = 8 * 2**30

_TAKES_POSITION_BIAS: dict[Function, bool] = {}
#: The place of the mask among the arguments of an attention function.
_MASK = 4
_READS_MASK: dict[Function, bool] = {}
#: Options of stock sdpa that this package leaves to it.
_OTHER_FEATURES = ("dropout", "softcap", "s_aux", "output_attentions")


def is_stock_sdpa(function: Function) -> bool:
    """Whether a function is transformers' own sdpa, outside of function transforms. Another "sdpa" may do anything."""
    return function is sdpa_attention_forward and not torch._C._are_functorch_transforms_active()


def is_single_query_of_sdpa(call: AttentionCall) -> bool:
    """Whether `single_query_attention` is what stock sdpa computes in a call with one query, in fewer calls."""
    return call.mask is None and is_stock_sdpa(call.function) and not (exporting() or _uses_other_features(call))


def attention_with(call: AttentionCall, form: BiasForm, module: nn.Module, query: Tensor, key: Tensor) -> Attention:
    """Decides how a bias is added to the logits of the function of a call.

    The result does not depend on the values in queries and keys, so layers with the same bias and call use it for all
    queries and keys of the same shapes.

    Args:
        call: what the model would call.
        form: the bias.
        module: the attention module.
        query: `(batch, heads, query_len, head_dim)`.
        key: `(batch, key_value_heads, key_len, head_dim)`.

    Returns:
        `(module, query, key, value) -> (output, probabilities or None)`. It raises an `UnsupportedError` for a bias
        that the backend supports only as a matrix, if that is too large.

    Raises:
        UnsupportedError: for a backend that does not support the bias.
    """
    name, function = call.name, call.function
    decodes = query.shape[2] == 1 and call.mask is None and query.dtype != torch.float64 and not exporting()
    if decodes and is_stock_sdpa(function):  # Calls cost more than the computation.
        bias = for_kernel(form.rows(), query)
        if _uses_other_features(call):
            return _with_mask(call, bias)
        return functools.partial(single_query_attention, bias=bias, scaling=call.kwargs.get("scaling"))
    if query.dtype == torch.float64:
        # Schemes compute biases in float32 in any model. With a float64 query they are cast up, so that sums and
        # kernels have one dtype.
        form = form.double()
    if "flash" in name:
        return functools.partial(_attend_folded, call, form)
    if name == "eager":
        if not _reads_mask(function):
            raise UnsupportedError(
                f"The eager attention of {type(module).__name__} ignores its mask, so a logit bias would be ignored. "
                'Use model.set_attn_implementation("sdpa").'
            )
        return _with_mask(call, merge_mask(call.mask, form.rows(), query.dtype))
    if not _takes_position_bias(function):
        others = " or ".join(f'"{other}"' for other in ("sdpa", "flex_attention", "eager") if other != name)
        raise UnsupportedError(
            f"The attention backend {name!r} ({getattr(function, '__module__', '')}) has no position_bias parameter, "
            f"so a logit bias would be ignored. Use model.set_attn_implementation with {others}. If you have "
            f"registered {name!r}, give your function a parameter position_bias, which is added to the logits."
        )
    of_keys = isinstance(form, FusedForm) and form.vector is None
    if name == "flex_attention" and query.device.type != "cpu" and not of_keys:
        # A kernel with three stages, which torch chooses for some heads, has no room for two blocks of a bias.
        options = {"num_stages": 2} | (call.kwargs.get("kernel_options") or {})
        call = replace(call, kwargs=call.kwargs | {"kernel_options": options})
    if name == "flex_attention" and not isinstance(form, RowsForm):
        return functools.partial(_attend_looking_up, call, form)
    stock_sdpa = function is sdpa_attention_forward
    if stock_sdpa and torch._C._are_functorch_transforms_active():
        # The CPU's fused kernel has no gradient of a mask, and the operators here do not support function transforms.
        return functools.partial(sdpa_kernel(SDPBackend.MATH)(_attend_dense), call, form)
    if stock_sdpa and query.shape[2] > 1:
        return _sdpa_with(call, form, module, query, key)
    if stock_sdpa and not exporting() and isinstance(form, FusedForm) and form.terms is None:
        return _with_mask(call, merge_mask(call.mask, form.rows(), query.dtype))
    # A single row is small, and transformers then reads keys shared by several heads only once.
    return functools.partial(_attend_dense, call, form)


class MatrixKernel:
    """Attention with all rows of a bias at once, for biases of any layer with the same mask.

    Args:
        call: the call of stock sdpa whose mask and options apply.
        causal: whether query i sees no key after key i; without a mask, and with as many keys as queries.
        heads: number of query heads.
        query: `(batch, heads, query_len, head_dim)`. Only its shape and device matter.
        key: `(batch, key_value_heads, key_len, head_dim)`. Only its shape matters.
    """

    def __init__(self, call: AttentionCall, causal: bool, heads: int, query: Tensor, key: Tensor) -> None:
        self.lengths = (query.shape[2], key.shape[2])
        self.mask_arguments = (call.mask, causal, 0, *self.lengths)
        numbers = query.shape[0] * heads * query.shape[2] * key.shape[2]
        # Additive masks may hide all keys of a padding query with -inf, for which softmax gives NaN.
        may_be_empty = call.mask is not None and call.mask.dtype != torch.bool
        empty = None if call.mask is None else rows_without_keys(call.mask[..., : key.shape[2]])
        keeps_probabilities = numbers <= SIZES[query.is_cpu].kept_probabilities
        self.options = (call.scaling(query), may_be_empty, keeps_probabilities, empty)
        self._visible: Tensor | None = None

    def masked(self, rows: Tensor) -> Tensor:
        """The rows of a bias with the mask."""
        if self._visible is None:
            self._visible = mask_of_rows(*self.mask_arguments, rows.device)
        return without_empty_rows(with_mask(rows, self._visible), self.options[-1])

    def rows_of_layers(self, biases: Tensor) -> Tensor:
        """`(layers, batch or 1, heads, query_len, key_len)`: the rows of the biases of several layers, with the mask.

        Args:
            biases: the rows, or the biases of all distances, `(layers, heads, query_len + key_len - 1)`.
        """
        if biases.ndim == 3:
            biases = biases.unfold(-1, self.lengths[1], 1).flip(-2).unsqueeze(1)
        return self.masked(biases)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, None]:
        """`(batch, query_len, heads, value_dim)`, and `None` for the probabilities. The rows contain the mask."""
        return block_attention(query, key, value, rows, *self.options), None


class MatrixAttention:
    """Attention with all rows of a bias at once. Layers with a distance bias share these rows.

    Args:
        form: the bias.
        kernel: the kernel.

    Attributes:
        known: the rows of the bias with the mask; `None` if they have to be computed.
    """

    def __init__(self, form: BiasForm, kernel: MatrixKernel) -> None:
        self.form = form
        self.kernel = kernel
        self.known: Tensor | None = None

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        """`(batch, query_len, heads, value_dim)`, and `None` for the probabilities."""
        query, key, value = autocast_inputs(query, key, value)
        rows = self.known
        if rows is None:
            mask = mask_of_rows(*self.kernel.mask_arguments, query.device)
            rows = masked_rows(self.form, mask, self.kernel.options[-1], 0, query.shape[2], key.shape[2], query)
            self.known = rows if has_shared_rows(self.form) else None
        return self.kernel(query, key, value, rows)


def attention_without_mask(
    call: AttentionCall, form: BiasForm, module: nn.Module, query: Tensor, key: Tensor
) -> Attention:
    """Attention that this package computes itself: every query reads all keys that its bias does not hide.

    The arguments and the result are those of `attention_with` for stock sdpa. The mask of the call is not read.

    Raises:
        UnsupportedError: if the call uses a feature that only `function` has.
    """
    if _uses_other_features(call):
        raise UnsupportedError(
            "With a bias that is computed for a part of the tokens, dropout of attention weights, soft caps, attention "
            "sinks and output_attentions are not supported. Set the attention dropout of the config to 0."
        )
    form = form.double() if query.dtype == torch.float64 else form
    call = replace(call, mask=None, kwargs=call.kwargs | {"is_causal": False})
    return _sdpa_with(call, form, module, query, key)


def _with_mask(call: AttentionCall, mask: Tensor) -> Attention:
    """Attention with the bias in the mask."""

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return call.function(module, query, key, value, mask, *call.args, **call.kwargs)

    return attention


def _is_shared_by_layers(form: BiasForm, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether layers of an accelerator share one matrix of a fixed bias, with the mask in it, beyond short inputs."""
    if not isinstance(form, FusedForm) or form.terms is not None or form.requires_grad or not form.of_layers:
        return False
    batch = 1 if mask is None else mask.shape[0]
    return batch * form.heads * query.shape[2] * key.shape[2] <= SIZES[query.is_cpu].shared_numbers


@torch.compiler.assume_constant_result
def _reads_mask(function: Function) -> bool:
    """Whether an attention function of an architecture uses the mask that it is given."""
    known = _READS_MASK.get(function)
    if known is None:
        code = getattr(inspect.unwrap(function), "__code__", None)
        known = True
        if code is not None and code.co_argcount > _MASK:
            steps = (step.argval for step in dis.get_instructions(code))
            mask = code.co_varnames[_MASK]
            known = any(read == mask or (isinstance(read, tuple) and mask in read) for read in steps)
        _READS_MASK[function] = known
    return known


@torch.compiler.assume_constant_result
def _takes_position_bias(function: Function) -> bool:
    # Not a functools cache, which would cause warnings in compilers.
    if function not in _TAKES_POSITION_BIAS:
        _TAKES_POSITION_BIAS[function] = "position_bias" in inspect.signature(function).parameters
    return _TAKES_POSITION_BIAS[function]


def _sdpa_with(call: AttentionCall, form: BiasForm, module: nn.Module, query: Tensor, key: Tensor) -> Attention:
    mask: Tensor | None = call.mask
    causal = mask is None and _is_causal(module, call)
    if causal and key.shape[2] > query.shape[2]:
        # An empty static cache: the slots after the queries are unused.
        used = query.shape[2]
        attend = _sdpa_with(call, form.of_first(used), module, query, key[:, :, :used])
        return lambda module, query, key, value: attend(module, query, key[:, :, :used], value[:, :, :used])
    compiling = torch.compiler.is_compiling()
    trains = mask is not None and torch.is_grad_enabled()
    dense = functools.partial(_attend_dense, call, form)
    if exporting() or (mask is not None and trains and mask.requires_grad):
        return dense
    in_graph = functools.partial(_attend_in_graph, call, form) if trains else dense
    if _uses_other_features(call):
        return in_graph if compiling else attention_by_blocks(call, form, causal, query, key, plain=False)
    sizes, shared = SIZES[query.is_cpu], _is_shared_by_layers(form, query, key, mask)
    short = query.shape[2] * key.shape[2] <= sizes.short_pairs
    as_matrix = short or shared
    unmasked = not as_matrix and causal and not query.is_cpu and folds(query)
    if unmasked and isinstance(form, FusedForm) and form.terms is None and not form.requires_grad:
        # A bias that is folded as a number per key needs no mask. Kernels without a mask are faster on this device.
        form = form.separable() or form
    if not as_matrix and not isinstance(form, RowsForm):
        scaling = call.scaling(query)

        def fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
            return fused_attention(query, key, value, form, mask, scaling, causal), None

        return fused
    if compiling:
        return in_graph
    numbers = query.shape[0] * form.heads * query.shape[2] * key.shape[2]
    if shared or (short and numbers <= sizes.kept_numbers):
        return MatrixAttention(form, MatrixKernel(call, causal, form.heads, query, key))
    by_blocks = attention_by_blocks(call, form, causal, query, key, plain=True)
    other = form.other if isinstance(form, RowsForm) else None
    if other is None or not causal:
        return by_blocks

    def divided(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        if not query.is_cpu or query.shape[-1] != value.shape[-1] or torch.is_grad_enabled():
            # The kernel needs values as wide as keys, and has no gradient.
            return by_blocks(module, query, key, value)
        return divided_attention(query, key, value, other, call.scaling(query)), None

    return divided


def _uses_other_features(call: AttentionCall) -> bool:
    """Whether the call uses other features of stock sdpa. These, including warnings, are left to the stock function."""
    for name in _OTHER_FEATURES:
        value = call.kwargs.get(name)
        if isinstance(value, Tensor) or value:
            return True
    return bool(call.args)


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _attend_folded(
    call: AttentionCall, form: BiasForm, module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> Any:
    terms = query_slots = None
    if isinstance(form, FusedForm):
        of_keys = form if form.vector is None else form.separable()
        terms, query_slots = (None, None) if of_keys is None else (of_keys.terms, of_keys.query_slots)
    if terms is None or query_slots is None or not _is_causal(module, call):
        raise UnsupportedError(
            f"The attention backend {call.name!r} does not support logit biases, and this bias cannot be folded into "
            'queries and keys, because it is not one number per key. Use model.set_attn_implementation("sdpa"), '
            '"flex_attention" or "eager".'
        )
    if terms.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"The attention backend {call.name!r} would round the gradient of this learned bias to the dtype of the "
            'keys, which makes it useless. Train with model.set_attn_implementation("sdpa"). Without gradients, this '
            "backend can be used."
        )
    if _is_set(call.kwargs.get("softcap")):
        raise UnsupportedError(
            f"The attention backend {call.name!r} caps its logits, and a bias that is folded into queries and keys "
            'would be capped with them. Use model.set_attn_implementation("flex_attention") or "eager".'
        )
    scaling = call.scaling(query)
    query, key, value = autocast_inputs(query, key, value)
    query, key, scaling = fold(query, key, terms, query_slots, scaling)
    kwargs = call.kwargs | {"scaling": scaling}
    return attend_with_wide_values(call.function, module, query, key, value, call.mask, *call.args, **kwargs)


def _is_causal(module: nn.Module, call: AttentionCall) -> bool:
    given = call.kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _attend_looking_up(
    call: AttentionCall, form: FusedForm, module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> Any:
    mask, bias = call.mask, LookUp(form)
    if not _is_set(call.kwargs.get("softcap")):
        mask = narrowed(mask, form, query, key, value, call.scaling(query))
    return call.function(module, query, key, value, mask, *call.args, position_bias=bias, **call.kwargs)


class LookUp:
    """A look-up `[batch, head, query, key]` of a bias, for flex attention's score function, instead of a tensor.

    It stores one number per distance, or one per key and one per query, or both. Scores are float32 in any model.

    Args:
        form: the bias.
    """

    def __init__(self, form: FusedForm) -> None:
        self.of_distances = None if form.vector is None else form.vector.contiguous()
        self.of_keys = self.of_queries = None
        if form.terms is not None and form.query_slots is not None:
            self.of_keys = form.terms.contiguous()
            self.of_queries = self.of_keys.index_select(-1, form.query_slots)
        self.query_length = form.query_length

    def __getitem__(self, pair: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        batch, head, query, key = pair
        table = self.of_distances
        bias = None if table is None else table[head, key - query + (self.query_length - 1)]
        if self.of_keys is not None and self.of_queries is not None:
            if self.of_keys.shape[0] == 1:
                batch = torch.zeros_like(batch)
            terms = self.of_keys[batch, head, key] - self.of_queries[batch, head, query]
            bias = terms if bias is None else bias + terms
        assert bias is not None
        return bias


def _attend_dense(
    call: AttentionCall, form: BiasForm, module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> Any:
    terms = query if isinstance(form, RowsForm) else form.terms
    batch = 1 if terms is None else terms.shape[0]
    size = 4 * batch * form.heads * query.shape[2] * key.shape[2]
    compiling = torch.compiler.is_compiling()
    if not compiling and size > DENSE_LIMIT:
        raise UnsupportedError(
            f"With the attention backend {call.name!r} this bias is a matrix of {query.shape[2]} x {key.shape[2]} for "
            f"each of {form.heads} heads and {batch} rows, which takes {size / 2**20:,.0f} MiB in every layer. Use "
            'model.set_attn_implementation("sdpa"), which computes the bias in blocks unless the mask is learned, or '
            "increase hf_posenc.attention.backends.DENSE_LIMIT."
        )
    bias = form.rows().to(query.dtype)
    bias = bias if query.is_cpu or bias.stride(-1) == 1 else bias.contiguous()  # As in `for_kernel`.
    if call.name == "flex_attention":
        # Flex attention's score function indexes the bias by batch, so a shared bias must be expanded to the batch.
        bias = bias.expand(query.shape[0], -1, -1, -1)
    if call.name != "sdpa" or call.mask is not None or exporting() or not compiling:
        return call.function(module, query, key, value, call.mask, *call.args, position_bias=bias, **call.kwargs)
    # Without a mask, transformers asks for grouped heads. With a bias, some versions of torch then have only "math".
    if query.shape[2] > 1 and _is_causal(module, call):
        rows = torch.arange(query.shape[2], device=bias.device).unsqueeze(-1)
        bias = bias.masked_fill(rows < rows.transpose(0, 1), torch.finfo(bias.dtype).min)
    return call.function(module, query, key, value, bias, *call.args, **call.kwargs)


def _attend_in_graph(
    call: AttentionCall, form: BiasForm, module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> Any:
    """With a mask and gradients."""
    return attend_with_mask(call, form.rows(), call.mask[..., : key.shape[2]], module, query, key, value), None
