"""GPT-2 with a rotation, as GPT-NeoX (arXiv:2204.06745) with one residual after the other."""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel, PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import Spectrum, one_spectrum, placed_layers, refuse_beyond_rotation, refuse_vectors
from hf_posenc.export.stock.form import StockForm, copied, renamed, stock_config, stock_state
from hf_posenc.export.stock.spectrum import base_of, rotation_parameters

_CLASSES = {"GPT2LMHeadModel": GPTNeoXForCausalLM, "GPT2Model": GPTNeoXModel}
#: Parts of the names of a GPT-2's weights, and what they are in a GPT-NeoX; applied in this order.
_NAMES = {
    r"^transformer\.": "gpt_neox.",
    r"\bwte\.": "embed_in.",
    r"\bh\.(\d+)\.": r"layers.\1.",
    r"\bln_1\.": "input_layernorm.",
    r"\bln_2\.": "post_attention_layernorm.",
    r"\bln_f\.": "final_layer_norm.",
    r"\battn\.c_attn\.": "attention.query_key_value.",
    r"\battn\.c_proj\.": "attention.dense.",
    r"\bmlp\.c_fc\.": "mlp.dense_h_to_4h.",
    r"\bmlp\.c_proj\.": "mlp.dense_4h_to_h.",
}
_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "initializer_range", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype",
)  # fmt: skip


def gpt_neox(model: PreTrainedModel) -> StockForm:
    """Returns a GPT-NeoX with the weights of a GPT-2.

    Raises:
        UnsupportedError: if there is no such class for the model, or its layers do not all have the same rotation.
    """
    config, found = stock_config(model), _CLASSES.get(type(model).__name__)
    if found is None or config.add_cross_attention:
        raise UnsupportedError(f"There is no GPT-NeoX class for this {type(model).__name__}.")
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise UnsupportedError("GPT-NeoX always divides its logits by the square root of the width of a head.")
    refuse_vectors(model, "GPT-NeoX has no table of positions.")
    layers = placed_layers(model)
    refuse_beyond_rotation(layers, "GPT-NeoX")
    spectra, first = one_spectrum(layers, "GPT-NeoX")
    head_dim = layers[0].attention.head_dim
    state = {}
    for key, value in stock_state(model).items():
        if key.endswith("wpe.weight"):
            continue
        key = renamed(key, _NAMES)
        # GPT-2 stores the matrices of its layers transposed.
        value = value.T.contiguous() if value.ndim == 2 and ".layers." in f".{key}" else value
        found_layer = re.search(r"layers\.(\d+)\.attention\.query_key_value\.", key)
        state[key] = value if found_layer is None else _by_head(value, spectra[int(found_layer[1])], head_dim)
    length = model.position_encoding.lengths.current or config.max_position_embeddings
    written = GPTNeoXConfig(
        **copied(config, _COPIED),
        max_position_embeddings=length,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
        hidden_act=config.activation_function,
        layer_norm_eps=config.layer_norm_epsilon,
        hidden_dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
        use_parallel_residual=False,
        rope_parameters=rotation_parameters(first, first.rotary_dim, head_dim, base_of(model), length),
    )
    return StockForm(found, written, state, f"{found.__name__} with its rotation")


def _by_head(rows: Tensor, spectrum: Spectrum, head_dim: int) -> Tensor:
    """Reorders `(3 * heads * head_dim, ...)`, all queries first, to the queries, keys and values of each head."""
    query, key, value = rows.chunk(3)
    heads = query.shape[0] // head_dim
    query, key = (spectrum.folded(part, heads, head_dim, "half") for part in (query, key))
    parts = [part.unflatten(0, (heads, head_dim)) for part in (query, key, value)]
    return torch.cat([part for head in zip(*parts, strict=True) for part in head])
