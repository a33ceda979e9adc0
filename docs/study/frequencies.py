"""Which frequencies of a rotation the trained models of a study use.

python docs/study/frequencies.py outputs/reference --schemes rope --output docs/study/frequencies.csv
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from docs.study.kept_models import write_measurement
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import TEXT, Anatomy
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.recipes.initialization.logits import layers_of, recorded_heads
from hf_posenc.schemes.rotary.rope import RotaryMap


def frequency_usage(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The share of every frequency in the largest logits that each head could have.

    A pair of dimensions adds at most `|q_m| |k_m|` to a logit, at whatever distance (arXiv:2410.06205, section 4). The
    norms are means over all tokens, and the shares of a head add up to 1.

    Args:
        model: a causal model whose scheme rotates pairs, such as RoPE.
        tokens: `(texts, length)` token ids.

    Returns:
        `(layers, heads, pairs)` float32, from the fastest pair to the slowest.

    Raises:
        UnsupportedError: if the scheme is not one rotation of pairs.
    """
    encoding = current_encoding(model)
    if encoding is None:
        raise UnsupportedError(
            f"{type(model).__name__} is not patched. Patch it with its own scheme: "
            "patch_model(model, native_scheme(model))."
        )
    maps = [layer.query_key_map for layer in layers_of(encoding, TEXT)]
    if not maps or not all(isinstance(part, RotaryMap) for part in maps):
        raise UnsupportedError(f"{type(model).__name__} has no rotation of pairs, so it has no frequencies to use.")
    usage = []
    for rotation, heads in zip(maps, recorded_heads(Anatomy(model), encoding, tokens), strict=True):
        assert isinstance(rotation, RotaryMap)
        groups = heads.query.shape[1] // heads.key.shape[1]
        query, key = (_pair_norms(part, rotation) for part in (heads.query, heads.key))
        bound = query * key.repeat_interleave(groups, dim=0)
        usage.append(bound / bound.sum(-1, keepdim=True))
    return torch.stack(usage)


def _pair_norms(heads: Tensor, rotation: RotaryMap) -> Tensor:
    """`(heads, pairs)`: the mean norm of each rotated pair of dimensions."""
    rotated = heads[..., : rotation.rotary_dim].float()
    if rotation.layout == "interleaved":
        pairs = rotated.unflatten(-1, (-1, 2))
    else:
        pairs = rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
    return pairs.norm(dim=-1).mean(dim=(0, 2))


def frequency_rows(model: PreTrainedModel, tokens: Tensor) -> pd.DataFrame:
    """`frequency_usage` as one row per layer, head and pair."""
    usage = frequency_usage(model, tokens)
    index = pd.MultiIndex.from_product([range(size) for size in usage.shape], names=["layer", "head", "pair"])
    return pd.DataFrame({"share": usage.flatten().numpy().round(5)}, index=index).reset_index()


main = partial(write_measurement, "frequencies", (__doc__ or "").partition("\n")[0], frequency_rows)


if __name__ == "__main__":
    sys.exit(main())
