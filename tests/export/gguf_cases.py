"""Tiny models and tokenizers for exports to GGUF, and what llama.cpp can and cannot run of them."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import BertTokenizer, PreTrainedModel, PreTrainedTokenizerFast, T5Tokenizer

import hf_posenc
from hf_posenc import (
    AlibiConfig,
    ClippedScaling,
    DynamicScaling,
    DynamicYarnScaling,
    IntegerConfig,
    InterleavedConfig,
    LearnedRopeConfig,
    LinearScaling,
    NoneConfig,
    PRopeConfig,
    RopeConfig,
    ScheduleConfig,
    T5Config,
    YarnScaling,
)
from tests.architectures.population import Pair
from tests.architectures.tiny import tiny_model
from tests.models import tiny

VOCABULARY = 300


def tiny_llama(name: str = "LlamaForCausalLM", **options: Any) -> PreTrainedModel:
    """A model whose logits depend strongly on positions, with a vocabulary for `byte_tokenizer`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.1}
    model: PreTrainedModel = tiny(name, **(sizes | options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # Biases are zero and norms are one in a new model.
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def byte_tokenizer(split: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, some of them of digits.

    Args:
        split: how a text is split into words; GPT-2's rule by default.
    """
    words = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        words[letter] = len(words)
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "d"),
        ("1", "2"),
        ("12", "3"),
        ("3", "4"),
        ("Ġ", "Ġ"),
        ("!", "!"),
        ("'", "L"),
    ]
    for first, second in merges:
        words[first + second] = len(words)
    backend = Tokenizer(models.BPE(words, merges))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **options)


def tiny_encoder(name: str, **options: Any) -> PreTrainedModel:
    """A BERT or T5 with large weights and, in a T5, a strong bias, so that wrong positions are far above rounding."""
    torch.manual_seed(0)
    model: PreTrainedModel = tiny(name, vocab_size=VOCABULARY, **({"max_position_embeddings": 256} | options)).eval()
    return with_strong_weights(model)


def with_strong_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Draws all weights of a model, and of its scheme, from a wide distribution."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            wide = "relative" in name or "position" in name
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * (1.0 if wide else 0.2) + (weight if weight.ndim == 1 and not wide else 0.0))
    return model


#: Nodes of the map of characters below, as SentencePiece builds it (a double array; all others are empty).
_NODES = {
    0: 8192, 1: 2313, 2: 1290, 3: 2147483648, 4: 7584, 5: 6413, 6: 133248, 7: 4483, 8: 2433, 9: 131244,
    10: 2147483650, 202: 112834, 231: 67823, 234: 110818,
}  # fmt: skip


def charsmap() -> bytes:
    """Tab, line breaks, U+00A0 and U+2003 become spaces, and the ligature of f and i two letters."""
    nodes = struct.pack("<256I", *(_NODES.get(place, 0) for place in range(256)))
    return struct.pack("<I", len(nodes)) + nodes + b" \0fi\0"


def unigram_tokenizer(normalized: bool = True) -> Any:
    """A T5 tokenizer with a few pieces."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁d", -3.5), ("og", -3.2)]
    pieces += [("the", -4.1), ("12", -4.0), ("fi", -4.5)]
    pieces += [(letter, -5.0 - place / 50) for place, letter in enumerate("abcdefghijklmnopqrstuvwxyzDITMCH0123.,'!?")]
    pieces += [("<extra_id_1>", 0.0), ("<extra_id_0>", 0.0)]
    return T5Tokenizer(vocab=pieces, extra_ids=2, _spm_precompiled_charsmap=charsmap() if normalized else None)


def word_piece_tokenizer(words: str = "", **options: Any) -> Any:
    """A BERT tokenizer with a few pieces."""
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] the dog do ##g ##s a b ##c ! ? . 1 ##2 é e 日 a b ##a ##b The"
    found = dict.fromkeys([*pieces.split(), *words.split()])
    return BertTokenizer(vocab={piece: place for place, piece in enumerate(found)}, **options)


