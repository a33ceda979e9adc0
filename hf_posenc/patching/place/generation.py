"""`generate` and `generate_batch` of a patched model: checks and settings before a call begins.

The checks refuse calls which would otherwise fail halfway or corrupt the model.

Transformers runs `generate_batch` in a thread that logs its errors and returns empty results. All entry points call
`init_continuous_batching`, which runs in the caller's thread, so the checks are made there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import ContinuousBatchingConfig, GenerationMixin, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

from hf_posenc.attention.key_channels import num_channels
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.cache import GENERATION, Generation, cache_argument, note_of, set_note
from hf_posenc.patching.call.module_sites import TableSite
from hf_posenc.patching.call.scores_attention import ScoresAttention
from hf_posenc.patching.forwards import WithOverrides
from hf_posenc.patching.place.encoding import LayerEncoding, PositionEncoding
from hf_posenc.patching.place.lengths import is_length_dependent
from hf_posenc.schemes.parts import Part
from hf_posenc.schemes.refusals import GROWING_CACHE, PAGES, PAGES_IN_GRAPHS, PAGES_OF_FLASH

_DEPTH = "num_hidden_layers"
_POSITIONAL = ("inputs", "generation_config")
#: The methods that make and continue `position_ids` and the mask.
_COUNTING = (
    "prepare_inputs_for_generation", "_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation",
)  # fmt: skip


#: Arguments of `generate`, and options of a generation config, that require a cache.
_NEEDS_CACHE = (
    "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "prefill_chunk_size",
)  # fmt: skip


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
        """Runs the checks, then `generate`."""
        arguments = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        if self.in_force:
            drafts = bool(getattr(arguments.get("generation_config"), "is_assistant", False))
            self._refuse_growing_caches(arguments, drafts)
            self._refuse_unnoticed_caches(arguments)
            tokens = kwargs.get("input_ids")
            # Assisted decoding does not pass on a mask. Without one, transformers treats every generated token that has
            # the padding id as padding, although `position_ids` count it.
            unmasked = kwargs.get("attention_mask") is None and not self.model.config.is_encoder_decoder
            if drafts and unmasked and isinstance(tokens, torch.Tensor):
                kwargs = kwargs | {"attention_mask": torch.ones_like(tokens)}
        # An early exit (`assistant_early_exit`) reduces the number of layers in the config for each draft. After an
        # error or an interrupt in a draft, later calls would run only the first layers.
        config = self.model.base_model.config
        depth = getattr(config, _DEPTH, None)
        # A chunk of a padded prompt may hold only padding of a row, so chunks are read one by one.
        chunked = self.in_force and self._setting(arguments, "prefill_chunk_size")
        generation = Generation() if self.in_force and not chunked and self._counts(kwargs) else None
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

    def _setting(self, arguments: dict[str, Any], name: str) -> Any:
        """A generation option of a call: an argument, or else a field of the generation config, or `None`."""
        if arguments.get(name) is not None:
            return arguments[name]
        given = getattr(arguments.get("generation_config"), name, None)
        return getattr(self.model.generation_config, name, None) if given is None else given

    def _refuse_growing_caches(self, arguments: dict[str, Any], drafts: bool) -> None:
        """Refuses assisted decoding and chunked prefill with a scheme that does not support growing caches.

        Raises:
            UnsupportedError: for a call with such a scheme, unless the caller asks for a cache. In that case, the
                forward pass refuses a cache that it cannot extend correctly.
        """
        if not is_length_dependent(self.encoding):
            return
        problem = GROWING_CACHE.problem(self.encoding.needs())
        if drafts:
            tokens = arguments.get("input_ids")
            length = tokens.shape[1] if isinstance(tokens, torch.Tensor) else 1
            try:
                for part in self.encoding.modules():
                    if isinstance(part, Part):
                        part.check_cache(length, length + 1)
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"This assistant model cannot draft, because drafting needs a growing cache, which cannot run "
                    f"{self.encoding.label}: {problem}. Use an assistant with another scheme, or generate without one."
                ) from error
            return
        asked = [name for name in _NEEDS_CACHE if self._setting(arguments, name)]
        if asked and not self._setting(arguments, "use_cache"):
            raise UnsupportedError(
                f"{asked[0]} needs a growing cache, which cannot run {self.encoding.label} of this "
                f"{type(self.model).__name__}: {problem}. Generate without {asked[0]}."
            )

    def _refuse_unnoticed_caches(self, arguments: dict[str, Any]) -> None:
        """Refuses prompt learning by a version of PEFT that looks for the cache under another name than the model's."""
        prepare: Any = self.model.prepare_inputs_for_generation
        config: Any = getattr(prepare.__self__, "active_peft_config", None)
        if not getattr(config, "is_prompt_learning", False):
            return
        name = cache_argument(self.model)
        learns_keys = config.peft_type in ("PREFIX_TUNING", "CARTRIDGE")
        uses_cache = learns_keys or self._setting(arguments, "use_cache") is not False
        if uses_cache and name not in inspect.unwrap(prepare.__func__).__code__.co_consts:
            raise UnsupportedError(
                f"This PEFT does not notice the cache of a {type(self.model).__name__}, whose argument is {name!r} in "
                f"transformers {transformers.__version__}, so prompt and prefix tuning generate wrong tokens, with "
                f"stock models too. {'Use' if learns_keys else 'Generate with use_cache=False, or use'} an earlier "
                "transformers or a newer PEFT."
            )

    def _counts(self, kwargs: dict[str, Any]) -> bool:
        """Whether transformers counts the positions over the mask in every step."""
        methods = [(getattr(self.model, name, None), getattr(GenerationMixin, name, None)) for name in _COUNTING]
        stock = all(getattr(method, "__func__", None) is of_class for method, of_class in methods)
        # The rows of RoBERTa's table do not begin at 0.
        shifted = any(site.table.origin for site in self.encoding.record.placed(TableSite))
        mask = kwargs.get("attention_mask")
        return stock and not shifted and kwargs.get("position_ids") is None and (mask is None or mask.dim() == 2)


