"""Continuous batching of a patched model: its settings, and what would otherwise fail in its worker thread.

Transformers runs `generate_batch` in a thread that logs its errors and returns empty results. All ways in go through
`init_continuous_batching`, which runs in the caller's thread.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from typing import Any

import torch
from torch import nn
from transformers import ContinuousBatchingConfig

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.paged_requests import PREFIX
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.place.checked_method import CheckedMethod
from hf_posenc.patching.place.encoding import PositionEncoding, is_length_dependent
from hf_posenc.patching.place.stack_encoding import StackEncoding
from hf_posenc.patching.place.wide_pages import WidePages, page_width, width_of_pages
from hf_posenc.schemes.labels import scheme_label
from hf_posenc.schemes.parts import DistanceBias, SeparableBias

#: A manager that `generate_batch(persistent_manager=True)` leaves on the model for later calls.
KEPT_MANAGER = "_cached_continuous_batching_manager"
_CONFIG = "continuous_batching_config"
#: On a cache: the check that it has passed.
_CHECKED_FOR = "_hf_posenc_checked_for"
_REMEDY = "Use model.generate() with a batch that is padded on the left."


class CheckedContinuousBatching(CheckedMethod):
    """Stands in for `init_continuous_batching`."""

    method = "init_continuous_batching"

    @classmethod
    def place(cls, encoding: PositionEncoding, model: Any) -> None:
        """Puts it on a model that has the method, and away a manager whose pages hold keys of another scheme."""
        super().place(encoding, model)
        if hasattr(model, cls.method):
            encoding.journal.put_aside(model, KEPT_MANAGER)
            check = PagesCheck(encoding, model)
            for stack in encoding.stacks.values():
                assert isinstance(stack, StackEncoding)
                stack.runtime.pages = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Starts continuous batching.

        Raises:
            UnsupportedError: for a scheme that pages of keys cannot serve, or not with these settings.
            SequenceLengthError: for prompts, with the tokens to generate, that the scheme cannot encode.
        """
        if not self.in_force:
            return self.__wrapped__(*args, **kwargs)
        layers = _decoder_layers(self.encoding)
        given = inspect.signature(self.__wrapped__).bind(*args, **kwargs).arguments
        refuse_pages(self.encoding, self.model)
        self._refuse_length(given.get("workload_hints"))
        if any(layer.reads_pages for layer in layers):
            given[_CONFIG] = self._settings(given)
        manager = self.__wrapped__(**given)
        width = _needed_width(self.encoding, self.model)
        if any(width > layer.head_dim for layer in layers) and manager.batch_processor is None:
            manager._create_batch_processor = WidePages(manager, width)
        return manager

    def _refuse_length(self, hints: Any) -> None:
        """Refuses prompts that are too long; without hints, each one is refused when it is added."""
        longest = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
        if longest:
            self.encoding.reach().check(torch.tensor([longest - 1]))

    def _settings(self, given: dict[str, Any]) -> ContinuousBatchingConfig:
        """The settings of a call, with nothing in them that reads pages inside a graph or a kernel.

        Raises:
            UnsupportedError: if that is asked for.
        """
        generation_config = given.get("generation_config") or self.model.generation_config
        settings = given.get(_CONFIG) or getattr(generation_config, _CONFIG, None) or ContinuousBatchingConfig()
        for asked in ("use_cuda_graph", "varlen_compile_config", "decode_compile_config", "default_compile_level"):
            value = getattr(settings, asked, None)
            if any(value) if isinstance(value, tuple) else value:
                raise UnsupportedError(
                    f"{_cannot(self.encoding, self.model)} in graphs ({asked}): it reads the lengths of the requests "
                    "in a batch, which a graph does not know. Leave that setting out."
                )
        settings = copy.copy(settings)
        settings.use_cuda_graph = False
        # A kernel that reads pages itself shows the keys to nobody, and few biases can go into flash kernels at all.
        settings.max_blocks_per_request = 0
        settings.auto_switch_to_flash = False
        return settings