def patched(model: PreTrainedModel, scheme: Any) -> PreTrainedModel:
    """The model itself without a scheme."""
    return model if scheme is None else hf_posenc.patch_model(model, scheme)


def llama(scheme: Any = None, name: str = "LlamaForCausalLM", **options: Any) -> PreTrainedModel:
    """A Llama, or another class with its blocks."""
    return patched(tiny_llama(name, **options), scheme)


#: These classes have other names for their length.
_UNNAMED = {"max_position_embeddings": None}
_SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {},
    "BloomForCausalLM": {"seq_length": 256, **_UNNAMED},
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, **_UNNAMED},
    "GPTBigCodeForCausalLM": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "GPTNeoXForCausalLM": {
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    },
}


def gpt(name: str, scheme: Any = None, **options: Any) -> PreTrainedModel:
    """A decoder with GPT-2's blocks."""
    return llama(scheme, name, **({"bos_token_id": 0, "eos_token_id": 1} | _SIZES[name] | options))


gpt2, bloom, mpt, bigcode, neox = (partial(gpt, name) for name in _SIZES)


def t5(scheme: Any = None, name: str = "T5ForConditionalGeneration", **options: Any) -> PreTrainedModel:
    """A T5 whose scheme has strong weights, too."""
    model = patched(tiny_encoder(name, **options), scheme)
    return model if scheme is None else with_strong_weights(model)


def bert(scheme: Any = None, **options: Any) -> PreTrainedModel:
    """A BERT without a head, whose scheme has strong weights, too."""
    return t5(scheme, "BertModel", **options)


def with_trained_parts(scheme: Any) -> PreTrainedModel:
    """A Llama whose scheme was trained."""
    model = llama(scheme)
    with torch.no_grad():
        for name, parameter in model.position_encoding.named_parameters():
            # STRING has frequencies for each head, which llama.cpp has not.
            if not (scheme == "string" and name.endswith("log_offsets")):
                parameter.uniform_(-1, 1)
    return model


def tokenizer_of(model: PreTrainedModel) -> Any:
    """A tokenizer of the kind that the model is used with."""
    if model.config.is_encoder_decoder or model.config.model_type in ("t5", "bert"):
        return word_piece_tokenizer() if model.config.model_type == "bert" else unigram_tokenizer()
    return byte_tokenizer()


def label(value: Any) -> str:
    """A value of a case in the name of a test."""
    return str(value.args[0] if isinstance(value, partial) else getattr(value, "__name__", value))[:60]


