"""Running a model that contradicts itself about which keys its queries see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.architectures import architecture_of
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.observe.short_runs import has_data, run_briefly, watched
from hf_posenc.patching.place.in_force import encodings
from hf_posenc.patching.place.transaction import Transaction

_TOKENS = 3
#: The arguments whose last token is exchanged, one at a time: a stack may read either.
_INPUTS = ("input_ids", "decoder_input_ids")
#: Largest change of the first token, relative to that of the last one, that is no sign of attention to the latter:
#: weights in 8 bits share a scale between tokens.
_UNNOTICED = 1e-2


def refuse_misread_causality(transaction: Transaction, stacks: list[Stack]) -> None:
    """Runs a stock model on three tokens, and again with another last token, where it contradicts itself.

    In a causal stack, what the first attention layer makes of the first token stays as it was. Only stacks are looked
    at whose attention modules say the opposite of what discovery has read from the model as a whole, unless their
    architecture is declared. Models that have none cost nothing. Models on the meta device and models that carry a
    scheme already are passed over.

    Raises:
        UnsupportedError: for a stack that was taken for causal and is not, or the other way round.
    """
    model = transaction.model
    architecture = architecture_of(model.config)
    doubtful = [stack for stack in stacks if architecture.causal is None and _contradicts_itself(stack)]
    if not doubtful or not has_data(model) or encodings(model):
        return
    with ExitStack() as hooks:
        seen = [hooks.enter_context(watched(stack, architecture)) for stack in doubtful]
        run_briefly(transaction, _TOKENS)
        for name in _INPUTS:
            with _other_last_token(model, name):
                run_briefly(transaction, _TOKENS)
    for stack, (_, _, results) in zip(doubtful, seen, strict=True):
        observed, first = _observed(results), stack.attentions[0]
        if observed is not None and observed != first.causal:
            words = {True: "causal", False: "bidirectional"}
            raise UnsupportedError(
                f"{type(stack.module).__name__} was taken for {words[first.causal]}, and a run on {_TOKENS} tokens "
                f"shows that it is {words[observed]}: {first.path}.is_causal is {first.module.is_causal}, which is not "
                "what the rest of the model says. Some versions of transformers lose the mask of such a decoder (UMT5 "
                "with sdpa before 5.18): load it with attn_implementation='eager', or use another version. If it is "
                f"meant, declare it: hf_posenc.register_architecture({stack.config.model_type!r}, "
                f"architecture=hf_posenc.Architecture(causal={observed}))."
            )


def _contradicts_itself(stack: Stack) -> bool:
    first = stack.attentions[0]
    own = getattr(first.module, "is_causal", None)
    return isinstance(own, bool) and own != first.causal


def _observed(results: list[Tensor]) -> bool | None:
    """Whether the first token did not notice another last one; `None` if no call has shown another last one."""
    if len(results) != 1 + len(_INPUTS):
        return None
    before, *others = results
    for after in others:
        change = (after - before).float().abs()
        if float(change[:, -1].max()) > 0:
            return float(change[:, 0].max()) <= _UNNOTICED * float(change[:, -1].max())
    return None


@contextmanager
def _other_last_token(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The last token of a call is another one in one of its arguments."""

    def exchange(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if name not in kwargs:
            return None
        tokens = kwargs[name].clone()
        tokens[:, -1] = tokens[:, 0]
        return args, kwargs | {name: tokens}

    handle = model.register_forward_pre_hook(exchange, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
