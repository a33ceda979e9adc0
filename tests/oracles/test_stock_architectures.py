"""Each scheme against architectures of transformers that have it natively.

The scheme is named here with its options spelled out, never read off the model: a stock model patched with the scheme
its paper gives it has to stay as it was.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc import (
    AlibiConfig,
    ComposedConfig,
    LearnedConfig,
    PRopeConfig,
    RopeConfig,
    SchemeConfig,
    SinusoidalConfig,
    T5Config,
    YarnScaling,
    patch_model,
)
from tests.models import tiny

#: fp32, two layers: the same numbers summed in another order. Biases enter BLOOM and MPT as `slope * j` up to a shift.
CLOSE = 1e-5

ORACLES: dict[str, tuple[str, dict[str, Any], SchemeConfig]] = {
    "bloom_12_heads": ("Bloom", {"hidden_size": 48, "n_head": 12}, AlibiConfig(variant="causal")),
    "mpt": ("Mpt", {"d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": 96, "max_seq_len": 64}, AlibiConfig()),
    "t5": ("T5", {}, T5Config()),
    # With sdpa, the default, its decoder sees later tokens before transformers 5.18, and is refused.
    "umt5_per_layer": ("UMT5", {"attn_implementation": "eager"}, T5Config(shared=False)),
    "mpnet": (
        "MPNet",
        {},
        ComposedConfig(parts=(LearnedConfig(num_positions=62, offset=2), T5Config(bidirectional=True))),
    ),
    "gptj": ("GPTJ", {"rotary_dim": 4}, RopeConfig(rotary_dim=4, layout="interleaved")),
    "cohere": ("Cohere", {}, RopeConfig(layout="interleaved", theta=500_000.0)),
    "roformer": ("RoFormer", {"embedding_size": 32}, RopeConfig(layout="interleaved")),
    "gpt_neox_quarter": (
        "GPTNeoX",
        {"hidden_size": 64, "rotary_pct": 0.25},
        RopeConfig(partial_rotary_factor=0.25, layout="half"),
    ),
    "phi_half": ("Phi", {}, RopeConfig(partial_rotary_factor=0.5, layout="half")),
    "llama_yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 5000.0,
            }
        },
        RopeConfig(theta=5000.0, scaling=YarnScaling(factor=4.0, original_max_positions=16), layout="half"),
    ),
    "llama_proportional": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
            "head_dim": 16,
        },
        PRopeConfig(fraction=0.5, layout="half"),
    ),
    "marian": (
        "Marian",
        {"pad_token_id": 0, "decoder_start_token_id": 0},
        SinusoidalConfig(frequencies="vaswani", layout="concatenated"),
    ),
    "xlm": (
        "XLM",
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 96, "max_position_embeddings": 64}
        | {"sinusoidal_embeddings": True, "n_langs": 1},
        SinusoidalConfig(frequencies="vaswani", layout="interleaved"),
    ),
    "m2m_100": ("M2M100", {}, SinusoidalConfig(frequencies="tensor2tensor", layout="concatenated", offset=2)),
    "bert": ("Bert", {}, LearnedConfig()),
    "roberta": ("Roberta", {"pad_token_id": 1}, LearnedConfig(num_positions=62, offset=2)),
    "opt": ("OPT", {}, LearnedConfig(num_positions=64, offset=2)),
}


def _model(family: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = tiny(f"{family}Model", **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            formula = "positions" in name or (family == "XLM" and "position_embeddings" in name)
            if parameter.dim() >= 2 and not formula:
                parameter.normal_(std=0.6 if "relative_attention_bias" in name else 0.25)
    return model.eval()


@pytest.mark.parametrize("oracle", ORACLES)
@torch.no_grad()
def test_scheme_equals_the_architecture_that_has_it(oracle: str) -> None:
    family, settings, scheme = ORACLES[oracle]
    model = _model(family, settings)
    tokens = torch.randint(5, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    arguments = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = tokens
    stock = model(**arguments).last_hidden_state
    patch_model(model, scheme)
    result = model(**arguments).last_hidden_state
    assert (result - stock).abs().max() <= CLOSE * stock.abs().max().clamp(min=1.0)
    patch_model(model, "none")
    assert (model(**arguments).last_hidden_state - stock).abs().max() > 1e-2