#: Attribute of the manager that `generate_batch(persistent_manager=True)` keeps on the model for later calls.
KEPT_MANAGER = "_cached_continuous_batching_manager"
_CONFIG = "continuous_batching_config"
#: Attribute of a cache with the check that it has passed.
_CHECKED_FOR = "_hf_posenc_checked_for"


class CheckedContinuousBatching(CheckedMethod):
    """Stands in for `init_continuous_batching`."""

    method = "init_continuous_batching"

    @classmethod
    def place(cls, encoding: PositionEncoding, model: Any) -> None:
        """Sets an instance on the model, and removes a kept manager, whose pages hold keys of another scheme."""
        super().place(encoding, model)
        if hasattr(model, cls.method):
            encoding.record.journal.put_aside(model, KEPT_MANAGER)
            for stack in encoding.stacks.values():
                stack.runtime.pages = model.__dict__[cls.method]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Starts continuous batching."""
        if not self.in_force:
            return self.__wrapped__(*args, **kwargs)
        given = inspect.signature(self.__wrapped__).bind(*args, **kwargs).arguments
        self._refuse_pages()
        # Without hints, each prompt is checked when it is added.
        hints = given.get("workload_hints")
        if longest := 0 if hints is None else hints.max_prompt_length + hints.max_generated_length:
            self.encoding.reach().check(torch.tensor([longest - 1]))
        if any(layer.reads_pages for layer in self.layers):
            given[_CONFIG] = self._settings(given)
        manager, width = self.__wrapped__(**given), self.width
        if any(width > layer.head_dim for layer in self.layers) and manager.batch_processor is None:
            manager._create_batch_processor = functools.partial(_with_wide_pages, manager, width)
        return manager

    @property
    def layers(self) -> list[LayerEncoding]:
        """All layers of the scheme."""
        return [layer for stack in self.encoding.stacks.values() for layer in stack.layers]

    @property
    def width(self) -> int:
        """The width of pages that the keys of the scheme need."""
        return max((page_width(layer, self.model.dtype) for layer in self.layers), default=0)

    def _refuse_pages(self) -> None:
        """Refuses a scheme that cannot be computed from paged keys."""
        label = self.encoding.label
        for site in self.encoding.record.placed(ScoresAttention):
            raise UnsupportedError(
                f"Continuous batching cannot run {label}: {type(site.module).__name__} computes its scores itself, "
                f"without the attention interface that reads paged keys. {PAGES.remedy}"
            )
        if is_length_dependent(self.encoding):
            PAGES.refuse(self.encoding.needs(), label)
        if "flash" in (self.model.config._attn_implementation or ""):
            for layer in self.layers:
                PAGES_OF_FLASH.refuse(layer.needs(), label)

    def _settings(self, given: dict[str, Any]) -> ContinuousBatchingConfig:
        """The settings of a call, so that no graph or kernel reads pages itself; refuses those that ask for it."""
        generation_config = given.get("generation_config") or self.model.generation_config
        settings = given.get(_CONFIG) or getattr(generation_config, _CONFIG, None) or ContinuousBatchingConfig()
        for asked in ("use_cuda_graph", "varlen_compile_config", "decode_compile_config", "default_compile_level"):
            value = getattr(settings, asked, None)
            if any(value) if isinstance(value, tuple) else value:
                PAGES_IN_GRAPHS.refuse(self.encoding.needs(), f"{self.encoding.label} ({asked})")
        settings = copy.copy(settings)
        settings.use_cuda_graph = False
        # If the kernel reads pages itself, the scheme has no access to the keys. Flash kernels support only few biases.
        settings.max_blocks_per_request = 0
        settings.auto_switch_to_flash = False
        return settings

    def check(self, cache: Any) -> None:
        """Checks the pages of a call once, for managers that were created before the scheme was placed.

        It runs in the manager's thread, which passes errors to the caller of every request.
        """
        if note_of(cache, _CHECKED_FOR) is self:
            return
        self._refuse_pages()
        needed, width = self.width, width_of_pages(cache, min((layer.head_dim for layer in self.layers), default=0))
        reads_pages = any(layer.reads_pages for layer in self.layers)
        if width is not None and width < needed:
            problem = f"the keys of this scheme have width {needed}, but its pages have width {width}"
        elif reads_pages and self.model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            problem = PAGES_IN_GRAPHS.problem(self.encoding.needs())
        else:
            set_note(cache, _CHECKED_FOR, self)
            return
        raise UnsupportedError(
            f"Continuous batching cannot run {self.encoding.label} with this manager, which was created before the "
            f"scheme was placed: {problem}. Create a new one with model.init_continuous_batching()."
        )


def refuse_running_batches(model: nn.Module) -> None:
    """Refuses to change the scheme of a model while a thread of continuous batching uses the model.

    A call in progress would run some layers with the old scheme and some with the new one. Even if the manager is
    paused, its pages still hold keys of the old scheme.
    """
    for thread in threading.enumerate():
        # `_target` is the function that a `threading.Thread` runs. It is deleted when the thread ends.
        manager = getattr(getattr(thread, "_target", None), "__self__", None)
        if not isinstance(manager, ContinuousBatchingManager):
            continue
        if model in manager.model.modules() or manager.model in model.modules():
            raise UnsupportedError(
                f"Continuous batching is running on this {type(model).__name__}, and its pages hold keys of the "
                "current position encoding, so the encoding cannot be changed now. Stop it first "
                "(manager.stop(block=True)), and call model.init_continuous_batching() again afterwards."
            )


def drop_kept_pages(model: nn.Module) -> None:
    """Makes a manager that is kept on the model allocate new pages when it is restarted.

    Requests with a common prefix share pages. Without this, a request could reuse keys of the previous scheme.
    """
    manager: Any = model.__dict__.get(KEPT_MANAGER)
    if manager is not None:
        manager.batch_processor = None
        manager.warmed_up = False


def page_width(layer: LayerEncoding, dtype: torch.dtype) -> int:
    """The width of the keys of one layer when they are written to a page."""
    factor = 1 if layer.query_key_map is None else layer.query_key_map.width_factor
    numbers = layer.feature_heads // (layer.num_cached_heads or layer.num_key_value_heads) * layer.num_features
    if layer.rotation_before_cache is not None and layer.rotation_before_cache.angles_of_own_token:
        numbers = 0
    return layer.head_dim * factor + num_channels(numbers, dtype)


def width_of_pages(cache: Any, head_dim: int) -> int | None:
    """The width of the pages of a cache; `None` if the cache is not of transformers' class."""
    update = vars(cache).get("update")
    if isinstance(update, _PaddedUpdate):
        return update.width
    return head_dim if isinstance(cache, PagedAttentionCache) else None


