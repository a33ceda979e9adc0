"""Context parallelism: several processes share the tokens of a sequence.

`torch.distributed.tensor.experimental.context_parallel`, and accelerate's `ParallelismConfig(cp_size=...)` with it,
give each process a part of the tokens, not always adjacent ones, and replace `scaled_dot_product_attention`. Vectors,
rotations and scales act before it. They are correct if the caller passes the positions of the tokens.

This replacement accepts no bias. A layer with a bias gathers the keys and values of all processes itself, in the order
of their positions, and computes the attention of its own queries with the kernels of this package. Adjacent tokens of a
process are a *run*. To a bias, a run looks like new tokens after those in a cache, so every bias that a cache allows
can be computed, whatever it reads. Later keys are hidden by the bias, because a mask has an entry for every pair.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hf_posenc.attention.backends import attention_without_mask
from hf_posenc.attention.block_attention import AttentionCall
from hf_posenc.attention.forms import without_later_keys
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.attention_site import LayerCall
from hf_posenc.patching.call.cache import CachedPositions, record, self_attention_cache
from hf_posenc.patching.call.forward_state import ForwardState, narrow_layers, one_axis
from hf_posenc.patching.call.key_positions import visible_pairs
from hf_posenc.schemes.refusals import CONTEXT_PARALLELISM

if TYPE_CHECKING:
    from hf_posenc.patching.call.interface_attention import InterfaceAttention
    from hf_posenc.patching.call.runtime import StackRuntime

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_WITH_BIAS = "Context parallelism cannot compute the bias of this scheme: "


@dataclass(frozen=True)
class Run:
    """Adjacent tokens of this process.

    Args:
        queries: where they are among the tokens of this process.
        start: the place of the first of them in the sequence.
        state: their positions, and those of the tokens before them.
    """

    queries: slice
    start: int
    state: ForwardState

    @property
    def stop(self) -> int:
        """The place of the token after them."""
        return self.start + self.state.query_length


@dataclass(frozen=True)
class SplitSequence:
    """The tokens of one call, of which this process has some.

    Args:
        group: the processes.
        order: `(all tokens,)` int64: for each place in the sequence, the index of its token among those of all
            processes, in the order of ranks.
        runs: the tokens of this process.
        is_plain: whether the positions of every row are 0, 1, 2, ... and no token is padding.
    """

    group: Any
    order: Tensor
    runs: tuple[Run, ...]
    is_plain: bool

    def of_all(self, heads: Tensor) -> Tensor:
        """`(batch, heads, all tokens, width)` in the order of the sequence, from those of this process."""
        return cast("Tensor", _Gathered.apply(heads, self))

    def check(self, state: ForwardState, mask: Any, causal: bool) -> None:
        """Refuses a layer in which queries may see other keys than those up to their own, or than all keys.

        Between tokens that are not adjacent, transformers' mask shows another document where there is none.
        """
        if not causal and not self.is_plain:
            raise UnsupportedError(
                f"{_WITH_BIAS}this layer is not causal, so padding, or position_ids other than 0, 1, 2, ..., would "
                "need a mask. Pass rows of equal length without padding."
            )
        if state.cache_object is not None:
            # The cache has the keys of one process, so it refuses later tokens.
            disowned = CachedPositions(state.query_length, unknown=torch.ones(()).bool())
            state.shared("disowned", lambda: record(self_attention_cache(state.cache_object), disowned))
        if mask is not None and not state.shared("mask fits", lambda: self._fits(state, mask, causal), mask=mask):
            raise UnsupportedError(
                f"{_WITH_BIAS}the mask of this layer hides earlier tokens or shows later ones, and each process has "
                "only a part of it. Pass no mask."
            )

    def _fits(self, state: ForwardState, mask: Any, causal: bool) -> bool:
        visible = visible_pairs(mask, state.query_length, state.query_length)
        if visible is None:
            return False
        places = torch.cat([torch.arange(run.start, run.stop, device=visible.device) for run in self.runs])
        of_run = torch.cat([places.new_full((run.stop - run.start,), run.start) for run in self.runs])
        later = places > places.unsqueeze(-1) if causal else visible.new_zeros(())
        adjacent = of_run == of_run.unsqueeze(-1)
        wrong = (visible & later) | (~visible & ~later & adjacent)
        if state.attention_mask is not None:
            wrong = wrong & (state.attention_mask != 0)[:, None, :, None]
        return not bool(wrong.any())


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, sequence: SplitSequence) -> Tensor:
        ctx.sequence, ctx.dtype = sequence, heads.dtype
        return _all_gathered(heads, sequence.group, 2).index_select(2, sequence.order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # In float32, as in torch's own exchange.
        gradient = gradients[0].to(torch.promote_types(ctx.dtype, torch.float32))
        by_rank = torch.empty_like(gradient).index_copy_(2, ctx.sequence.order, gradient)
        group = ctx.sequence.group
        parts = [part.contiguous() for part in by_rank.chunk(torch.distributed.get_world_size(group), 2)]
        part = torch.empty_like(parts[0])
        torch.distributed.reduce_scatter(part, parts, group=group)
        return part.to(ctx.dtype), None


def _all_gathered(tensor: Tensor, group: Any, axis: int) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, tensor, group=group)
    return torch.cat(parts, axis)


def split_sequence(
    runtime: StackRuntime, stack: nn.Module, arguments: Mapping[str, Any], length: int
) -> SplitSequence | None:
    """What a context-parallel call of a scheme with a bias has to know about the tokens of other processes.

    Args:
        runtime: the runtime of the stack.
        stack: the stack.
        arguments: those of the call.
        length: the number of tokens of this process; 0 if the call begins with something else, or with cached tokens.

    Returns:
        `None` outside `context_parallel`, and for schemes without a bias.

    Raises:
        UnsupportedError: inside `context_parallel`, for a scheme that cannot run there, if the attention is not sdpa,
            if there are no `position_ids`, and, for a bias, if the call is not one of whole sequences.
    """
    if not _is_active():
        return None
    implementation, position_ids = getattr(stack.config, "_attn_implementation", None), arguments.get("position_ids")
    if runtime.split_problem:
        raise UnsupportedError(CONTEXT_PARALLELISM.message(runtime.split_problem, "this scheme"))
    modules = () if runtime.watch is None else runtime.watch.encoding.modules()
    if any(getattr(module, "draws", False) for module in modules):
        raise UnsupportedError(
            CONTEXT_PARALLELISM.message("it draws random positions, and each process would draw its own", "this scheme")
        )
    if implementation != "sdpa":
        raise UnsupportedError(
            "Context parallelism splits the tokens of this sequence across processes and exchanges keys inside sdpa "
            f"only, but this model uses {implementation!r}. Call model.set_attn_implementation('sdpa')."
        )
    if position_ids is None:
        raise UnsupportedError(
            "Context parallelism splits the tokens of this sequence across processes, and the positions of the tokens "
            "of this process are unknown. Pass position_ids, and add them to the buffers of context_parallel, so that "
            "they are split like the tokens. Patch the model before this context, because patch_model runs it."
        )
    if not gathers_keys(runtime):
        return None
    _refuse_other_calls(stack, length)
    group = _group()
    ids = _all_gathered(one_axis(position_ids).long(), group, 1)
    order = ids[0].argsort()
    ids = ids.index_select(1, order)
    is_plain = bool((ids == torch.arange(ids.shape[1], device=ids.device)).all())
    if not is_plain and bool((ids[:, 1:] <= ids[:, :-1]).any()):
        raise UnsupportedError(
            f"{_WITH_BIAS}the position_ids of all processes are not those of one sequence in each row: a position "
            "occurs twice, or rows are split in different ways. Packed documents, and left padding without a mask, "
            "have positions that restart. Pass one sequence in each row, padded on the right if at all."
        )
    is_padded = _is_padded(arguments.get("attention_mask"), group, order, length)
    places, device = order.argsort(), ids.device
    places = places[length * torch.distributed.get_rank(group) :][:length]
    ends = [*((places.diff() != 1).nonzero().squeeze(-1) + 1).tolist(), length]
    begins = [0, *ends[:-1]]
    runs = []
    for begin, end, start in zip(begins, ends, places[begins].tolist(), strict=True):
        state = ForwardState(end - begin, start, device=device)
        if not is_plain:
            state.position_ids = ids[:, start : start + end - begin]
            state.held = CachedPositions(start, ids[:, :start]) if start else None
        runs.append(Run(slice(begin, end), start, state))
    return SplitSequence(group, order, tuple(runs), is_plain and not is_padded)


def gathers_keys(runtime: StackRuntime) -> bool:
    """Whether layers gather keys: inside `context_parallel`, if the scheme has a bias."""
    layers = runtime.watch.encoding.layers if _is_active() and runtime.watch is not None else ()
    return any(layer.logit_bias is not None for layer in layers)


@torch.compiler.assume_constant_result
def _is_active() -> bool:
    """Whether sdpa is replaced. Compiled graphs are recompiled when it changes."""
    if _MODULE not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def _refuse_other_calls(stack: nn.Module, length: int) -> None:
    """Refuses calls that need more than the keys of one call, up to that of each query."""
    if not length:
        raise UnsupportedError(
            f"{_WITH_BIAS}this call continues a cache, or its tokens are not those of a text. Pass whole texts with "
            "use_cache=False."
        )
    others = ", ".join(sorted(narrow_layers(stack.config)))
    if others:
        raise UnsupportedError(
            f"{_WITH_BIAS}this model has layers of the kind {others}, whose masks would be those of a part "
            "of the tokens. Use a model whose layers all attend to the whole sequence."
        )


def _group() -> Any:
    """The processes that share a sequence. Only the function that replaces sdpa knows them."""
    function: Any = torch.nn.functional.scaled_dot_product_attention
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "device_mesh" not in names:
        raise UnsupportedError(
            f"{_WITH_BIAS}the processes that share the sequence are unknown, because sdpa was not replaced by "
            "torch.distributed.tensor.experimental.context_parallel. Use this context manager."
        )
    return function.__closure__[names.index("device_mesh")].cell_contents.get_group()


def _is_padded(mask: Any, group: Any, order: Tensor, length: int) -> bool:
    """Whether rows end with padding, which no query before it sees."""
    if mask is None:
        return False
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != length:
        raise UnsupportedError(
            f"{_WITH_BIAS}attention_mask is not (batch, {length}), one number for each token of this process. Pass "
            "none, or add it to the buffers of context_parallel, so that it is split like the tokens."
        )
    real = _all_gathered(mask, group, 1).index_select(1, order) != 0
    if bool((~real[:, :-1] & real[:, 1:]).any()):
        raise UnsupportedError(f"{_WITH_BIAS}attention_mask hides tokens before real tokens. Pad rows on the right.")
    return not bool(real.all())


def attend_split(
    site: InterfaceAttention, call: LayerCall, kernel: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> Any:
    """Computes the attention of the queries of this process, with the keys of all.

    Args:
        site: the attention module, whose scheme has a bias.
        call: the call of the layer.
        kernel: the call of the attention function.
        query: `(batch, heads, length, width)`, those of this process.
        key: `(batch, key_value_heads, length, width)`.
        value: `(batch, key_value_heads, length, value_dim)`.
    """
    sequence, encoding = call.state.sequence, site.encoding
    assert sequence is not None
    sequence.check(call.state, kernel.mask, encoding.causal)
    features = None
    if encoding.num_features:
        features = sequence.of_all(site.new_features(call) if call.key_features is None else call.key_features)
    key, value = sequence.of_all(key), sequence.of_all(value)
    scaling = kernel.kwargs.get("scaling")
    factor = site.default_scaling if scaling is None else scaling
    outputs = []
    for run in sequence.runs:
        seen = run.stop if encoding.causal else key.shape[2]
        split_call = LayerCall(run.state, call.hidden_states[:, run.queries])
        split_call.key_features = None if features is None else features[:, :, :seen]
        heads = query[:, :, run.queries], key[:, :, :seen]
        form = site.bias(split_call, *heads, (factor, *site.factors_before(factor)))
        if encoding.causal:
            form = without_later_keys(form, run.start)
        scaled = heads[0] if encoding.logit_scale is None else site.scaled(run.state, heads[0])
        attend = attention_without_mask(kernel, form, site.module, scaled, heads[1])
        outputs.append(attend(site.module, scaled, heads[1], value[:, :, :seen])[0])
    return torch.cat(outputs, 1), None
