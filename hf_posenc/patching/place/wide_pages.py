"""Pages for keys that are wider than the heads of the model, because of a map or of the cached features of a bias.

In the cache of continuous batching, the pages of keys and values are as wide as the heads in the config. A worker
thread creates the cache with a method of its manager, which is replaced on that manager.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_posenc.attention.key_channels import channels_per_number
from hf_posenc.patching.call.layer_call import LayerEncoding
from hf_posenc.patching.call.view import WithOverrides


def page_width(layer: LayerEncoding, dtype: torch.dtype) -> int:
    """The width of the keys of one layer when they are written to a page."""
    factor = 1 if layer.query_key_map is None else layer.query_key_map.width_factor
    numbers = layer.feature_heads // layer.num_key_value_heads * layer.num_features
    if layer.rotation_before_cache is not None:
        numbers = 0
    return layer.head_dim * factor + numbers * channels_per_number(dtype)


def width_of_pages(cache: Any, head_dim: int) -> int | None:
    """The width of the pages of a cache.

    Args:
        cache: the cache of a call.
        head_dim: width of the model's heads.

    Returns:
        The width, or `None` if the cache is not of transformers' class.
    """
    from transformers.generation.continuous_batching import PagedAttentionCache

    update = vars(cache).get("update")
    if isinstance(update, _PaddedUpdate):
        return update.width
    return head_dim if isinstance(cache, PagedAttentionCache) else None


class WidePages:
    """Replaces a manager's `_create_batch_processor` to create a cache with wide pages.

    Args:
        manager: the manager of continuous batching.
        width: width of every page.
    """

    def __init__(self, manager: Any, width: int) -> None:
        self.manager = manager
        self.width = width

    def __call__(self) -> Any:
        """Creates the batch processor, or resets the existing one."""
        manager, model = self.manager, self.manager.model
        text_config = WithOverrides(model.config.get_text_config(), head_dim=self.width)
        config = WithOverrides(model.config, get_text_config=lambda *_, **__: text_config)
        seen = WithOverrides(manager, model=WithOverrides(model, config=config))
        processor = type(manager)._create_batch_processor(seen)
        if "update" not in vars(processor.cache):
            processor.cache.update = _PaddedUpdate(processor.cache, self.width)
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
