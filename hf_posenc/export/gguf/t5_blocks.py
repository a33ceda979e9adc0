"""T5: RMSNorm before attention and before the feed-forward, no biases, logits that are not divided by a root."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.form import GgufForm
from hf_posenc.export.gguf.gelu import GELU_NAMES
from hf_posenc.export.gguf.names import named_weights
from hf_posenc.export.gguf.parts import ModelParts

_ENCODER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_o", "ffn_norm", "ffn_up", "ffn_down")
_DECODER = (*_ENCODER, "cross_attn_norm", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_o")
#: Without a gate, llama.cpp's activation is ReLU; with one, it is GELU.
_ACTIVATIONS = {False: ("relu",), True: GELU_NAMES}
#: Length of a T5 whose config has none: T5 itself was trained on sequences of 512 tokens.
_LENGTH = 512


def is_t5(model: PreTrainedModel) -> bool:
    """Whether a model has these blocks."""
    return model.config.model_type in ("t5", "mt5", "umt5")


def t5_form(parts: ModelParts) -> GgufForm:
    """Returns the weights and hyperparameters of an encoder-decoder or of an encoder, without a position encoding.

    Raises:
        UnsupportedError: for a model with other blocks.
    """
    model = parts.model
    config: Any = model.config
    _refuse_other_blocks(parts)
    encoder, *decoder = (len(one.encoding.layers) for one in parts.stacks)
    if decoder and decoder[0] > encoder:
        raise UnsupportedError(
            f"{type(model).__name__} has {decoder[0]} layers in the decoder and {encoder} in the encoder; llama.cpp's "
            "cache has as many layers as the encoder"
        )
    architecture = "t5" if decoder else "t5encoder"
    tensors = _weights(parts, architecture, max(encoder, *decoder, 0))
    kinds = [("enc", encoder, _ENCODER), *(("dec", count, _DECODER) for count in decoder)]
    required = [
        f"{side}.blk.{layer}.{kind}.weight" for side, count, names in kinds for layer in range(count) for kind in names
    ]
    missing = [key for key in ("token_embd.weight", "enc.output_norm.weight", *required) if key not in tensors]
    if missing:
        raise UnsupportedError(f"{type(model).__name__} does not have T5's blocks: it lacks {missing[0]}")
    metadata: dict[str, int | float | str | bool] = {
        "block_count": encoder,
        "context_length": int(getattr(config, "n_positions", None) or _LENGTH),
        "embedding_length": int(config.d_model),
        "feed_forward_length": int(config.d_ff),
        "attention.head_count": int(config.num_heads),
        "attention.key_length": int(config.d_kv),
        "attention.value_length": int(config.d_kv),
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": int(config.vocab_size),
    }
    if not decoder:
        # Programs that call llama_decode would mask later tokens otherwise; llama_encode never does.
        metadata["attention.causal"] = False
    else:
        metadata["decoder_block_count"] = decoder[0]
        metadata["decoder_start_token_id"] = start_token(model)
    return GgufForm(architecture, metadata, tensors, f"the architecture {architecture!r}")


def start_token(model: PreTrainedModel) -> int:
    """The first token of a decoder. A new config does not name it."""
    places = (model.config, getattr(model, "generation_config", None))
    named = (getattr(place, "decoder_start_token_id", None) for place in places)
    return int(next((token for token in named if token is not None), model.config.pad_token_id))


def _weights(parts: ModelParts, architecture: str, layers: int) -> dict[str, Tensor]:
    """The weights without the tables of positions. The factor of the logits becomes a part of the last norm."""
    tensors = {
        name: tensor
        for name, tensor in named_weights(parts.model, architecture, layers).items()
        if not name.endswith("attn_rel_b.weight")
    }
    if "dec.output_norm.weight" in tensors:
        tensors["dec.output_norm.weight"] = tensors["dec.output_norm.weight"].float() * _output_factor(parts.model)
    return tensors


@torch.no_grad()
def _output_factor(model: Any) -> float:
    """What the decoder's states are multiplied by before the output layer: in T5 `d_model**-0.5` or 1.

    Which of them is observed for one token, because the field of the config that decides differs between classes and
    versions. The number itself is not, because models in bfloat16 round it.
    """
    states, inputs = [], []
    hooks = [
        model.get_decoder().register_forward_hook(lambda _module, _arguments, output: states.append(output[0])),
        model.get_output_embeddings().register_forward_pre_hook(lambda _module, given: inputs.append(given[0])),
    ]
    try:
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, decoder_input_ids=token, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    state, given = states[0].double(), inputs[0].double()
    observed = float((state * given).sum() / (state * state).sum())
    return min((1.0, float(model.config.d_model) ** -0.5), key=lambda factor: abs(factor - observed))


def _refuse_other_blocks(parts: ModelParts) -> None:
    name, config = type(parts.model).__name__, parts.model.config
    causal = [one.stack.causal for one in parts.stacks]
    if causal not in ([False], [False, True]):
        raise UnsupportedError(f"{name} is not an encoder, nor an encoder and a decoder")
    if len(causal) == 2 and parts.model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{name} has no output layer, and llama.cpp's 't5' returns logits. Load the checkpoint with "
            "AutoModelForSeq2SeqLM, or its encoder with T5EncoderModel"
        )
    gated, activation = bool(config.is_gated_act), config.dense_act_fn
    if activation not in _ACTIVATIONS[gated]:
        raise UnsupportedError(
            f"{name} has the activation {activation!r} {'with' if gated else 'without'} a gate; in these blocks "
            f"llama.cpp has {_ACTIVATIONS[gated][0]!r}"
        )
