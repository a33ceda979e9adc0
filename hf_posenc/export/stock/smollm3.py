"""Layers without rotation, as `no_rope_layers` of SmolLM3 (arXiv:2501.18795 calls them NoPE layers)."""

from __future__ import annotations

import transformers
from transformers import PreTrainedModel, SmolLM3Config

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.layers import placed_layers, refuse_beyond_rotation, refuse_vectors, spectrum_of
from hf_posenc.export.stock.form import StockForm, copied, stock_config, stock_state, write_current_length
from hf_posenc.export.stock.spectrum import base_of, fold, rotation_parameters

#: Architectures with the weights of a SmolLM3, and the start of their class names.
_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "smollm3": "SmolLM3"}
_COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "attention_bias", "attention_dropout", "mlp_bias", "tie_word_embeddings", "dtype",
    "id2label", "label2id", "problem_type",
)  # fmt: skip


def smollm3(model: PreTrainedModel) -> StockForm:
    """Returns a SmolLM3 with the weights of a Llama, in which some layers do not rotate.

    Raises:
        UnsupportedError: if the architecture has other weights, or the rotating layers rotate differently.
    """
    config, name = stock_config(model), type(model).__name__
    found = getattr(transformers, name.replace(_PREFIXES[config.model_type], "SmolLM3", 1), None)
    if found is None:
        raise UnsupportedError(f"There is no SmolLM3 class for a {name}.")
    if getattr(config, "sliding_window", None) is not None:
        raise UnsupportedError("The model has a sliding window, which a SmolLM3 applies in other layers.")
    layers = placed_layers(model)
    refuse_beyond_rotation(layers, "SmolLM3")
    refuse_vectors(model, "SmolLM3 has no table of positions.")
    write_current_length(config, model)
    state = stock_state(model)
    spectra = [spectrum_of(layer.query_key_map) for layer in layers]
    rotating = [(layer, spectrum) for layer, spectrum in zip(layers, spectra, strict=True) if spectrum is not None]
    for layer, spectrum in rotating:
        if not spectrum.turns_as(rotating[0][1]):
            raise UnsupportedError("The rotating layers differ, but a SmolLM3 has one rotation for all of them.")
        fold(state, layer, spectrum, "half")
    head_dim = layers[0].attention.head_dim
    shared = rotating[0][1] if rotating else None
    length = config.max_position_embeddings
    parameters = rotation_parameters(shared, head_dim, head_dim, base_of(model), length)
    written = SmolLM3Config(
        **copied(config, _COPIED),
        no_rope_layers=[int(spectrum is not None) for spectrum in spectra],
        rope_parameters=parameters,
    )
    written.head_dim = head_dim
    return StockForm(found, written, state, f"{found.__name__} with no_rope_layers")
