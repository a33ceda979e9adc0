"""Maps beyond RoPE against numbers that their authors' code printed, and those of the widely used port of PoPE.

The queries and keys of every fixture are `sin(0.7 n + offset)` over a running index `n`, as `ramp` makes them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc.schemes import RopeScaling, YarnScaling
from hf_posenc.schemes.rotary.fope import FourierMap, fourier_coefficients
from hf_posenc.schemes.rotary.hope import HopeConfig
from hf_posenc.schemes.rotary.pope import PopeConfig
from hf_posenc.schemes.rotary.resonance import ResonanceScaling
from hf_posenc.schemes.rotary.rope_pp import RopePpConfig
from hf_posenc.schemes.rotary.xpos import XposConfig

from .building import at, counted, part_of

# torchscale 4d1e0e8, `XPOS(8)` on one head of 6 tokens: `xpos(q) @ xpos(k, downscale=True)^T`, offsets 0 and 1. The
# first and the last query, as in the matrices below.
XPOS_LOGITS = [
    [2.615626, 3.973593, 3.05892, 1.753914, -0.007686, -2.615998],
    [-1.598174, -2.975573, -3.248234, -2.759813, -0.621578, 2.453388],
]

# lucidrains' PoPE-pytorch ee11cab, `PoPE(4, heads=2)` with the bias below (some outside the clamp) on 5 tokens:
# the product of what `apply_pope_to_qk` returns, offsets 0 and 1.
POPE_DELTA = [[0.0, -1.0, -2.0, -3.0], [0.5, -7.0, -0.25, -0.5]]
POPE_LOGITS = [
    [
        [0.136486, -0.43926, -1.326111, -0.714658, -1.64083],
        [-1.269405, -0.770439, -1.485116, -0.264226, -1.384149],
    ],
    [
        [2.733586, 2.177582, 1.310165, 0.856421, 1.587492],
        [1.060163, 2.687762, 2.05702, 2.125727, 4.365354],
    ],
]

# Fourier-Position-Embedding bd94b20, `FourierEmbedding` with 2 heads of 16, 64 positions and the settings of the
# published runs (floor to zero, separate basis and head), but with `fourier_norm`, as in the paper's listing, on 5
# tokens: 3 pairs turn. Its coefficients were replaced by the identity plus 0.2 `ramp`, offsets 0.5 (cosine) and 0.9
# (sine); queries and keys (offsets 0 and 1) were zero in the dimensions of stopped pairs, which that code turns by 45
# degrees.
FOPE_LOGITS = [
    [
        [1.772112, 1.784155, 0.01007, -0.535083, 0.812424],
        [0.552802, 0.670871, -1.600106, -0.436005, 2.173434],
    ],
    [
        [0.774804, 1.626866, 0.468235, 0.942137, 1.328262],
        [1.066637, -0.719574, -1.930075, -0.120831, 1.150744],
    ],
]

# The same code with its published settings alone (`fourier_norm` off) and queries and keys with all dimensions, for a
# training length of 2,000, where 6 pairs turn and the code mixes 4.
FOPE_RELEASED_LOGITS = [
    [
        [6.62584, 8.90349, -2.34279, -8.60842, 0.55242],
        [11.06669, 4.4328, -9.21924, -6.9434, 7.62784],
    ],
    [
        [4.66148, 8.40444, -1.06863, -7.48864, -1.34385],
        [10.61509, 1.64642, -10.43753, -5.96705, 7.7028],
    ],
]

# resonance_rope 4a7f5a7: `r_wavelengths` of `LlamaResonanceRotaryEmbedding(16)`, and of
# `LlamaYaRNScaledResonanceRotaryEmbedding(32, scale=4, original_max_position_embeddings=2048)` with its `mscale`.
RESONANT_WAVELENGTHS: dict[RopeScaling | None, tuple[list[int], float]] = {
    None: ([6, 20, 63, 199, 628, 1987, 6283, 19869], 1.0),
    YarnScaling(4.0, 2048): (
        [6, 11, 20, 35, 63, 125, 253, 521, 1100, 2407, 5563, 14133, 25133, 44693, 79477, 141332],
        1.138629436111989,
    ),
}


def ramp(*shape: int, offset: float) -> Tensor:
    return (torch.arange(math.prod(shape)).double() * 0.7 + offset).sin().float().view(shape)


def raw_logits(part: Any, query: Tensor, key: Tensor) -> Tensor:
    """Those of the first and the last query."""
    phases = part.phases(counted(query.shape[2]))
    return (part.map_query(query, phases) @ part.map_key(key, phases).transpose(-1, -2))[0][:, [0, -1]]


def test_xpos_equals_torchscale():
    query, key = ramp(1, 1, 6, 8, offset=0.0), ramp(1, 1, 6, 8, offset=1.0)
    # An odd or even middle: the authors' origin of 3 and ours of 0 give the same logits.
    for origin in (0.0, 3.0):
        part = part_of(XposConfig(origin=origin), num_heads=1, head_dim=8)
        torch.testing.assert_close(raw_logits(part, query, key)[0], torch.tensor(XPOS_LOGITS), rtol=0, atol=5e-6)


def test_pope_equals_the_port():
    part = part_of(PopeConfig(), num_heads=2, num_key_value_heads=2, head_dim=4)
    with torch.no_grad():
        part.delta.copy_(torch.tensor(POPE_DELTA))
    query, key = ramp(1, 2, 5, 4, offset=0.0), ramp(1, 2, 5, 4, offset=1.0)
    torch.testing.assert_close(raw_logits(part, query, key), torch.tensor(POPE_LOGITS), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("length", "turning", "mixed", "released", "logits", "close"),
    [(64, 3, 3, False, FOPE_LOGITS, 5e-6), (2000, 6, 4, True, FOPE_RELEASED_LOGITS, 1e-5)],
    ids=["paper", "released"],
)
def test_fope_equals_the_authors_code(length, turning, mixed, released, logits, close):
    frequencies = part_of(HopeConfig(), max_positions=length).inverse_frequencies(torch.tensor([[1]]))
    assert int((frequencies > 0).sum()) == turning
    coefficients = 0.2 * torch.stack([ramp(2, turning, mixed, offset=offset) for offset in (0.5, 0.9)])
    part = FourierMap(frequencies, "half", coefficients, learnable=False, released=released)
    used = torch.ones(16) if released else (torch.arange(16) % 8 < turning).float()
    query, key = (ramp(1, 2, 5, 16, offset=offset) * used for offset in (0.0, 1.0))
    torch.testing.assert_close(raw_logits(part, query, key), torch.tensor(logits), rtol=0, atol=close)


@pytest.mark.parametrize(("heads", "deviation"), [(8, 0.021672), (16, 0.018755)])
def test_fope_coefficients_have_the_deviation_of_the_authors_code(heads, deviation):
    # The deviation of 50 draws of `xavier_normal_(empty(heads, 16, 16), gain=0.3)`, the initialisation of that code.
    drawn = fourier_coefficients(heads, 16, 0.3, seed=0, num_mixed=16)
    assert drawn.std().item() == pytest.approx(deviation, rel=0.05)
    assert drawn.mean().item() == pytest.approx(0.0, abs=4 * deviation / math.sqrt(drawn.numel()))


@pytest.mark.parametrize("scaling", RESONANT_WAVELENGTHS, ids=repr)
def test_resonance_equals_the_authors_code(scaling):
    wavelengths, factor = RESONANT_WAVELENGTHS[scaling]
    frequencies, attention_scaling = ResonanceScaling(scaling).spectrum(10000.0, 2 * len(wavelengths))
    # float32 knows a wavelength of 141332 to a hundredth.
    torch.testing.assert_close(2 * math.pi / frequencies, torch.tensor(wavelengths).float(), rtol=3e-7, atol=0)
    assert attention_scaling == pytest.approx(factor)


# OpenMOSS rope_pp 91ba335, `LlamaAttention.apply_rotary_pos_emb` with `imag_mode` "imag1" (RoPE++_EH), 4 heads of 4 and
# theta 100, of two queries and a key at the positions 3 and 5: 0.1, 0.2, ... 1.6, and 1.6, 1.5, ... 0.9.
ROPE_PP_QUERIES = [
    [[-0.141335, 0.072859, -0.282886, 0.441239], [0.813078, 0.143009, -0.280899, 0.989721]],
    [[-0.282886, 0.441239, 0.141335, -0.072859], [-0.280899, 0.989721, -0.813078, -0.143009]],
    [[-1.046225, 0.600712, -0.961984, 1.441924], [1.807147, 0.461535, -0.821108, 2.075328]],
    [[-0.961984, 1.441924, 1.046225, -0.600712], [-0.821108, 2.075328, -1.807147, -0.461535]],
]
ROPE_PP_KEY = [[-1.781556, 1.048828, -1.160197, 1.685218], [1.299319, 0.533858, -0.867047, 1.317192]]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_rope_pp_equals_the_authors_code(key_heads: int) -> None:
    """What the second head of a pair projects is not read; nor is its key, if it has one."""
    part = part_of(RopePpConfig(100.0, layout="half"), num_heads=4, num_key_value_heads=key_heads, head_dim=4)
    phases = part.phases(at([3, 5]))
    query = torch.arange(1.0, 17.0).view(1, 2, 2, 4) / 10
    key = (torch.arange(16.0, 8.0, -1.0).view(1, 1, 2, 4) / 10).repeat(1, key_heads, 1, 1)
    if key_heads == 4:
        key[:, 1::2] = math.nan
    query = torch.stack((query, torch.full_like(query, math.nan)), dim=2).flatten(1, 2)
    torch.testing.assert_close(part.map_query(query, phases)[0], torch.tensor(ROPE_PP_QUERIES), rtol=0, atol=1e-6)
    expected = torch.tensor(ROPE_PP_KEY).expand(key_heads, -1, -1)
    torch.testing.assert_close(part.map_key(key, phases)[0], expected, rtol=0, atol=1e-6)