class PagesCheck:
    """Checks the pages of a call once, for managers that were made before the scheme was placed.

    Args:
        encoding: what is in force.
        model: the patched model.
    """

    def __init__(self, encoding: PositionEncoding, model: Any) -> None:
        self.encoding = encoding
        self.model = model

    def check(self, cache: Any) -> None:
        """Checks the cache of a call, in a thread of the manager, which hands an error to the caller of every request.

        Raises:
            UnsupportedError: for a scheme that pages of keys cannot serve, or not these.
        """
        if vars(cache).get(_CHECKED_FOR) is self:
            return
        refuse_pages(self.encoding, self.model)
        layers, needed = _decoder_layers(self.encoding), _needed_width(self.encoding, self.model)
        found = width_of_pages(cache, min((layer.head_dim for layer in layers), default=0))
        reads_pages = any(layer.reads_pages for layer in layers)
        if found is not None and found < needed:
            problem = f"the keys of this scheme are {needed} numbers wide, and its pages have {found}"
        elif reads_pages and self.model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            problem = "this scheme reads the lengths of the requests in a batch, which a CUDA graph does not know"
        else:
            setattr(cache, _CHECKED_FOR, self)
            return
        raise UnsupportedError(
            f"{_cannot(self.encoding, self.model)} with this manager, which was made before the scheme was placed: "
            f"{problem}. Make another one with model.init_continuous_batching()."
        )


def _needed_width(encoding: PositionEncoding, model: Any) -> int:
    return max((page_width(layer, model.dtype) for layer in _decoder_layers(encoding)), default=0)


def refuse_pages(encoding: PositionEncoding, model: nn.Module) -> None:
    """Refuses a scheme that cannot be computed from the keys in pages.

    Raises:
        UnsupportedError: with the reason.
    """
    reason = _outside_interface(encoding) or _of_lengths(encoding) or _of_kernels(encoding, model)
    if reason:
        raise UnsupportedError(f"{_cannot(encoding, model)}: {reason}")


def _cannot(encoding: PositionEncoding, model: nn.Module) -> str:
    return f"Continuous batching cannot run the scheme {scheme_label(encoding.config)!r} in this {type(model).__name__}"


def _decoder_layers(encoding: PositionEncoding) -> list[LayerEncoding]:
    stacks = [stack for stack in encoding.stacks.values() if isinstance(stack, StackEncoding)]
    return [layer for stack in stacks for layer in stack.layers]


def _outside_interface(encoding: PositionEncoding) -> str:
    for site in encoding.journal.forwards():
        if isinstance(site, ScoresAttention):
            return (
                f"{type(site.module).__name__} computes its scores itself, without the attention interface through "
                f"which pages of keys are read. {_REMEDY}"
            )
    return ""


def _of_lengths(encoding: PositionEncoding) -> str:
    if not is_length_dependent(encoding):
        return ""
    return (
        "it encodes a token by the length of its sequence, or by tokens that a cache does not keep, and keys in pages "
        f"are never computed again. {_REMEDY}"
    )


def _of_kernels(encoding: PositionEncoding, model: Any) -> str:
    implementation = (model.config._attn_implementation or "").removeprefix(PREFIX)
    if "flash" not in implementation:
        return ""
    for layer in _decoder_layers(encoding):
        bias = layer.logit_bias
        linear = isinstance(bias, DistanceBias) and bias.slopes_behind(torch.device("cpu")) is not None
        foldable = (linear or isinstance(bias, SeparableBias)) and layer.logit_scale is None
        if bias is not None and not foldable:
            return (
                f"its {type(bias).__name__} cannot be folded into the queries and keys of {implementation!r}. Call "
                'model.set_attn_implementation("sdpa").'
            )
    return ""


def refuse_running_batches(model: nn.Module) -> None:
    """Refuses to exchange the scheme of a model that a thread of continuous batching calls at the same time.

    One call would run some layers with the old scheme and some with the new one. While the manager pauses, its pages
    still hold keys of the old scheme.

    Raises:
        UnsupportedError: while such a thread is alive.
    """
    for thread in threading.enumerate():
        # The function that a `threading.Thread` runs. The thread drops it when it ends.
        manager = getattr(getattr(thread, "_target", None), "__self__", None)
        if manager is not None and _is_manager(manager) and _share_modules(manager.model, model):
            raise UnsupportedError(
                f"Continuous batching is running on this {type(model).__name__}, and its pages hold keys of the "
                "position encoding in force, so that cannot be exchanged now. Stop it first "
                "(manager.stop(block=True)), and call model.init_continuous_batching() again afterwards."
            )


def drop_kept_pages(model: nn.Module) -> None:
    """Makes a manager that the model keeps allocate new pages when it starts again.

    Requests with a common beginning share pages, also with requests from before the exchange, whose keys have another
    scheme.
    """
    manager: Any = model.__dict__.get(KEPT_MANAGER)
    if manager is not None:
        manager.batch_processor = None
        manager.warmed_up = False


def _is_manager(owner: Any) -> bool:
    module = sys.modules.get("transformers.generation.continuous_batching")
    return module is not None and isinstance(owner, module.ContinuousBatchingManager)


def _share_modules(first: nn.Module, second: nn.Module) -> bool:
    """Whether one is the other, or a part of it."""
    return any(module is second for module in first.modules()) or any(module is first for module in second.modules())
