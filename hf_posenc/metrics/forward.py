"""Forward calls of a model that is measured: its inputs, its outputs and the longest sequence."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import EncoderDecoderModel

from hf_posenc.errors import MeasurementError, SequenceLengthError, UnsupportedError
from hf_posenc.metrics.statistics import relative_l2
from hf_posenc.patching.anatomy.anatomy import unwrapped
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.patching.place.lengths import rows_of_tables
from hf_posenc.preserve import evaluation_mode

#: Tokens per forward call if the states of every layer are kept.
_TOKENS_PER_BATCH = 2048


def run(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    wanted: str = "",
) -> Any:
    """Runs a model, or the encoder of an encoder-decoder, on `(batch, length)` tokens in evaluation mode without cache.

    The mask is omitted if the model does not take one. `wanted` adds "hidden_states" or "attentions" to the output.

    Raises:
        SequenceLengthError: if a stock model has too few positions for the sequence.
        UnsupportedError: if the model takes no `position_ids`, or does not return what is wanted.
    """
    refuse_other_inputs(model)
    stack = _reader(model)
    accepted = inspect.signature(stack.forward).parameters
    check_capacity(model, input_ids.shape[1] if position_ids is None else int(position_ids.max()) + 1)
    if position_ids is not None and "position_ids" not in accepted:
        raise UnsupportedError(f"{type(stack).__name__} takes no position_ids.")
    device = model.get_input_embeddings().weight.device
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    present = ((name, tensor) for name, tensor in given.items() if tensor is not None)
    options: dict[str, Any] = {name: tensor.to(device) for name, tensor in present if name in accepted}
    options |= {"use_cache": False} if "use_cache" in accepted else {}
    options |= {f"output_{wanted}": True, "return_dict": True} if wanted else {}
    with evaluation_mode(model):
        output = stack(input_ids=input_ids.to(device), **options)
    layers = getattr(output, wanted, None) if wanted else ()
    if wanted and (not layers or layers[0] is None):
        raise UnsupportedError(
            f"{type(stack).__name__} returns no {wanted.replace('_', ' ')}, but this measurement needs them. Use a "
            f"model whose forward takes output_{wanted}=True, or `AttentionProbe` on its embeddings."
        )
    return output


def refuse_other_inputs(model: Any) -> None:
    """Refuses a model, or an encoder, that reads images or sound instead of text.

    Raises:
        UnsupportedError: with the name of the input that it reads.
    """
    reads = getattr(_reader(model), "main_input_name", "input_ids")
    if reads != "input_ids":
        instead = (
            " For image models use picture-dog, image-sensitivity or resolution: hf-posenc eval picture-dog MODEL, or "
            "picture_dog_test, image_sensitivity_test and resolution_test in Python."
        )
        raise UnsupportedError(
            f"This measurement needs token ids, but {type(_reader(model)).__name__} reads {reads!r}. Use a text model, "
            f"or a model of images and text that also runs without images."
            f"{instead if reads.startswith('pixel_values') else ''}"
        )


def _reader(model: Any) -> Any:
    """Returns the module that reads a text: the model, or the encoder of an encoder-decoder."""
    return model.get_encoder() if is_encoder_decoder(model) else model


def is_encoder_decoder(model: Any) -> bool:
    """Whether the model has an encoder that reads a text and a decoder that writes another one."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def refuse_encoder_decoder(model: Any) -> None:
    """Refuses an encoder-decoder, whose decoder would get the text that its encoder has read."""
    if is_encoder_decoder(model):
        raise UnsupportedError(
            f"{type(model).__name__} is an encoder-decoder, which does not score a text by itself. Use a causal or a "
            f"masked language model."
        )


class Outputs(NamedTuple):
    """The outputs of a model for sentences, on the CPU.

    `states` are `(batch, length, hidden)` each: the embeddings, then the output of every layer. `logits` are `(batch,
    length, vocabulary)`, or `None` for a model without logits for each token.
    """

    states: tuple[Tensor, ...]
    logits: Tensor | None

    @property
    def last(self) -> Tensor:
        """The logits if there are any, otherwise the states after the last layer."""
        return self.states[-1] if self.logits is None else self.logits


