"""Patched models in SGLang. Imported together with SGLang's registry of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
from sglang.srt.models.transformers import TransformersForCausalLM
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.refusals import SGLANG
from hf_posenc.serving.engine_schemes import refuse_settings, restore_forwards, sites_for_engine, without_mark


class HfPosencForCausalLM(TransformersForCausalLM):
    """SGLang's backend for transformers models, for a model with a position encoding of this package."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        parallel = get_parallel()
        refuse_settings("SGLang", config, processes=parallel.tp_size * parallel.pp_size)
        if not cuda_graph_fully_disabled():
            raise UnsupportedError(
                "SGLang would capture CUDA graphs of this model, in which the position encoding was never tested. "
                "Start it with --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled."
            )
        super().__init__(config, quant_config=quant_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Replaces the layers of the model by those of SGLang, and keeps the scheme in place."""
        sites = sites_for_engine(self.model, SGLANG)
        super().recursive_replace()
        restore_forwards(self.model, sites)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the weights of a checkpoint, including those of the scheme."""
        return super().load_weights(without_mark(self.model, weights))
