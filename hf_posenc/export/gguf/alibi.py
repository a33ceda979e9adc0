"""ALiBi in llama.cpp, which computes the slopes from the number of heads."""

from __future__ import annotations

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.parts import EQUAL, ModelParts
from hf_posenc.schemes.bias.alibi import AlibiBias, alibi_slopes


def refuse_other_biases(parts: ModelParts) -> None:
    """Refuses a scheme that does not have ALiBi with its fixed slopes in every layer.

    For any number of heads, llama.cpp computes the slopes of `alibi_slopes`.

    Raises:
        UnsupportedError: with the other bias, or the difference of the slopes.
    """
    for layer in parts.layers:
        bias = layer.logit_bias
        if not isinstance(bias, AlibiBias):
            what = "no bias" if bias is None else type(bias).__name__
            raise UnsupportedError(f"llama.cpp has no bias but ALiBi in these blocks; a layer has {what}")
        if bias.num_left is not None:
            raise UnsupportedError("llama.cpp has the same bias in both directions; a layer has the asymmetric ALiBi")
        slopes = bias.slopes.detach().double().cpu()
        fixed = torch.tensor(alibi_slopes(layer.num_heads), dtype=torch.float64)
        if not torch.allclose(slopes, fixed, rtol=EQUAL, atol=0):
            raise UnsupportedError(
                f"llama.cpp computes ALiBi's slopes from the number of heads; those of this model differ by up to "
                f"{float((slopes / fixed - 1).abs().max()):.3g} of their value. Train with learnable=False to export"
            )