def outputs_of(
    model: Any, input_ids: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> Outputs:
    """Runs a model, or the encoder of an encoder-decoder, in batches; see `run`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = max(1, _TOKENS_PER_BATCH // input_ids.shape[1])
    states: list[tuple[Tensor, ...]] = []
    logits: list[Tensor] = []
    for batch in (slice(start, start + rows) for start in range(0, input_ids.shape[0], rows)):
        places = None if position_ids is None else position_ids[batch]
        output = run(model, input_ids[batch], attention_mask=mask[batch], position_ids=places, wanted="hidden_states")
        states.append(tuple(state.cpu() for state in output.hidden_states))
        scores = getattr(output, "logits", None)
        if scores is not None and scores.shape[:2] == input_ids[batch].shape:
            logits.append(scores.cpu())
    joined = tuple(torch.cat(layer) for layer in zip(*states, strict=True))
    return Outputs(joined, torch.cat(logits) if logits else None)


def logits_of(model: Any, input_ids: Tensor) -> Tensor:
    """Returns `(sequences, length, vocabulary)` on the model's device in its dtype; refuses a model without logits."""
    logits = getattr(run(model, input_ids), "logits", None)
    if logits is None or logits.dim() != 3 or logits.shape[:2] != input_ids.shape:
        returned = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
        raise UnsupportedError(
            f"{type(model).__name__} returns {returned} for {tuple(input_ids.shape)} tokens; the loss needs one row of "
            f"them per token. Load the model with AutoModelForCausalLM or AutoModelForMaskedLM."
        )
    return logits


def is_causal(model: Any, input_ids: Tensor, last: int) -> bool:
    """Measures whether the tokens of a sentence up to the index `last` do not depend on any later token."""
    other = input_ids.clone()
    tail = other[0, last + 1 :]
    # Later tokens are replaced, not reordered: a bidirectional model without positions ignores their order.
    first = int(other[0, 0])
    other[0, last + 1 :] = first if bool((tail != first).any()) else first + 1
    before, after = (outputs_of(model, ids).states[-1][0, : last + 1] for ids in (input_ids, other))
    return relative_l2(before, after) <= rounding(before.dtype)


def predicts_next_token(model: Any, input_ids: Tensor) -> bool:
    """Measures whether the logits at a token do not depend on any later token, on the first tokens of a sequence.

    If so, the model is assumed to predict the next token, and otherwise to fill in masked tokens.
    """
    refuse_other_inputs(model)
    ids = input_ids[:1, :16].clone()
    if ids.shape[1] < 2:
        raise MeasurementError("One token cannot show whether a model is causal. Pass causal=True or causal=False.")
    other, vocabulary = ids.clone(), model.get_input_embeddings().weight.shape[0]
    other[:, -1] = ids[0, 0] if ids[0, -1] != ids[0, 0] else (ids[0, 0] + 1) % vocabulary
    before, after = (logits_of(model, tokens)[:, :-1].float() for tokens in (ids, other))
    if not bool(before.isfinite().all() and after.isfinite().all()):
        raise MeasurementError(
            f"The logits of {type(model).__name__} are not finite, so it is unknown whether it is causal: its weights "
            "are broken, or its dtype is too small. Load other weights, or use float32."
        )
    # A visible token changes the logits far more than another order of summation does.
    return bool((after - before).norm() <= 1e-4 * before.norm())


def rounding(dtype: torch.dtype) -> float:
    """Returns the largest distance between states that counts as rounding."""
    return max(1e-5, torch.finfo(dtype).eps)


def check_vocabulary(model: Any, *token_ids: int) -> None:
    """Refuses token ids without an embedding in the model. They come from the tokenizer of another model.

    For an `EncoderDecoderModel`, both sides must have embeddings for them.
    """
    refuse_other_inputs(model)
    target = unwrapped(model)
    sides = [target.decoder] if isinstance(target, EncoderDecoderModel) else []
    rows = min(side.get_input_embeddings().weight.shape[0] for side in (model, *sides))
    if min(token_ids) < 0 or max(token_ids) >= rows:
        raise MeasurementError(
            f"The token ids run from {min(token_ids)} to {max(token_ids)}, but the model has {rows} embeddings, "
            f"for 0 to {rows - 1}. Use the tokenizer that belongs to this model."
        )


def check_capacity(model: Any, length: int) -> None:
    """Refuses a sequence that is longer than the learned table of a stock model; see `native_capacity`."""
    capacity = native_capacity(model)
    if capacity is not None and length > capacity:
        raise SequenceLengthError(
            f"Position {length - 1} lies past the {capacity} positions of the position table of "
            f"{type(model).__name__}. Shorten the input, or patch the model with a scheme that extrapolates."
        )


def native_capacity(model: Any) -> int | None:
    """Returns the number of positions in the learned table of an unpatched model; `None` without a table or if patched.

    Past its table, a stock model fails with an index or shape error on a CPU, and on a GPU with an error that ends the
    process. A patched model raises `SequenceLengthError` itself.
    """
    target = unwrapped(model)
    return rows_of_tables(target) if current_encoding(target) is None else None