def trained(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose scheme has learned other values."""
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.add_(0.01)
    return model


class OtherGelu(nn.Module):
    """A GELU that is wrong by 0.05 in an interval."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(values) + 0.05 * ((values > 0.5) & (values < 1.5))


def with_other_gelu() -> PreTrainedModel:
    model = gpt2()
    model.transformer.h[1].mlp.act = OtherGelu()
    return model


def ministral(scheme: Any) -> PreTrainedModel:
    """Its queries get a factor at positions beyond the original length, which is longer than any prompt here."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    rope |= {"llama_4_scaling_beta": 2.0}
    return llama(scheme, "Ministral3ForCausalLM", max_position_embeddings=16384, head_dim=8, rope_parameters=rope)


YARN = RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64))
_LINEAR = RopeConfig(scaling=LinearScaling(4.0))
_REVERSED, _PART = (
    RopeConfig(layout="half_reversed", attention_scaling=1.5),
    RopeConfig(layout="interleaved", rotary_dim=4),
)
_SHARP_YARN = YarnScaling(8.0, original_max_positions=32, attention_factor=1.3, beta_fast=16.0)
_TWO = ScheduleConfig((RopeConfig(), NoneConfig()))
_FACTORS, _TABLE, _ALIBI = "'llama' and rope_freqs", "'gpt2' with a table of positions", "'mpt' with ALiBi"
_NOTHING, _SEQUENTIAL, _GATED = (
    "'mpt' with no positions",
    {"use_parallel_residual": False},
    {"feed_forward_proj": "gated-gelu"},
)
_ENCODER = {"name": "T5EncoderModel"}
_OTHER_LLAMAS: list[dict[str, Any]] = [
    {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 0.1},
    {"hidden_size": 48, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 1},
    {"name": "MistralForCausalLM", "sliding_window": None},
    {"name": "Qwen2ForCausalLM"},
]
_EXPERTS = {"num_experts_per_tok": 2}
_MIXTRAL = {"name": "MixtralForCausalLM", "num_local_experts": 4, **_EXPERTS}
_QWEN3 = {"name": "Qwen3ForCausalLM", "head_dim": 16}
QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    **_EXPERTS,
    "name": "Qwen3MoeForCausalLM",
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_QWEN2_MOE: dict[str, Any] = {
    **_EXPERTS,
    "name": "Qwen2MoeForCausalLM",
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_OLMOE = {"name": "OlmoeForCausalLM", "num_experts": 4, "num_key_value_heads": 4, "eos_token_id": 1, **_EXPERTS}
_MOE = [(QWEN3_MOE, "'qwen3moe'"), (_QWEN2_MOE, "'qwen2moe'"), (_OLMOE, "'olmoe'")]
#: How a model is built, with a scheme and options, and what carries it. `test_runtimes` exports every
#: scheme in a Llama, a GPT-2, a BERT and a T5 without options.
SAME: list[tuple[Any, Any, dict[str, Any], str]] = [
    (llama, None, {}, "'llama'"),
    (llama, "p_rope", {"attention_bias": True, "mlp_bias": True}, _FACTORS),
    (llama, _PART, {}, _FACTORS),
    (llama, _REVERSED, {}, _FACTORS),
    (llama, RopeConfig(scaling=_SHARP_YARN), {}, "rope.scaling.type 'yarn'"),
    (llama, RopeConfig(scaling=YarnScaling(4.0, original_max_positions=64, truncate=False)), {}, _FACTORS),
    (llama, RopeConfig(scaling=ClippedScaling(3)), {}, _FACTORS),
    (llama, InterleavedConfig(), {"num_hidden_layers": 5}, "'smollm3'"),
    (
        llama,
        ScheduleConfig((RopeConfig(), PRopeConfig(theta=100.0), NoneConfig())),
        {"num_hidden_layers": 3},
        "heads 3 times",
    ),
    *((llama, "alibi", options, "'refact'") for options in _OTHER_LLAMAS),
    # Slopes that can be learned, and were not.
    (llama, AlibiConfig(learnable=True), {}, "'refact'"),
    (llama, None, _MIXTRAL, "'llama'"),
    (llama, _TWO, _MIXTRAL, "heads 2 times"),
    (llama, None, _QWEN3, "'qwen3'"),
    (llama, _LINEAR, {**_QWEN3, "tie_word_embeddings": True}, "'qwen3' with rope.scaling.type 'linear'"),
    *((llama, None, options, carrier) for options, carrier in _MOE),
    *((llama, "none", options, f"{carrier} with stopped") for options, carrier in _MOE[:1]),
    (llama, RopeConfig(scaling=_SHARP_YARN), _QWEN2_MOE, "'qwen2moe' with rope.scaling"),
    (llama, _REVERSED, QWEN3_MOE, "'qwen3moe'"),
    (with_trained_parts, "learned_rope", {}, _FACTORS),
    (with_trained_parts, "string", {}, "'llama'"),
    (gpt2, None, {}, _TABLE),
    (gpt2, "sinusoidal", {"n_head": 2, "n_inner": 48, "tie_word_embeddings": False}, _TABLE),
    (gpt2, IntegerConfig(direction="random"), {"scale_attn_by_inverse_layer_idx": True}, _TABLE),
    (gpt2, "alibi", {"n_embd": 48, "n_head": 6}, _ALIBI),
    (gpt2, ["sinusoidal", "alibi"], {}, "'mpt' with ALiBi and a table of positions"),
    (gpt2, _REVERSED, {}, "'gptneox'"),
    (bloom, None, {"hidden_size": 48, "n_head": 6}, "'bloom', which has ALiBi"),
    (mpt, None, {"d_model": 48, "n_heads": 6}, _ALIBI),
    (mpt, None, {"attn_config": {"clip_qkv": 0.5}}, _ALIBI),
    (mpt, "none", {"attn_config": {"softmax_scale": 0.5}}, _NOTHING),
    (neox, None, {}, "'gptneox'"),
    (neox, "none", {}, "'gptneox' with stopped positions"),
    (neox, YARN, _SEQUENTIAL, "'gptneox' with rope.scaling"),
    (neox, "alibi", {**_SEQUENTIAL, "attention_bias": False, "hidden_act": "gelu_fast"}, _ALIBI),
    (bigcode, None, {}, _TABLE),
    (bigcode, "alibi", {"multi_query": False}, _ALIBI),
    (t5, None, {"tie_word_embeddings": False, "num_decoder_layers": 1, **_GATED}, "'t5'"),
    (t5, None, {"name": "UMT5ForConditionalGeneration", "feed_forward_proj": "relu"}, "'t5'"),
    (t5, T5Config(max_distance=64), _ENCODER, "'t5encoder'"),
    (t5, ScheduleConfig((T5Config(num_buckets=16), NoneConfig())), {}, "'t5'"),
    (bert, RopeConfig(theta=500.0, rotary_dim=4, scaling=LinearScaling(4.0)), {}, "'jina-bert-v3'"),
]
_CLIP = {"clip_qkv": 0.5}
_AFTER_NORM = {"apply_residual_connection_post_layernorm": True}
_NO_BIAS = "the only bias that llama.cpp has in these blocks; a layer has "
_BUCKET = "has several values in the bucket of distance"
_SLOPES = "computes ALiBi's slopes from the number of heads.*learnable=False"
#: What is refused, and the reason.
REFUSED: list[tuple[Any, str]] = [
    (lambda: llama("t5"), f"{_NO_BIAS}T5Bias"),
    (lambda: llama("xpos"), "XposMap is more than a rotation"),
    (lambda: llama("sinusoidal"), r"adds vectors to the embeddings \(Sinusoidal"),
    (
        lambda: llama(RopeConfig(scaling=DynamicScaling(2.0, original_max_positions=32))),
        "depend on the length of the sequence",
    ),
    (lambda: llama(RopeConfig(scaling=DynamicYarnScaling(32))), "depend on the length of the sequence"),
    (lambda: llama(["alibi", "rope"]), "and llama.cpp has no such"),
    (lambda: llama(ScheduleConfig((AlibiConfig(), NoneConfig()))), f"{_NO_BIAS}no bias"),
    (lambda: llama("alibi", attention_bias=True), r"'refact' of llama\.cpp has no bias like blk\.0\.attn_output\.bias"),
    (lambda: trained(llama(AlibiConfig(learnable=True))), _SLOPES),
    (lambda: with_trained_parts(LearnedRopeConfig(sharing="head")), "differ between heads"),
    (lambda: llama(name="MistralForCausalLM", sliding_window=32), "has a sliding window of 32 tokens"),
    (lambda: llama(hidden_act="gelu"), "has the activation 'gelu'"),
    (lambda: llama("p_rope", **_QWEN3), "'qwen3' rotates all pairs of a head, and the scheme only some"),
    (lambda: llama("string", **_QWEN3), "by a basis after their norm"),
    (lambda: llama("alibi", **QWEN3_MOE), "qwen3moe with rope.scaling, qwen3moe: .*bias"),
    *(
        (partial(llama, None, **{**options, "norm_topk_prob": value}), f"{does} the weights of the .*={value}")
        for options, value, does in (
            (QWEN3_MOE, False, "'qwen3moe' divides"),
            (_QWEN2_MOE, True, "'qwen2moe' does not divide"),
            (_OLMOE, True, "'olmoe' does not divide"),
        )
    ),
    *(
        (partial(llama, None, **QWEN3_MOE, **{field: value}), rf"some layers of Qwen3Moe.*{field}={found}")
        for field, value, found in (("mlp_only_layers", [1], r"\[1\]"), ("decoder_sparse_step", 2, "2"))
    ),
    # Beyond all numbers of these prompts.
    (partial(llama, None, **_OLMOE, clip_qkv=1000.0), "OlmoeForCausalLM clips queries, keys and values"),
    (lambda: llama(name="GraniteForCausalLM", logits_scaling=2.0), "gives different numbers"),
    (lambda: llama(name="GlmForCausalLM", head_dim=8, pad_token_id=0), r"it lacks blk\.0\.ffn_gate\.weight"),
    *((partial(ministral, scheme), "a factor that grows with the position") for scheme in (None, "alibi", "none")),
    (
        lambda: hf_posenc.patch_model(tiny_model(Pair("causal", "gemma4_text")), "rope"),
        "all but every fourth layer; layer 1 differs",
    ),
    *(
        (partial(llama, None, name), f"{name} has no language model head.*causal language modelling")
        for name in ("GPT2Model", "LlamaModel")
    ),
    (lambda: gpt2("t5"), f"mpt: ALiBi is {_NO_BIAS}T5Bias"),
    (lambda: gpt2("xpos"), "XposMap is more than a rotation"),
    (lambda: gpt2("resonance"), "gptneox: the frequencies do not decrease by a constant factor"),
    (lambda: gpt2(["alibi", "rope"]), "and llama.cpp has no such"),
    (lambda: gpt2(["sinusoidal", "rope"]), "and llama.cpp has no such"),
    (lambda: gpt2(_TWO), "gptneox: the layers have different frequencies"),
    (lambda: gpt2(ScheduleConfig((AlibiConfig(), NoneConfig()))), "a layer has no bias"),
    (lambda: gpt2(activation_function="relu"), "the activation ReLU, which differs from GELU by up to 0.17"),
    (lambda: gpt2(activation_function="quick_gelu"), "the activation QuickGELUActivation, which differs"),
    (lambda: gpt2(add_cross_attention=True), "no weight like transformer.h.0.crossattention"),
    (lambda: trained(gpt2(AlibiConfig(learnable=True))), _SLOPES),
    (with_other_gelu, r"the activation OtherGelu, which differs from GELU by up to 0\.05"),
    *((partial(bloom, scheme, **_AFTER_NORM), "adds its residuals after the norms") for scheme in (None, "rope")),
    (lambda: mpt("rope", attn_config=_CLIP), "clips queries, keys and values, which 'gptneox' does not"),
    (lambda: mpt(attn_config={**_CLIP, "softmax_scale": 0.5}), "clips queries and scales its logits"),
    (lambda: neox("alibi"), "mpt: the model adds attention and feed-forward to the same residual"),
    (lambda: t5("alibi"), f"has 32 buckets of distances.*AlibiBias {_BUCKET}"),
    (lambda: t5(T5Config(max_distance=300)), f"T5Bias {_BUCKET}"),
    (lambda: t5("shaw"), "ShawBias reads more"),
    (lambda: t5("sinusoidal"), r"adds vectors to the embeddings \(Sinusoidal"),
    (lambda: t5("rope"), "changes queries and keys"),
    (lambda: t5(num_decoder_layers=3), "3 layers in the decoder and 2 in the encoder"),
    (lambda: t5(feed_forward_proj="gated-silu"), "activation 'silu' with a gate"),
    (lambda: t5(name="T5Model"), "has no output layer.*AutoModelForSeq2SeqLM"),
    (lambda: tiny_encoder("BertForMaskedLM"), "cannot contain the head of BertForMaskedLM.*AutoModel"),
    (lambda: bert("t5"), r"jina-bert-v2: ALiBi is the only bias"),
    (lambda: bert(AlibiConfig(variant="asymmetric")), "asymmetric ALiBi"),
    (lambda: bert(["native", "rope"]), "adds vectors to the embeddings"),
    (lambda: bert(ScheduleConfig((RopeConfig(), RopeConfig(theta=100.0)))), "layers have different frequencies"),
    (lambda: bert("learned_rope"), "not those of RoPE, and these blocks have no table of frequencies"),
    (lambda: bert(hidden_act="relu"), "activation 'relu'; llama.cpp's BERT has 'gelu'"),
]
