"""Checks at the start of `generate` that refuse calls which would otherwise fail halfway or corrupt the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache_notes import cache_argument
from hf_posenc.patching.call.generation_call import GENERATION, Generation
from hf_posenc.patching.place.encoding import PositionEncoding, is_length_dependent
from hf_posenc.schemes.parts import Part
from hf_posenc.schemes.refusals import GROWING_CACHE

_DEPTH = "num_hidden_layers"
_POSITIONAL = ("inputs", "generation_config")
#: The methods that make and continue `position_ids` and the mask.
_COUNTING = (
    "prepare_inputs_for_generation", "_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation",
)  # fmt: skip


@dataclass(frozen=True)
class GenerateCall:
    """The arguments of one call of `generate`.

    Args:
        model: the patched model.
        encoding: the encoding in force.
        arguments: the keyword arguments of the call.
    """

    model: PreTrainedModel
    encoding: PositionEncoding
    arguments: dict[str, Any]

    def setting(self, name: str) -> Any:
        """A generation option of this call: an argument, or else a field of the generation config, or `None`."""
        if self.arguments.get(name) is not None:
            return self.arguments[name]
        given = self.arguments.get("generation_config")
        own = getattr(given, name, None)
        return getattr(self.model.generation_config, name, None) if own is None else own

    @property
    def drafts(self) -> bool:
        """Whether this is a call by assisted decoding, in which the model drafts candidates."""
        return bool(getattr(self.arguments.get("generation_config"), "is_assistant", False))


#: Raises `UnsupportedError` if the scheme in force does not support a call.
GenerateCheck = Callable[[GenerateCall], None]

#: Arguments of `generate`, and options of a generation config, that require a cache.
_NEEDS_CACHE = (
    "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "prefill_chunk_size",
)  # fmt: skip


def refuse_growing_caches(call: GenerateCall) -> None:
    """Refuses assisted decoding and chunked prefill with a scheme that does not support growing caches.

    Raises:
        UnsupportedError: for such a scheme. Not if the caller asks for a cache: the forward pass then refuses a cache
            that it cannot extend correctly.
    """
    if not is_length_dependent(call.encoding):
        return
    problem = GROWING_CACHE.problem(call.encoding.needs())
    if call.drafts:
        tokens = call.arguments.get("input_ids")
        length = tokens.shape[1] if isinstance(tokens, torch.Tensor) else 1
        try:
            for part in call.encoding.modules():
                if isinstance(part, Part):
                    part.check_cache(length, length + 1)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"This assistant model cannot draft, because drafting needs a growing cache, which cannot run "
                f"{call.encoding.label}: {problem}. Use an assistant with another scheme, or generate without one."
            ) from error
        return
    asked = [name for name in _NEEDS_CACHE if call.setting(name)]
    if asked and not call.setting("use_cache"):
        raise UnsupportedError(
            f"{asked[0]} needs a growing cache, which cannot run {call.encoding.label} of this "
            f"{type(call.model).__name__}: {problem}. Generate without {asked[0]}."
        )


def refuse_unnoticed_caches(call: GenerateCall) -> None:
    """Refuses prompt learning by a PEFT that looks for the cache under another name than the model's.

    Raises:
        UnsupportedError: if PEFT would take every step for the first one.
    """
    prepare: Any = call.model.prepare_inputs_for_generation
    config: Any = getattr(prepare.__self__, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return
    name = cache_argument(call.model)
    learns_keys = config.peft_type in ("PREFIX_TUNING", "CARTRIDGE")
    uses_cache = learns_keys or call.setting("use_cache") is not False
    if uses_cache and name not in inspect.unwrap(prepare.__func__).__code__.co_consts:
        raise UnsupportedError(
            f"This PEFT does not notice the cache of a {type(call.model).__name__}, whose argument is {name!r} in "
            f"transformers {transformers.__version__}, so prompt and prefix tuning generate wrong tokens, with stock "
            f"models too. {'Use' if learns_keys else 'Generate with use_cache=False, or use'} an earlier transformers "
            "or a newer PEFT."
        )


#: Checks that run in this order before every call.
CHECKS: list[GenerateCheck] = [refuse_growing_caches, refuse_unnoticed_caches]


class CheckedMethod:
    """Stands in for a method on one model instance. A subclass defines `__call__`, which ends by calling `__wrapped__`.

    It is plain data, so that a deep copy or a pickle of the model calls the copy's own method.

    Args:
        model: the patched model.
        encoding: the encoding in force.
        before: the value that the instance had under this name, or `None` for the method of its class.
    """

    #: Name of the method.
    method: ClassVar[str]

    def __init__(self, model: PreTrainedModel, encoding: PositionEncoding, before: Any) -> None:
        self.model = model
        self.encoding = encoding
        self.before = before

    @property
    def __wrapped__(self) -> Any:
        """The original method, so that `inspect.signature` finds its parameters."""
        return getattr(type(self.model), self.method).__get__(self.model) if self.before is None else self.before

    @property
    def in_force(self) -> bool:
        """Whether the scheme is still in place. False if a tool calls this object after the scheme was removed."""
        return "holder" in self.encoding.__dict__

    @classmethod
    def place(cls, encoding: PositionEncoding, model: PreTrainedModel) -> None:
        """Sets an instance on a model that has the method; the journal of the encoding removes it."""
        if hasattr(model, cls.method):
            encoding.record.journal.set(model, cls.method, cls(model, encoding, model.__dict__.get(cls.method)))


class CheckedGenerate(CheckedMethod):
    """Stands in for `generate`."""

    method = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the checks, then `generate`.

        Raises:
            UnsupportedError: if a check refuses the call.
        """
        if self.in_force:
            call = GenerateCall(self.model, self.encoding, dict(zip(_POSITIONAL, args, strict=False)) | kwargs)
            for check in CHECKS:
                check(call)
            tokens = kwargs.get("input_ids")
            # Assisted decoding does not pass on a mask. Without one, transformers treats every generated token that has
            # the padding id as padding, although `position_ids` count it.
            unmasked = kwargs.get("attention_mask") is None and not self.model.config.is_encoder_decoder
            if call.drafts and unmasked and isinstance(tokens, torch.Tensor):
                kwargs = kwargs | {"attention_mask": torch.ones_like(tokens)}
        # An early exit (`assistant_early_exit`) reduces the number of layers in the config for each draft. After an
        # error or an interrupt in a draft, later calls would run only the first layers.
        config = self.model.base_model.config
        depth = getattr(config, _DEPTH, None)
        generation = Generation() if self.in_force and self._counts(kwargs) else None
        token = GENERATION.set(generation)
        try:
            result = self.__wrapped__(*args, **kwargs)
            if generation is not None:
                generation.check()
            return result
        finally:
            GENERATION.reset(token)
            if depth is not None and getattr(config, _DEPTH) != depth:
                setattr(config, _DEPTH, depth)

    def _counts(self, kwargs: dict[str, Any]) -> bool:
        """Whether transformers counts the positions over the mask in every step."""
        own = {name: getattr(self.model, name, None) for name in _COUNTING}
        stock = all(getattr(one, "__func__", None) is getattr(GenerationMixin, name, None) for name, one in own.items())
        # The rows of RoBERTa's table do not begin at 0.
        shifted = any(getattr(forward, "origin", 0) for forward in self.encoding.record.journal.forwards())
        return stock and not shifted and kwargs.get("position_ids") is None
