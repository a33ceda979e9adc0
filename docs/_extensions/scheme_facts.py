"""What is found out about a scheme by building it and trying its parts."""

from __future__ import annotations

import dataclasses
import math

import torch

from hf_posenc.plots.schemes import Subject
from hf_posenc.plots.schemes.subject import standard_places, visible
from hf_posenc.schemes import BuildContext, PairwiseBias, Positions, SchemeConfig
from hf_posenc.schemes.arrangement.schedule import LayeredConfig
from hf_posenc.schemes.logits import attention_pairs, pairwise_bias
from hf_posenc.schemes.rotary.contextual import ContextualRotation

#: Where learned parameters are counted: the sizes of BERT-base and GPT-2 small.
COUNTED_LAYERS = 12
COUNTED_PLACE = BuildContext(hidden_size=768, num_heads=12, head_dim=64, max_positions=512, num_key_value_heads=12)
ACTS_ON = {
    "additive": "the token embeddings",
    "query_key_map": "queries and keys",
    "logit_bias": "the attention logits",
    "logit_scale": "the temperature of the attention logits",
}


def facts(subject: Subject) -> list[str]:
    """Sentences on what a scheme acts on, learns, supports and reads."""
    config, parts = subject.config, subject.parts
    if isinstance(config, LayeredConfig):
        return ["Acts on what the schemes of its layers act on, and adds no parameters."]
    acts_on = [words for part, words in ACTS_ON.items() if getattr(parts, part) is not None]
    if isinstance(parts.logit_bias, ContextualRotation):
        # Its part is a bias, which says how the logits change.
        acts_on = ["queries and keys"]
    found = [f"Acts on: {', '.join(acts_on) or 'nothing'}.", f"Learned parameters: {_parameters(config)}."]
    if undecayed := _undecayed(subject):
        found.append(f"Trained without weight decay, with `hf_posenc.recipes.parameter_groups`: {undecayed}.")
    try:
        config.build(dataclasses.replace(subject.context, causal=False))
        found.append("For causal and bidirectional models.")
    except ValueError as refusal:
        found.append(f"For causal models only: {refusal}")
    if any(part.length_dependent for part in parts):
        found.append("The encoding of a token depends on the length of the sequence, so a cache cannot be extended.")
    if isinstance(parts.logit_bias, PairwiseBias):
        found.append(f"The bias depends on {_bias_inputs(subject)}.")
    elif parts.logit_bias is not None:
        found.append("The bias depends on distance only, and is computed once per distance.")
    return found


def _parameters(config: SchemeConfig) -> str:
    for place in standard_places(COUNTED_PLACE):
        try:
            parts = config.build(place)
            break
        except ValueError:
            continue
    shapes = {name: tuple(one.shape) for part in parts for name, one in part.named_parameters()}
    copies = COUNTED_LAYERS if config.per_layer else 1
    counts = [one.numel() * (1 if part is parts.additive else copies) for part in parts for one in part.parameters()]
    if not shapes:
        return "none"
    described = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
    owner = "in each of 12 layers" if copies > 1 else "shared by all layers"
    return (
        f"{sum(counts):,} ({described}, {owner}; hidden size {place.hidden_size}, {place.num_heads} heads of "
        f"{place.head_dim} dimensions, {place.max_positions} positions)"
    )


def _undecayed(subject: Subject) -> str:
    modules = [module for part in subject.parts for module in part.modules()]
    owned = {(name, module) for module in modules for name, _ in module.named_parameters(recurse=False)}
    return ", ".join(sorted({f"`{name}`" for name, module in owned if name in getattr(module, "no_weight_decay", ())}))


def _bias_inputs(subject: Subject) -> str:
    """Names the inputs that change the bias, by replacing one at a time."""
    length, bias = 24, subject.parts.logit_bias
    assert bias is not None
    usual, others = (subject.random_heads(length, seed=seed) for seed in (1, 2))

    def biases(ids: torch.Tensor, replaced: int | None = None) -> torch.Tensor:
        positions = Positions(ids.unsqueeze(0), ids[-1:].unsqueeze(0) + 1, token_ids=ids.unsqueeze(0) % 16)
        given = [(others if index == replaced else usual)[index] for index in range(3)]
        pairs = attention_pairs(subject.parts, *given[:2], positions, given[2])
        return pairwise_bias(bias, pairs)[..., visible(subject, length)]

    found = dict.fromkeys(("positions", "queries", "keys", "hidden states"), False)
    # Near and far positions: a bias may act on one of them only. A table may end before the far ones.
    limit = bias.length_reach.length or math.inf
    for step in (step for step in (1, 20, 200) if (length + 1) * step <= limit):
        ids = torch.arange(length) * step
        shifted = biases(ids + (torch.arange(length) >= length // 2) * step)
        for name, one in zip(found, [shifted, *(biases(ids, index) for index in range(3))], strict=True):
            found[name] |= not torch.allclose(biases(ids), one, rtol=1e-3, atol=1e-3)
    names = [name for name in found if found[name]] + ([] if found["positions"] else ["the order of the tokens"])
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
