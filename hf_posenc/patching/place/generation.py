"""`generate` of a patched model: refuses at the call what would fail, or change something, halfway through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.place.checked_method import CheckedMethod
from hf_posenc.patching.place.encoding import PositionEncoding, is_length_dependent
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.parts import Part

_DEPTH = "num_hidden_layers"
_POSITIONAL = ("inputs", "generation_config")


@dataclass(frozen=True)
class GenerateCall:
    """One call of `generate`, before anything has run.

    Args:
        model: the patched model.
        encoding: what is in force in it.
        arguments: the keyword arguments of the call.
    """

    model: PreTrainedModel
    encoding: PositionEncoding
    arguments: dict[str, Any]

    def setting(self, name: str) -> Any:
        """A field of the generation config as this call would have it, or an argument of `generate`; else `None`."""
        if self.arguments.get(name) is not None:
            return self.arguments[name]
        given = self.arguments.get("generation_config")
        own = getattr(given, name, None)
        return getattr(self.model.generation_config, name, None) if own is None else own

    @property
    def drafts(self) -> bool:
        """Whether another `generate` calls this one for candidates of assisted decoding."""
        return bool(getattr(self.arguments.get("generation_config"), "is_assistant", False))


#: Raises `UnsupportedError` for a call that the scheme in force cannot serve.
GenerateCheck = Callable[[GenerateCall], None]

#: What extends a cache by more than the next token: an argument, and options of a generation config.
_NEEDS_CACHE = (
    "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "prefill_chunk_size",
)  # fmt: skip
_NO_CACHE_GROWS = "encodes a token by the length of the sequence, or by tokens that a cache does not keep"


def refuse_growing_caches(call: GenerateCall) -> None:
    """Refuses drafts to verify or to make, and prompts in chunks, where no cache can be extended by them.

    Raises:
        UnsupportedError: for such a scheme, unless the caller asks for a cache, which then refuses where it is wrong.
    """
    if not is_length_dependent(call.encoding):
        return
    scheme = scheme_label(call.encoding.config)
    if call.drafts:
        tokens = call.arguments.get("input_ids")
        length = tokens.shape[1] if isinstance(tokens, torch.Tensor) else 1
        try:
            for part in call.encoding.modules():
                if isinstance(part, Part):
                    part.check_cache(length, length + 1)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"This assistant model cannot draft: its scheme {scheme!r} {_NO_CACHE_GROWS}, and drafts are made with "
                "a cache that grows. Use an assistant with another scheme, or generate without one."
            ) from error
        return
    asked = [name for name in _NEEDS_CACHE if call.setting(name)]
    if asked and not call.setting("use_cache"):
        raise UnsupportedError(
            f"{asked[0]} needs a cache that grows, and the scheme {scheme!r} of this {type(call.model).__name__} "
            f"{_NO_CACHE_GROWS}. Generate without {asked[0]}."
        )


#: Run in this order at every call.
CHECKS: list[GenerateCheck] = [refuse_growing_caches]


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
            if call.drafts and not self.model.config.is_encoder_decoder:
                kwargs = _with_mask(kwargs)
        # An early exit (`assistant_early_exit`) makes the config shallower for each draft, and an error or an
        # interrupt in a draft would leave it so: every later call would run the first layers only.
        config = self.model.base_model.config
        depth = getattr(config, _DEPTH, None)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            if depth is not None and getattr(config, _DEPTH) != depth:
                setattr(config, _DEPTH, depth)


def _with_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a draft, with the mask of ones that the `generate` which asks for it has dropped.

    Without one, transformers takes every generated token that has the id of the padding for padding, beside
    `position_ids` that count it.
    """
    tokens = kwargs.get("input_ids")
    if kwargs.get("attention_mask") is not None or not isinstance(tokens, torch.Tensor):
        return kwargs
    return kwargs | {"attention_mask": torch.ones_like(tokens)}
