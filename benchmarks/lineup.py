"""Who is measured at each level: the bare model, the stock one, and one patched copy for each scheme."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from benchmarks.bare import AddsNothing, NoPhases, reduce_to_attention, shared_copy, without_rotation
from benchmarks.machine import DTYPES
from benchmarks.peers import peer_subjects
from benchmarks.subjects import AttentionCall, LanguageModel, Setting, Subject
from hf_posenc import BuildContext, DistanceBias, PositionEncodingError, SchemeConfig, patch_model
from hf_posenc.schemes import as_scheme

#: One attention call; a small Llama; a small BERT.
LEVELS = ("attention", "model", "encoder")
#: A Llama of the shape of SmolLM2-135M; measured where it is asked for.
SMOLLM2_LEVEL = "smollm2"
#: Levels of models with a cache.
DECODERS = ("model", SMOLLM2_LEVEL)
BARE, CONTROL, STOCK = "bare", "bare again", "stock"
REFERENCES = (BARE, CONTROL, STOCK)

#: What most encoders are given, and what is measured in one unless schemes are named.
ENCODER_SCHEMES = ("none", "learned", "sinusoidal", "rope", "alibi", "t5", "kerple", "sandwich", "shaw")

#: What may stand behind the `@` of a scheme.
BACK_ENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")

#: What is measured at `SMOLLM2_LEVEL` unless schemes are named: one of each kind of price.
SMOLLM2_SCHEMES = ("none", "rope", "alibi", "t5", "forget_gate", "self_extend")


@dataclass
class Lineup:
    """The subjects of one level, and why others are missing from it, by name."""

    subjects: list[Subject] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def build_lineup(level: str, schemes: Sequence[str], peers: Sequence[str], length: int, setting: Setting) -> Lineup:
    """All subjects of a level that serve up to `length` tokens. Models share their weights.

    Args:
        level: one of `LEVELS`, or `SMOLLM2_LEVEL`.
        schemes: names of schemes and of `REFERENCES`; `alibi@flex_attention` is a scheme with a back-end of its own,
            and `alibi+forget_gate` two that act together.
        peers: groups of peers, at the level of attention.
        length: tokens of the longest call.
        setting: of the run.
    """
    torch.manual_seed(setting.seed)
    setting = setting.at(level)
    lineup = Lineup()
    base = _base_model(level, length, setting)
    for name in schemes:
        model = shared_copy(base)
        try:
            family = _place(name, model, level)
        except PositionEncodingError as error:
            lineup.left_out[name] = f"refused: {error}"
            continue
        bare = name in (BARE, CONTROL)
        around = without_rotation if bare and level != "encoder" else nullcontext
        make = _attention_call if level == "attention" else _language_model
        lineup.subjects.append(make(name, family, model, setting, around))
    if level == "attention":
        found, missing = peer_subjects(peers, setting)
        lineup.subjects += found
        lineup.left_out |= missing
    return lineup


def scheme_family(config: SchemeConfig) -> str:
    """What kind of scheme it is, by the parts it builds."""
    if ".position_maps." in type(config).__module__:
        return "position map"
    parts = config.build(BuildContext(hidden_size=512, num_heads=8, head_dim=64, max_positions=512))
    if parts.logit_bias is not None:
        return "distance bias" if isinstance(parts.logit_bias, DistanceBias) else "content bias"
    if parts.query_key_map is not None:
        return "rotation"
    if parts.additive is not None:
        return "additive"
    return "temperature" if parts.logit_scale is not None else "none"


def _base_model(level: str, length: int, setting: Setting) -> Any:
    sizes = setting.sizes
    common: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": 1 if level == "attention" else sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "intermediate_size": sizes.intermediate_size,
        "vocab_size": sizes.vocab_size,
        # A cache of `length` tokens and the token behind it.
        "max_position_embeddings": length + 1,
        "attn_implementation": "sdpa",
        "pad_token_id": None,
    }
    if level == "encoder":
        del common["num_key_value_heads"]
        # The random numbers of dropout would be most of the noise, and say nothing about positions.
        model = BertForMaskedLM(BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common, bos_token_id=None, eos_token_id=None))
    return model.to(setting.device, DTYPES[setting.dtype])


def _place(name: str, model: Any, level: str) -> str:
    """Gives a model its positions, or takes away those it has. In place; returns the family of the subject."""
    name, _, back_end = name.partition("@")
    if back_end:
        model.set_attn_implementation(back_end)
    if name == STOCK:
        return STOCK
    if name not in (BARE, CONTROL):
        together = name.split("+")
        config = as_scheme(together if len(together) > 1 else name)
        with warnings.catch_warnings():
            # They speak of trained weights and of generate(); here are neither.
            warnings.simplefilter("ignore", UserWarning)
            patch_model(model, config)
        return back_end or scheme_family(config)
    if level == "encoder":
        model.bert.embeddings.position_embeddings = AddsNothing()
    else:
        model.model.rotary_emb = NoPhases()
    return BARE


def _language_model(name: str, family: str, model: Any, setting: Setting, around: Any) -> Subject:
    return LanguageModel(name, family, model, setting, BARE, around)


def _attention_call(name: str, family: str, model: Any, setting: Setting, around: Any) -> Subject:
    stack = model.model
    reduce_to_attention(stack)

    def build(length: int) -> Any:
        def attend(states: Tensor) -> Tensor:
            return stack(inputs_embeds=states, use_cache=False).last_hidden_state

        return attend

    return AttentionCall(name, family, BARE, build, setting, (stack,), around)
