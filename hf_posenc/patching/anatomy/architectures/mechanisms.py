"""Declarations for the architectures in transformers with a mechanism or modules of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.patching.anatomy.architectures.declaration import (
    Architecture,
    no_bias,
    no_native,
    no_vectors,
    refused_if,
    silencer,
    undescribed,
    zero_bias,
    zero_bias_of,
    zero_phases,
    zero_relative_shift,
)
from hf_posenc.patching.anatomy.architectures.example_inputs import (
    encoded_series,
    numbers,
    patches_in_a_strip,
    wave_and_spectrogram,
    words_on_a_page,
)
from hf_posenc.patching.anatomy.sites import AttentionLayer, FixedTable
from hf_posenc.patching.anatomy.weights import onload_weights, stored
from hf_posenc.schemes import (
    AlibiConfig,
    ComposedConfig,
    DisentangledConfig,
    NoneConfig,
    RopeConfig,
    SinusoidalConfig,
    T5Config,
)
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.refusals import CACHE_OF_OTHERS, POOLED_PATCHES

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Stack
    from hf_posenc.patching.place.record import Journal


def _is_first_version(module: Any) -> bool:
    """Whether a module is DeBERTa's, and not that of DeBERTa-v2 or SEW-D."""
    return hasattr(module, "disentangled_att_bias")


def _silence_deberta(stack: Stack, patches: Journal) -> None:
    for attention in stack.attentions:
        first = _is_first_version(attention.module)
        patches.replace(attention.module, "disentangled_att_bias" if first else "disentangled_attention_bias", no_bias)
        patches.freeze(attention.module, "pos_proj", "pos_q_proj", "pos_key_proj", "pos_query_proj")
    for encoder in stack.module.modules():
        if hasattr(encoder, "get_rel_embedding"):
            patches.freeze(encoder, "rel_embeddings", "LayerNorm")


def _deberta_terms(module: Any) -> list[str]:
    """The terms that an attention module computes: "c2p" and "p2c"."""
    return [term for term in ("c2p", "p2c") if module.relative_attention and term in module.pos_att_type]


def _deberta_logit_terms(module: Any) -> int:
    """The number of terms by which an attention module divides its logits, whether it computes them or not."""
    if _is_first_version(module):
        return 1 + len(module.pos_att_type)  # Unknown entries count too.
    return 1 + sum(term in module.pos_att_type for term in ("c2p", "p2c"))


def _deberta_refusal(module: Any) -> str | None:
    """Why no scheme computes the same as an attention module with terms, or `None`."""
    if getattr(module, "talking_head", False):
        return "mixes the logits of all heads after the bias is added (talking_head=True), which no scheme does."
    if _deberta_logit_terms(module) != 1 + len(_deberta_terms(module)):
        return (
            f"divides its logits by sqrt({_deberta_logit_terms(module)} head_dim), although it sums "
            f"{1 + len(_deberta_terms(module))} products, because its pos_att_type is {list(module.pos_att_type)}. No "
            "scheme describes this."
        )
    try:
        _deberta_config(module)
    except ValueError as error:
        return f"has buckets that no scheme describes: {error}"
    return None


def _deberta_config(module: Any) -> DisentangledConfig:
    buckets = getattr(module, "position_buckets", -1)
    return DisentangledConfig(
        terms="|".join(_deberta_terms(module)),
        max_distance=module.max_relative_positions,
        buckets=buckets if buckets > 0 else None,
    )


def _deberta_native(stack: Stack) -> SchemeConfig | None:
    module = stack.attentions[0].module
    if not _deberta_terms(module):
        return None
    refusal = _deberta_refusal(module)
    if refusal is not None:
        raise undescribed(f"The disentangled attention of this {type(stack.module).__name__} {refusal}")
    vectors, scheme = stack.layout.vector_schemes(stack), _deberta_config(module)
    return ComposedConfig(parts=(*vectors, scheme)) if vectors else scheme


