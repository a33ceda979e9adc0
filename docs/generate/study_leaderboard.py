"""The leaderboard: every scheme that the reference study has trained, with everything that it measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from docs.generate.study_numbers import (
    LENGTHS,
    NOT_RUN,
    SCALINGS,
    Run,
    Runs,
    finished,
    markdown,
    mean_paired,
    ranged,
    seeds_of,
    share_of_answers,
    shown,
    tail,
    tail_by_seed,
)
from docs.generate.study_swaps import above_control


def leaderboard(runs: Runs) -> str:
    """Every scheme with several seeds, from the lowest loss at the trained length."""
    return _table(runs, "reference")


def one_seed_leaderboard(runs: Runs) -> str:
    """Every scheme of the catalogue."""
    return _table(runs, "reference_catalogue")


def _table(runs: Runs, study: str) -> str:
    found = {scheme: seeds for scheme, seeds in finished(runs, study).items() if scheme not in SCALINGS}
    if not found:
        return NOT_RUN
    main_study, healed, rows = finished(runs, "reference"), finished(runs, "reference_heal"), []
    none, rope = (main_study.get(scheme, {}) for scheme in ("none", "rope"))
    plain = next(iter(none.values()))["parameters"] if none else None
    for scheme, seeds in sorted(found.items(), key=lambda item: tail(item[1], LENGTHS[0]).value):
        first = next(iter(seeds.values()))
        rows.append(
            (
                f"`{scheme}`",
                shown(tail(seeds, LENGTHS[0])),
                "" if scheme == "rope" else _above_rope(seeds, rope),
                *(shown(tail(seeds, length)) for length in LENGTHS[2:]),
                *(_answers(runs, scheme, task, at) for task, at in (("copy", 20), ("passkey", 40))),
                ranged(above_control(healed, scheme)),
                f"{cached_numbers(first['config']):,}",
                _relative_time(runs, seeds),
                "" if plain is None else f"{first['parameters'] - plain:+,}",
                seeds_of(runs, study, scheme),
            )
        )
    head = (
        *("scheme", "trained length", "above RoPE", "4 times", "8 times", "copy", "retrieval", "healed", "cache"),
        *("time", "parameters", "seeds"),
    )
    return markdown(head, rows)


def _relative_time(runs: Runs, seeds: Mapping[int, Run]) -> str:
    """The processor time of a training relative to one without positions on the same processor; empty without one."""
    here = {run["processor"] for run in seeds.values()}
    none = [
        run["cpu_seconds"]
        for study in ("reference", "reference_control")
        for run in finished(runs, study).get("none", {}).values()
        if {run["processor"]} == here
    ]
    return f"{np.mean([run['cpu_seconds'] for run in seeds.values()]) / np.mean(none):.2f}" if none else ""


def _above_rope(seeds: Mapping[int, Run], rope: Mapping[int, Run]) -> str:
    """The mean difference from RoPE at the trained length over the seeds that both have."""
    return ranged(mean_paired(*(tail_by_seed(one, LENGTHS[0]) for one in (seeds, rope))))


def cached_numbers(config: Mapping[str, Any]) -> int:
    """The numbers that a layer of the study's model caches for a token with a scheme: keys, values, and what is added.

    Args:
        config: of the scheme.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_posenc import patch_model

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8, max_position_embeddings=1024)).eval()
    if config:
        patch_model(model, dict(config))
    with torch.no_grad():
        cache = model(torch.zeros(1, 8, dtype=torch.int64), use_cache=True).past_key_values
    layers = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    return round(sum(layers) / len(layers) / 8)


def _answers(runs: Runs, scheme: str, task: str, length: int) -> str:
    seeds = finished(runs, "reference_tasks", task).get(scheme)
    return share_of_answers(seeds.values(), length) if seeds else ""