def _with_wide_pages(manager: Any, width: int) -> Any:
    """Replaces a manager's `_create_batch_processor`: makes the processor with wide pages, or resets it.

    Pages are as wide as the heads in the config. Keys are wider with some maps, and with cached features of a bias.
    """
    text_config = WithOverrides(manager.model.config.get_text_config(), head_dim=width)
    config = WithOverrides(manager.model.config, get_text_config=lambda *_, **__: text_config)
    seen = WithOverrides(manager, model=WithOverrides(manager.model, config=config))
    processor = type(manager)._create_batch_processor(seen)
    if "update" not in vars(processor.cache):
        processor.cache.update = _PaddedUpdate(processor.cache, width)
    return processor


class _PaddedUpdate:
    """Replaces a cache's `update`: pads keys and values to the width of a page, and removes the padding afterwards."""

    def __init__(self, cache: Any, width: int) -> None:
        self.cache = cache
        self.width = width

    def __call__(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Calls the cache's `update` with padded keys and values."""
        widths = key_states.shape[-1], value_states.shape[-1]
        wide_keys, wide_values = (pad(each, (0, self.width - each.shape[-1])) for each in (key_states, value_states))
        keys, values = type(self.cache).update(self.cache, wide_keys, wide_values, *args, **kwargs)
        return keys[..., : widths[0]], values[..., : widths[1]]