@torch.no_grad()
def _deberta_tables(stack: Stack, attention: AttentionLayer) -> Tensor | None:
    """`(terms, heads, rows, head_dim)` float32: the projected vectors of the keys, then those of the queries."""
    module = attention.module
    if not _deberta_terms(module) or _deberta_refusal(module) is not None:
        return None
    shared = getattr(module, "share_att_key", False)
    names = {"c2p": "pos_proj", "p2c": "pos_q_proj"}
    if not _is_first_version(module):
        names = {"c2p": "key_proj", "p2c": "query_proj"} if shared else {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
    encoder = stack.module.encoder
    with onload_weights(encoder.rel_embeddings):
        embeddings = encoder.get_rel_embedding()
    # The modules are called, and not multiplied with, because their weights may be elsewhere, quantized or adapted.
    projected = [getattr(module, names[term])(embeddings) for term in _deberta_terms(module)]
    return torch.stack(
        [torch.unflatten(each, -1, (attention.num_heads, -1)).transpose(0, 1).float() for each in projected]
    )


def _relative_table(stack: Stack) -> SchemeConfig:
    owners = [a.module for a in stack.attentions if getattr(a.module, "relative_attention_bias", None) is not None]
    owner = owners[0]
    return T5Config(
        num_buckets=owner.relative_attention_num_buckets,
        max_distance=owner.relative_attention_max_distance,
        shared=len(owners) < len(stack.attentions) or len(stack.attentions) == 1,
    )


def _relative_bias_table(stack: Stack, attention: AttentionLayer) -> Tensor | None:
    """The table of the layer itself, or that of the first layer if it computes the bias for all layers."""
    tables = (getattr(layer.module, "relative_attention_bias", None) for layer in (attention, stack.attentions[0]))
    return next((stored(table) for table in tables if table is not None), None)


def _mpnet_native(stack: Stack) -> SchemeConfig:
    buckets = stack.config.relative_attention_num_buckets
    bias = T5Config(num_buckets=buckets, max_distance=128, bidirectional=True)
    return ComposedConfig(parts=(*stack.layout.vector_schemes(stack), bias))


def _gptj_native(stack: Stack) -> SchemeConfig:
    width = stack.attentions[0].module.rotary_dim or stack.attentions[0].module.embed_dim
    return RopeConfig(theta=10_000.0, rotary_dim=int(width), layout="interleaved")


def _gptj_tables(stack: Stack) -> list[FixedTable]:
    # In each layer, or since transformers 5.24 in one rotary module.
    return [(module, "embed_positions") for module in stack.module.modules() if hasattr(module, "embed_positions")]


def _silence_inkling(stack: Stack, patches: Journal) -> None:
    """Freezes the bias projections. The patched attention already drops the `position_bias` that the layers pass."""
    for attention in stack.attentions:
        children = attention.module.named_children()
        patches.freeze(attention.module, *(name for name, child in children if "Relative" in type(child).__name__))


def _udop_native(stack: Stack) -> SchemeConfig | None:
    if stack.config.is_decoder:
        return _relative_table(stack)
    raise undescribed(
        "The encoder of UDOP adds a bias per distance in the text, and others per horizontal and vertical distance on "
        "the page. No scheme describes this.",
        "them",
    )


def plain_heads(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Stands in for WavLM's call of torch's attention, which adds the gated `bias` where no scheme can act.

    Args:
        module: the attention module.
        hidden_states: `(batch, length, hidden)`.
        attention_mask: `(batch, length)`, 1 at real tokens.
        bias: the gated bias, which is not added.

    Returns:
        `(batch, length, hidden)` and the weights `(batch, heads, length, length)`.
    """
    projected = (projection(hidden_states) for projection in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (
        torch.unflatten(each, -1, (module.num_heads, module.head_dim)).transpose(1, 2) for each in projected
    )
    scores = torch.matmul(query * module.scaling, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask.ne(1)[:, None, None], torch.finfo(scores.dtype).min)
    weights = torch.nn.functional.softmax(scores, dim=-1)
    dropped = torch.nn.functional.dropout(weights, p=module.dropout, training=module.training)
    attended = torch.matmul(dropped, value).transpose(1, 2).flatten(2)
    return module.out_proj(attended), weights


def no_head_bias(module: Any, query_length: int, key_length: int) -> Tensor:
    """Stands in for WavLM's `compute_bias`: zeros `(heads, query_len, key_len)`."""
    return module.rel_attn_embed.weight.new_zeros(()).expand(module.num_heads, query_length, key_length)


#: T5 and related models: the layer that owns the table computes the bias and passes it to the others.
_NO_RELATIVE_TABLE = silencer("relative_attention_bias", compute_bias=zero_bias)
_TEMPERATURE = "queries are scaled by a slow function of their position"


def _inkling(*classes: str) -> Architecture:
    """Inkling, or one of its models with `classes`, whose tokens also attend to their own states in earlier blocks."""
    mechanism = "relative bias that depends on the query"
    return Architecture(attention_classes=classes, mechanism=mechanism, silence=_silence_inkling, kept=(_TEMPERATURE,))


#: The declarations by the model types that they are for.
MECHANISMS: dict[tuple[str, ...], Architecture] = {
    ("deberta", "deberta-v2"): Architecture(
        mechanism="disentangled attention",
        silence=_silence_deberta,
        native=_deberta_native,
        bias_table=_deberta_tables,
        logit_terms=_deberta_logit_terms,
    ),
    ("sew-d",): Architecture(
        mechanism="disentangled attention",
        silence=_silence_deberta,
        native=no_native(
            "SEW-D computes positions with a convolution over neighbouring embeddings, besides disentangled attention. "
            "They depend on the content of the sequence, so no scheme of this library describes them. 'disentangled' "
            "can be trained in their place.",
            "them",
        ),
        logit_terms=_deberta_logit_terms,
    ),
    ("t5", "mt5", "umt5", "switch_transformers", "pop2piano", "pix2struct_text_model"): Architecture(
        mechanism="T5 relative bias",
        silence=_NO_RELATIVE_TABLE,
        native=_relative_table,
        bias_table=_relative_bias_table,
    ),
    ("cohere_asr",): Architecture(tables=("pos_emb",)),
    ("bloom", "mpt"): Architecture(
        mechanism="ALiBi", bias_arguments=("alibi", "position_bias"), native=lambda stack: AlibiConfig(variant="causal")
    ),
    ("mpnet",): Architecture(
        mechanism="T5 relative bias",
        silence=silencer("relative_attention_bias", of="encoder", compute_position_bias=zero_bias),
        native=_mpnet_native,
        bias_table=lambda stack, attention: stored(stack.module.encoder.relative_attention_bias),
    ),
    ("ctrl",): Architecture(
        mechanism="sinusoidal table",
        native=lambda stack: SinusoidalConfig(layout="concatenated"),
        fixed_tables=lambda stack: [(stack.module, "pos_encoding")],
    ),
    ("gptj", "codegen"): Architecture(native=_gptj_native, fixed_tables=_gptj_tables),
    ("roformer",): Architecture(
        unsupported=refused_if(
            lambda config: getattr(config, "rotary_value", False),
            "with `rotary_value=True` it rotates values too, which no scheme of this library does.",
        ),
        table_is_rotary=True,
        rotary_method="apply_rotary_position_embeddings",
        pairing="interleaved",
        silence=silencer(of="encoder.embed_positions", forward=zero_phases),
        native=lambda stack: RopeConfig(theta=10_000.0, layout="interleaved"),
        fixed_tables=lambda stack: [(stack.module.encoder.embed_positions, "weight")],
    ),
    ("xlnet",): Architecture(
        time_major=True,
        mechanism="Transformer-XL bias",
        silence=silencer("r", "r_r_bias", rel_shift_bnij=zero_relative_shift),
        causal=lambda config: config.attn_type == "uni",
    ),
    ("cpmant",): Architecture(
        mechanism="segment position bias",
        bias_arguments=("position_bias",),
        silence=silencer("relative_attention_bias", of="position_bias"),
        kept=("its prompt tokens precede left padding, so distances between prompt and text include the padding",),
    ),
    ("falcon",): Architecture(
        mechanism="ALiBi, if configured",
        # With `use_alibi` off, the model calls its rotary function, which the scheme replaces.
        silence=silencer(of="", use_alibi=False),
        native=no_native(
            "Falcon with `alibi=True` rounds its slopes and positions to bfloat16, divides the bias by sqrt(head_dim) "
            "and, with eager attention, adds it twice. No scheme describes this.",
            if_set="use_alibi",
        ),
        # The new decoder architecture first repeats its keys for every query head.
        key_value_heads=lambda module: module.num_heads if module.new_decoder_architecture else module.num_kv_heads,
    ),
    ("beam", "llama4_text", "ministral3", "mistral4"): Architecture(kept=(_TEMPERATURE,)),
    ("inkling_text",): _inkling(),
    ("inkling2_text",): _inkling("Inkling2SlidingAttention", "Inkling2FullAttention"),
    ("inkling2_loop_text",): _inkling("Inkling2LoopSlidingAttention", "Inkling2LoopFullAttention"),
    ("esm",): Architecture(operand_factors=lambda module: (module.attention_head_size**-0.5, 1.0)),
    ("openai_privacy_filter",): Architecture(operand_factors=lambda module: (module.scaling, module.scaling)),
    ("xlm",): Architecture(causal=lambda config: config.causal),
    ("layoutlmv3",): Architecture(
        mechanism="relative bias",
        silence=silencer("rel_pos_bias", of="encoder", _cal_1d_pos_emb=zero_bias_of),
        native=no_native(
            "LayoutLMv3 adds learned positions and a relative bias, and counts both again from 0 at the first patch of "
            "a picture. No scheme describes this.",
            if_set="encoder.has_relative_attention_bias",
        ),
        keeps_bias=True,
        kept=("the bias of places on the page",),
    ),
    ("squeezebert",): Architecture(channels_first=True),
    ("diffusion_gemma",): Architecture(limits=CACHE_OF_OTHERS),
    ("pi0",): Architecture(limits=CACHE_OF_OTHERS),
    ("udop",): Architecture(
        mechanism="relative biases of words and boxes",
        silence=_NO_RELATIVE_TABLE,
        native=_udop_native,
        example_inputs=words_on_a_page,
    ),
    ("llama4_vision_model",): Architecture(suffix_tokens=1),
    ("yolos",): Architecture(suffix_tokens=lambda config: int(config.num_detection_tokens)),
    ("videomae",): Architecture(
        left_alone=(
            r"^decoder\.",
            "it receives the visible patches first and the masked ones after them, in an order that its arguments do "
            "not show",
        )
    ),
    ("vjepa2",): Architecture(
        left_alone=(
            r"^predictor\.",
            "it receives patches of the context and of the targets, in an order that its arguments do not show",
        )
    ),
    # Modules inside its attention have "Attention" in their names too.
    ("cvt",): Architecture(attention_classes=("CvtSelfAttention",)),
    # Its head, which reads what the vision tower returns, has a recurrent cell with "Attention" in its name.
    ("slanext",): Architecture(attention_classes=("SLANeXtVisionAttention",)),
    ("hiera", "sam2_hiera_det_model"): Architecture(limits=POOLED_PATCHES),
    ("florence_vision",): Architecture(
        left_alone=(r"\.channel_attn$", "it compares channels, which have no order"),
        kept=("the vectors of rows and columns that the projector adds to what this part returns",),
        example_inputs=lambda module, tokens: {"hidden_states": numbers(1, module.config.in_channels, 64, 64)},
    ),
    ("groupvit", "groupvit_vision_model"): Architecture(
        left_alone=(r"\.downsample\.assign$", "it assigns patches to learned groups, which have no places")
    ),
    ("minicpmv4_6_vision", "minicpmv4_7_vision", "minicpm_ocr_vision"): Architecture(
        left_alone=(r"^vit_merger\.", "it compares the four patches of a window, which have their own order"),
        example_inputs=patches_in_a_strip,
    ),
    ("semantic", "coarse_acoustics", "fine_acoustics"): Architecture(tables=("position_embeds_layer",)),
    ("informer",): Architecture(
        unsupported=refused_if(
            lambda config: config.attention_type == "prob",
            "its ProbSparse attention computes logits for a sample of the queries only. It can be patched with "
            "attention_type='full', and with distil=False too for schemes that act in attention.",
        ),
        example_inputs=encoded_series,
    ),
    ("vits",): Architecture(
        mechanism="relative keys and values",
        silence=silencer("emb_rel_k", "emb_rel_v", window_size=None),
        native=no_native(
            "VITS adds learned vectors per distance to its keys and to its values. No scheme of this library changes "
            "values.",
            "both",
        ),
    ),
    ("phi4_multimodal_audio",): Architecture(
        mechanism="relative bias",
        silence=silencer("bias_values", of="relative_attention_bias_layer", forward=zero_bias),
        native=no_native(
            "The audio encoder of Phi-4 adds a learned bias per distance and head, with one table for all layers. The "
            "schemes of this library group distances, or compute the bias from the query."
        ),
    ),
    ("fun_asr_nano_encoder",): Architecture(
        mechanism="sinusoids of positions",
        silence=silencer(of="position_embeddings", forward=no_vectors),
        native=no_native(
            "Fun-ASR-Nano adds sinusoids that count frames from 1. No scheme of this library has that origin.", "them"
        ),
    ),
    ("canary_decoder",): Architecture(
        mechanism="sinusoidal table",
        silence=silencer(of="pos_emb", forward=no_vectors),
        native=no_native(
            "Canary's decoder adds sinusoids divided by the root of their width, and then normalises the sum. No "
            "scheme of this library has that scale.",
            "them",
        ),
    ),
    ("wavlm",): Architecture(
        mechanism="gated relative bias",
        attention_classes=("WavLMAttention",),
        silence=silencer(
            *("gru_rel_pos_const", "gru_rel_pos_linear", "rel_attn_embed"),
            torch_multi_head_self_attention=plain_heads,
            compute_bias=no_head_bias,
        ),
        native=no_native(
            "WavLM multiplies a relative bias with a gate that each token computes from its input, and computes "
            "further positions with a convolution over neighbouring embeddings. No scheme of this library does this.",
            "both",
        ),
    ),
    # Phases depend on the index of the head, so queries and keys of a head are rotated alike.
    ("neucodec", "xcodec2"): Architecture(native=lambda stack: NoneConfig(), example_inputs=wave_and_spectrogram),
}
