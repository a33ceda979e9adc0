"""T5 in llama.cpp: RMSNorm before attention and before the feed-forward, logits that are not divided by a root.

A scheme is a number for each head and bucket of distances, in every layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.carriers import Carrier, of_types
from hf_posenc.export.gguf.blocks import GELU_NAMES
from hf_posenc.export.gguf.file import GgufForm, Metadata, named_weights
from hf_posenc.export.layers import ModelParts
from hf_posenc.patching.place.encoding import LayerEncoding
from hf_posenc.schemes.bias.t5 import T5Bias
from hf_posenc.schemes.needs import BIASES
from hf_posenc.schemes.parts import DistanceBias

BLOCKS = "T5's"
#: Without a gate, llama.cpp's activation is ReLU; with one, it is GELU.
_ACTIVATIONS = {False: ("relu",), True: GELU_NAMES}
#: Length of a T5 whose config has none: T5 itself was trained on sequences of 512 tokens.
_LENGTH = 512
#: llama.cpp's last bucket starts at this distance, for any number of buckets.
_LAST = 128
#: A bias is compared at distances up to this one.
_FURTHEST = 8192
#: Numbers of buckets to try for a bias that is not T5's: the most that still end at `_LAST` in a decoder, and in an
#: encoder, which has half of them for each direction.
_COUNTS = (32, 254, 508)


def buckets(parts: ModelParts) -> GgufForm:
    """Any bias that is a number for each of llama.cpp's buckets, such as T5's own; no bias is zero in all buckets."""
    biases = [layer.parts.logit_bias for layer in parts.layers]
    counts = {bias.num_buckets for bias in biases if isinstance(bias, T5Bias)}
    refusals = []
    for count in dict.fromkeys([*sorted(counts), *_COUNTS]):
        try:
            tables = _bias_tables(parts, count)
        except UnsupportedError as error:
            refusals.append(error)
            continue
        form = _form(parts)
        form.tensors.update(tables)
        form.metadata["attention.relative_buckets_count"] = count
        return form
    raise refusals[0]


CARRIERS = (Carrier("t5", buckets, BIASES, of_types("t5", "mt5", "umt5")),)


def _bias_tables(parts: ModelParts, count: int) -> dict[str, Tensor]:
    """Tables of `(buckets, heads)`. Layers without a table have that of the first layer."""
    entries = {}
    for side, (stack, encoding) in zip(("enc", "dec"), parts.stacks, strict=False):
        tables = [_bias_table(layer, count, not stack.causal) for layer in encoding.layers]
        shared = all(torch.equal(table, tables[0]) for table in tables)
        for place, table in enumerate(tables[:1] if shared else tables):
            entries[f"{side}.blk.{place}.attn_rel_b.weight"] = table
    return entries


@torch.no_grad()
def _bias_table(layer: LayerEncoding, count: int, bidirectional: bool) -> Tensor:
    bias = layer.logit_bias
    if bias is None:
        return torch.zeros(count, layer.num_heads)
    if not isinstance(bias, DistanceBias):
        raise UnsupportedError(f"llama.cpp's bias depends on the distance only; {type(bias).__name__} reads more")
    device = next((parameter.device for parameter in bias.parameters()), torch.device("cpu"))
    distance = torch.arange(-_FURTHEST, _FURTHEST + 1 if bidirectional else 1)
    values = bias(distance.to(device)).float().cpu().T
    bucket = llama_cpp_bucket(distance, count, bidirectional)
    table = torch.zeros(count, layer.num_heads).index_copy(0, bucket, values)
    other = (table[bucket] != values).any(-1).nonzero().flatten()
    if len(other):
        nearest = int(distance[other].abs().min())
        raise UnsupportedError(
            f"llama.cpp has {count} buckets of distances, the last of which starts at {_LAST}; {type(bias).__name__} "
            f"has several values in the bucket of distance {nearest}"
        )
    return table


def llama_cpp_bucket(distance: Tensor, count: int, bidirectional: bool) -> Tensor:
    """llama.cpp's bucket of a distance (`llama_relative_position_bucket` in its `llama-graph.cpp`).

    Args:
        distance: key position minus query position, int64 of any shape.
        count: number of buckets.
        bidirectional: whether later keys have their own buckets; otherwise they have the bucket of distance 0.
    """
    half = count // 2 if bidirectional else count
    exact = half // 2
    if not 0 < exact < _LAST:
        raise UnsupportedError(f"llama.cpp has no {half} buckets for a direction that end at a distance of {_LAST}")
    first = (distance > 0).long() * half if bidirectional else torch.zeros_like(distance)
    steps = distance.abs() if bidirectional else (-distance).clamp(min=0)
    # The precision of each step decides at the edges of buckets.
    growth = torch.log((steps.clamp(min=1).double() / exact).float()) * (half - exact)
    later = (exact + growth.double() / math.log(_LAST / exact)).float().floor().long().clamp(max=half - 1)
    return first + torch.where(steps < exact, steps, later)


def _form(parts: ModelParts) -> GgufForm:
    """The weights and hyperparameters of an encoder-decoder or of an encoder, without a position encoding."""
    model = parts.model
    config: Any = model.config
    _refuse_other_blocks(parts)
    encoder, *decoder = (len(encoding.layers) for _, encoding in parts.stacks)
    if decoder and decoder[0] > encoder:
        raise UnsupportedError(
            f"{parts.name} has {decoder[0]} layers in the decoder and {encoder} in the encoder; llama.cpp's "
            "cache has as many layers as the encoder"
        )
    architecture = "t5" if decoder else "t5encoder"
    tensors = _weights(parts, architecture, max(encoder, *decoder, 0))
    metadata: Metadata = {
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
    return GgufForm(architecture, metadata, tensors, carrier=f"the architecture {architecture!r}")


def start_token(model: PreTrainedModel) -> int:
    """The first token of a decoder. A new config does not name it."""
    places = (model.config, getattr(model, "generation_config", None))
    named = (getattr(place, "decoder_start_token_id", None) for place in places)
    return int(next((token for token in named if token is not None), model.config.pad_token_id))


def _weights(parts: ModelParts, architecture: str, layers: int) -> dict[str, Tensor]:
    """The weights without the tables of positions. The factor of the logits becomes a part of the last norm."""
    weights = named_weights(parts.model, architecture, layers)
    tensors = {name: tensor for name, tensor in weights.items() if not name.endswith("attn_rel_b.weight")}
    if "dec.output_norm.weight" in tensors:
        tensors["dec.output_norm.weight"] = tensors["dec.output_norm.weight"].float() * _output_factor(parts.model)
    return tensors


@torch.no_grad()
def _output_factor(model: Any) -> float:
    """The factor of the decoder's states before the output layer: in T5 `d_model**-0.5` or 1.

    A run on one token shows which of the two it is, because the deciding field of the config differs between classes
    and versions. The observed number itself is not used, because models in bfloat16 round it.
    """
    states, inputs = [], []
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with (
        model.get_decoder().register_forward_hook(lambda _module, _arguments, output: states.append(output[0])),
        model.get_output_embeddings().register_forward_pre_hook(lambda _module, given: inputs.append(given[0])),
    ):
        model(input_ids=token, decoder_input_ids=token, use_cache=False)
    state, given = states[0].double(), inputs[0].double()
    observed = float((state * given).sum() / (state * state).sum())
    return min((1.0, float(model.config.d_model) ** -0.5), key=lambda factor: abs(factor - observed))


def _refuse_other_blocks(parts: ModelParts) -> None:
    name, config = parts.name, parts.model.config
    causal = [stack.causal for stack, _ in parts.stacks]
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
