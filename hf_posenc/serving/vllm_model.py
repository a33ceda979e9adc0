"""Patched models in vLLM. vLLM imports this module by its name when it loads such a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.refusals import VLLM
from hf_posenc.serving.engine_schemes import refuse_settings, restore_forwards, sites_for_engine, without_mark

#: Attention backends of vLLM that pass the slopes of ALiBi to their kernels. Others, such as FLASHINFER in vLLM 0.32,
#: accept slopes and ignore them.
BACKENDS_WITH_SLOPES = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_FA")


class HfPosencForCausalLM(TransformersForCausalLM):
    """vLLM's backend for transformers models, for a model with a position encoding of this package."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        refuse_settings("vLLM", config, processes=vllm_config.parallel_config.world_size)
        # The patched forwards are Python code that vLLM does not compile.
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _decorate_for_torch_compile(self) -> None:
        """Does nothing. vLLM would compile the forward of the model's class, which the scheme replaces."""

    def recursive_replace(self) -> None:
        """Replaces the layers of the model by those of vLLM, and keeps the scheme in place."""
        sites = sites_for_engine(self.model, VLLM)
        biased = (site for site in sites if site.encoding.logit_bias is not None)
        self._biases: dict[Any, Any] = {site.module: site.encoding.logit_bias for site in biased}
        for site in sites:
            site.encoding = dataclasses.replace(site.encoding, logit_bias=None)  # The kernels of vLLM add it.
        super().recursive_replace()
        restore_forwards(self.model, sites)

    def _create_attention_instances(self, prefix: str = "") -> None:
        self._prefix = prefix
        super()._create_attention_instances(prefix)

    def _get_attn_cls(self) -> Any:
        attention_class = super()._get_attn_cls()
        return self._attention_with_slopes if self._biases else attention_class

    def _attention_with_slopes(self, *, prefix: str, **arguments: Any) -> Attention:
        """Creates the attention of one layer. vLLM's backend passes no slopes."""
        path = prefix.removeprefix(self._prefix).removeprefix(".").removesuffix(f".{VLLM_ATTN_ATTR}")
        bias = self._biases.get(self.get_submodule(path))
        # The values follow with the weights, because slopes may be parameters.
        slopes = None if bias is None else [0.0] * arguments["num_heads"]
        attention = Attention(prefix=prefix, alibi_slopes=slopes, **arguments)
        backend = attention.attn_backend.get_name()
        if bias is not None and backend not in BACKENDS_WITH_SLOPES:
            raise UnsupportedError(
                f"vLLM has chosen the attention backend {backend}, which is not known to apply the slopes of ALiBi. "
                f"Choose another one with --attention-backend, one of {', '.join(BACKENDS_WITH_SLOPES)}."
            )
        return attention

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the weights of a checkpoint, including those of the scheme."""
        loaded = super().load_weights(without_mark(self.model, weights))
        for module, bias in self._biases.items():
            slopes = getattr(module, VLLM_ATTN_ATTR).impl.alibi_slopes
            slopes.copy_(bias.slopes_behind(slopes.device).detach())
        return loaded
