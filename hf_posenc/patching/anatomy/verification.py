"""Verifies discovery by short runs: causality, mechanisms that it may have missed, and native tables.

In the comparisons, every mechanism that was found is disabled, or replaced by the scheme that a declaration names, so
they are valid for any version of transformers.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.architectures.declaration import undescribed
from hf_posenc.patching.anatomy.short_runs import (
    EMBEDDED,
    ORDER,
    NotRunnableError,
    TokenOrder,
    all_equal,
    attended_twice,
    distance,
    embedded,
    has_convolution,
    in_both_orders,
    run_briefly,
    seen_briefly,
    sees_all,
)
from hf_posenc.patching.forwards import registered_function, written_in
from hf_posenc.preserve import isolated_rng
from hf_posenc.schemes import NoneConfig
from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy
    from hf_posenc.patching.place.transaction import Transaction

#: Number of tokens in runs that exchange two tokens, and in runs whose outputs are compared.
_FEW_TOKENS, _TOKENS = 3, 8
#: Maximum change of the first token, relative to the change of the last one, at which a stack still counts as causal.
#: It is not 0, because 8-bit quantisation shares a scale between tokens.
_MAX_RELATIVE_CHANGE = 1e-2
#: Maximum number of tokens after which a module that makes several tokens of each one repeats itself.
_LONGEST_PERIOD = 8
#: Maximum difference of outputs, relative to their size: another order of summation, or an extra rounding per layer.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2


def refuse_misread_causality(anatomy: Anatomy, stacks: list[Stack]) -> None:
    """Checks by a run whether discovery was right about causality, where the evidence is contradictory or weak.

    The model is run on three tokens, and its first attention layer again with another last token. In a causal stack,
    the output for the first token does not change. Models are run only if they have a stack whose attention has an
    `is_causal` that differs from the result of discovery, or code from outside transformers, and no declaration.
    """
    undeclared = [(stack, stack.attentions[0]) for stack in stacks if stack.architecture.causal is None]
    # The attribute may be missing, or no truth value.
    doubtful = [
        stack
        for stack, first in undeclared
        if stack.has_other_code or getattr(first.module, "is_causal", None) is (not first.causal)
    ]
    if not doubtful:
        return
    first_last = functools.partial(attended_twice, chosen=lambda tokens: [*range(tokens - 1), 0])
    seen = seen_briefly(anatomy, doubtful, _FEW_TOKENS, first_last)
    for stack, results in zip(doubtful, seen, strict=True):
        observed, first = _observed(results), stack.attentions[0]
        if observed is not None and observed != first.causal:
            words = {True: "causal", False: "bidirectional"}
            raise UnsupportedError(
                f"{type(stack.module).__name__} was classified as {words[first.causal]}, but a run on {_FEW_TOKENS} "
                f"tokens shows that it is {words[observed]} ({first.path}.is_causal is "
                f"{getattr(first.module, 'is_causal', 'not set')}). Some versions of transformers omit the mask of a "
                "decoder (UMT5 with sdpa before 5.18): load it with attn_implementation='eager', or use another "
                f"version. Or declare it: hf_posenc.register_architecture({stack.config.model_type!r}, "
                f"architecture=hf_posenc.Architecture(causal={observed}))."
            )


def _observed(results: list[tuple[Tensor, Tensor]]) -> bool | None:
    """Whether the stack is causal; `None` if the first call has not changed its last token."""
    for other, original in results[:1]:
        change = (other - original).float().abs()
        if float(change[:, -1].max()) > 0:
            return float(change[:, 0].max()) <= _MAX_RELATIVE_CHANGE * float(change[:, -1].max())
    return None


def refuse_hidden_positions(anatomy: Anatomy, stacks: list[Stack], trial: Transaction) -> None:
    """Refuses stacks in which positions act although every mechanism that was found is disabled.

    Text: the stacks are run with the scheme "none" on the same three tokens in two orders. No vector may depend on the
    position of its token, and no attention on the order of its keys; see `TokenOrder`. This finds positions in
    embeddings, in the forward of an attention class and in an attention function, no matter who wrote them.

    Of text with sparse attention, only the input of the first layer is compared.

    Features and pixels: in stacks in which nothing was found, whose mechanism is disabled by a declaration, or with
    code from outside transformers, some tokens close to each other must be equal at the input of the first layer if all
    frames of a series or pixels of an image are, and the first attention must not depend on the order of its keys. The
    latter is not compared for attention with a convolution over its keys.
    """
    text = [stack for stack in stacks if stack.layout.takes_tokens]
    others = [stack for stack in stacks if not stack.layout.takes_tokens]
    bare = [stack for stack in others if _nothing_found(stack)]
    rest = [stack for stack in others if not _nothing_found(stack)]
    silenced = [stack for stack in rest if _is_silenced(stack) or stack.has_other_code]
    if bare:
        _refuse_positions_of_features(anatomy, bare)
    if silenced or text:
        with trial.with_scheme(NoneConfig(), stacks):
            if silenced:
                _refuse_positions_of_features(anatomy, silenced)
            for group in ([stack for stack in text if not stack.sparse], *([stack] for stack in text if stack.sparse)):
                try:
                    if group:
                        _refuse_order_of_tokens(anatomy, group)
                except NotRunnableError:
                    # It is unknown which other inputs a stock model needs. Its positions were found in its code.
                    if any(_nothing_found(each) or _is_silenced(each) or each.has_other_code for each in group):
                        raise


def _refuse_order_of_tokens(anatomy: Anatomy, stacks: list[Stack]) -> None:
    seen = [TokenOrder(stack, strict=_nothing_found(stack) or _is_silenced(stack)) for stack in stacks]
    with ExitStack() as hooks:
        for order in seen:
            hooks.enter_context(order.observed())
        run_briefly(anatomy, stacks, len(ORDER), change=in_both_orders)
    for stack, order in zip(stacks, seen, strict=True):
        if order.problem:
            raise _acting_nevertheless(stack, order.problem)
        if order.unseen:
            raise UnsupportedError(
                f"{order.unseen} does not read and return vectors (batch, length, hidden), so it is unknown whether "
                "positions act in it. Packed rows are not supported in code from outside transformers. Another order "
                "of axes can be declared (time_major, channels_first) with hf_posenc.register_architecture."
            )


def _refuse_positions_of_features(anatomy: Anatomy, stacks: list[Stack]) -> None:
    inputs = seen_briefly(anatomy, stacks, len(ORDER), embedded, change=all_equal)
    for stack, given in zip(stacks, inputs, strict=True):
        # Convolutions see the edges, so not all tokens are equal.
        if stack.layout.is_comparable(stack, given[0] if given else None):
            tokens = given[0][0]
            periods = range(1, min(_LONGEST_PERIOD, len(tokens) - 1) + 1)
            pairs = (pair for period in periods for pair in zip(tokens[:-period], tokens[period:], strict=True))
            if all(distance(token, other) > 0 for token, other in pairs):
                raise _acting_nevertheless(stack, EMBEDDED)
    outputs = seen_briefly(anatomy, stacks, len(ORDER), lambda stack: attended_twice(stack, _before_the_last))
    for stack, results in zip(stacks, outputs, strict=True):
        first = stack.attentions[0]
        if results and sees_all(first, stack) and not has_convolution(first.module):
            original, other = results[0]
            if distance(original[:, -1:], other[:, -1:]) > 0:
                raise _acting_nevertheless(stack, "the output of its first attention layer depends on token order")


def _is_silenced(stack: Stack) -> bool:
    """Whether a mechanism is disabled that is neither a table nor a rotary function."""
    return bool(stack.mechanism or stack.architecture.rotary_method or stack.layout.biases)


def _nothing_found(stack: Stack) -> bool:
    rotates = stack.rotaries or any(attention.rotary_functions for attention in stack.attentions)
    return not (rotates or _is_silenced(stack) or stack.architecture.native or stack.layout.vector_sites(stack))


def _before_the_last(tokens: int) -> list[int]:
    """The order in which the two tokens before the last are swapped. The last one sees both if `sees_all`."""
    return [*range(tokens - 3), tokens - 2, tokens - 3, tokens - 1] if tokens > 2 else [*range(tokens)]


def _acting_nevertheless(stack: Stack, what: str) -> UnsupportedError:
    """Returns the error for a stack in which positions act, given what depends on them."""
    model_type, kind = stack.config.model_type, type(stack.module).__name__
    if _nothing_found(stack):
        words = None
        with suppress(NotImplementedError):  # The architecture does not say which module they are.
            words = stack.module.get_input_embeddings()
        named = ((path, module) for path, module in stack.module.named_modules() if isinstance(module, nn.Embedding))
        tables = [path for path, module in named if module is not words and "token_type" not in path]
        candidates = f" Embeddings other than the token embeddings: {', '.join(tables)}." if tables else ""
        return UnsupportedError(
            f"No position table, rotary function or bias was found in this {kind}, but {what}. It has an unknown "
            f"position mechanism, which would remain active next to any scheme.{candidates} Declare the mechanism with "
            f"hf_posenc.register_architecture({model_type!r}, architecture=...): `tables` names position tables, and "
            "`silence` disables any other mechanism."
        )
    if _is_silenced(stack):
        where = f"transformers {transformers.__version__} computes it in a place unknown to hf_posenc"
        advice = "Use a version of transformers that hf_posenc was tested with, or"
        if stack.has_other_code:
            where = f"its code ({written_in(type(stack.module).forward)}) has positions in another place too"
            advice = "If the model draws random numbers in evaluation (dropout), switch that off. Otherwise"
        return UnsupportedError(
            f"The {stack.mechanism or 'rotation'} of this {kind} ({model_type}) was disabled, but {what} nevertheless: "
            f"{where}, and it would remain active next to any scheme. {advice} declare how to disable it with "
            f"hf_posenc.register_architecture({model_type!r}, architecture=...)."
        )
    function = stack.config._attn_implementation if registered_function(stack.config) else None
    registered = f" The attention function {function!r} was registered by other code." if function else ""
    return UnsupportedError(
        f"The positions of this {kind} ({model_type}, transformers {transformers.__version__}) were disabled, but "
        f"{what} nevertheless. It computes positions itself, or wraps code that does, and these would remain active "
        f"next to any scheme.{registered} Use the class and the attention function of transformers, or remove the "
        "positions from your own code. Set a wrapper only after patch_model."
    )


def verify_native(trial: Transaction, config: SchemeConfig, stacks: list[Stack]) -> None:
    """Runs a stock model on a few tokens, with its native mechanism and with the scheme in its place.

    Args:
        trial: the stock model.
        config: the scheme that is declared to be equivalent to the native mechanism.
        stacks: the stacks of the model.
    """
    difference = _difference(trial, config, stacks)
    if difference is not None:
        raise undescribed(
            f"The position mechanism of this {type(trial.anatomy.model).__name__} does not match the declaration of "
            f"its architecture: with {config} in its place the outputs for {_TOKENS} tokens differ by "
            f"{difference:.2g} of their size. A table or a setting of the mechanism is unusual."
        )


def verify_adopted_tables(trial: Transaction, stacks: list[Stack]) -> None:
    """Makes the same comparison before any scheme is placed in a model whose native bias tables a scheme can adopt.

    With the native tables, the declared scheme must reproduce the stock outputs, whatever values the tables hold. If
    it does not, this version of transformers uses the tables differently, or discovery has failed, and adopted tables
    would have another meaning. Models without such tables are not run.
    """
    declared = [
        stack
        for stack in stacks
        if (bias_table := stack.architecture.bias_table) is not None
        and any(bias_table(stack, attention) is not None for attention in stack.attentions)
    ]
    native = {stack.architecture.native(stack) for stack in declared if stack.architecture.native is not None}
    for config in filter(None, native):
        difference = _difference(trial, config, stacks)
        if difference is not None:
            model = trial.anatomy.model
            raise UnsupportedError(
                f"This {type(model).__name__} does not compute the same as {config} with its bias tables: the outputs "
                f"for {_TOKENS} tokens differ by {difference:.2g} of their size. hf_posenc does not support this "
                f"architecture ({model.config.model_type}) as implemented in transformers {transformers.__version__}, "
                "so no scheme can be placed in it. Try a version of transformers that hf_posenc was tested with."
            )


def refuse_failing(trial: Transaction, config: SchemeConfig, stacks: list[Stack]) -> None:
    """Runs stacks of features or pixels with a scheme, which may need more than they have, such as a place for vectors.

    Only a run shows which coordinates reach the layers of these stacks, and in which order. Stacks of text are not run:
    their tokens have one axis, and the order in which the caller passes them.

    Raises:
        UnsupportedError: if a short run fails with the scheme and succeeds without.
    """
    try:
        with isolated_rng(0), trial.with_scheme(config, stacks):
            run_briefly(trial.anatomy, stacks, _TOKENS)
    except SequenceLengthError:
        return  # A shorter input may suit the scheme.
    except NotRunnableError as error:
        try:
            run_briefly(trial.anatomy, stacks, _TOKENS)
        except NotRunnableError:
            return  # It is unknown which inputs the stock model needs.
        cause = error.__cause__
        raise UnsupportedError(
            f"{config.name!r} cannot be computed in this {type(stacks[0].module).__name__}. A short run of the stock "
            f"model succeeds, and fails with the scheme in its place: {type(cause).__name__}: {cause} Choose a "
            "different kind of scheme: one that adds vectors, or one that acts in attention."
        ) from error


def _difference(trial: Transaction, config: SchemeConfig, stacks: list[Stack]) -> float | None:
    """The difference of the outputs relative to their size; `None` if it is within the tolerance."""
    stock = _outputs(trial.anatomy, stacks)
    # Building a part draws its initial weights. The caller's random generator must keep its state.
    with isolated_rng(0), trial.with_scheme(config, stacks):
        replaced = _outputs(trial.anatomy, stacks)
    difference = float((replaced - stock).abs().max() / stock.abs().max().clamp(min=1.0))
    return None if difference <= _TOLERANCE.get(trial.anatomy.model.dtype, _HALF_TOLERANCE) else difference


def _outputs(anatomy: Anatomy, stacks: list[Stack]) -> Tensor:
    outputs = []
    for result in run_briefly(anatomy, stacks, _TOKENS):
        logits = result.get("logits") if hasattr(result, "get") else None
        output: Any = result if logits is None else logits
        while not isinstance(output, Tensor):  # Some models nest it in tuples.
            output = output[0]
        outputs.append(output.float().flatten())
    return torch.cat(outputs)
