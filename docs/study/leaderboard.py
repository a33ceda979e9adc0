"""The leaderboard: every scheme that the reference study has trained, with everything that it measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from docs.study.rates import above_rope_at_better_rates
from docs.study.significance import Interval
from docs.study.swaps import above_control
from docs.study.table_numbers import (
    LENGTHS,
    SCALINGS,
    Run,
    Runs,
    finished,
    markdown,
    mean_of,
    mean_paired,
    processors,
    ranged,
    seeds_of,
    share_of_answers,
    shown,
    tail,
    tail_by_seed,
)

#: Trainings of RoPE beside those of the main study: on another processor, and with half of the rate there.
_OTHER_ROPE = ("reference_control", "reference_half_rate")


def leaderboard_of(study: str, *columns: str) -> Callable[[Runs], str]:
    """Some columns of the table of all schemes of a study, from the lowest loss at the trained length."""
    return partial(_table, study=study, head=("scheme", *columns))


def _table(runs: Runs, study: str, head: tuple[str, ...]) -> str:
    trained = {scheme: seeds for scheme, seeds in finished(runs, study).items() if scheme not in SCALINGS}
    none, healed, rows = finished(runs, "reference").get("none", {}), finished(runs, "reference_heal"), []
    better = above_rope_at_better_rates(runs) if study == "reference" else {}
    plain = next(iter(none.values()))["parameters"] if none else None
    for scheme, seeds in sorted(trained.items(), key=lambda item: tail(item[1], LENGTHS[0]).value):
        first = next(iter(seeds.values()))
        row = {
            "scheme": f"`{scheme}`",
            "trained length": shown(tail(seeds, LENGTHS[0])),
            # Without a second rate, at the rate that RoPE has in the main study too.
            "minus RoPE": better.get(scheme) or ("" if scheme == "rope" else ranged(_above_rope(runs, study, seeds))),
            "4 times": shown(tail(seeds, LENGTHS[2])),
            "8 times": shown(tail(seeds, LENGTHS[3])),
            "copy": _answers(runs, scheme, "copy", 20),
            "retrieval": _answers(runs, scheme, "passkey", 40),
            "healed": ranged(above_control(healed, scheme)),
            "cache": f"{cached_numbers(first['config']):,}",
            "time": _relative_time(runs, seeds),
            "parameters": "" if plain is None else f"{first['parameters'] - plain:+,}",
            "seeds": seeds_of(runs, study, scheme),
        }
        rows.append(tuple(row[name] for name in head))
    return markdown(head, rows)


def _relative_time(runs: Runs, seeds: Mapping[int, Run]) -> str:
    """The processor time of a training relative to one without positions on the same processor; empty without one."""
    here = processors(seeds)
    none = [
        run["cpu_seconds"]
        for study in ("reference", "reference_control")
        for run in finished(runs, study).get("none", {}).values()
        if {run.get("processor")} == here
    ]
    return f"{np.mean([run['cpu_seconds'] for run in seeds.values()]) / np.mean(none):.2f}" if none else ""


def _above_rope(runs: Runs, study: str, seeds: Mapping[int, Run]) -> Interval:
    """The mean difference from RoPE at the trained length, over the seeds that both have.

    In the main study, RoPE has the rate that was chosen with the others. The catalogue chose its rates elsewhere, so
    its RoPE is the one on the same processor with the better of the rates that were run there.
    """
    trained = [finished(runs, name).get("rope", {}) for name in ("reference", *_OTHER_ROPE)]
    if study == "reference":
        trained = trained[:1]
    differences = [
        mean_paired(*(tail_by_seed(by_seed, LENGTHS[0]) for by_seed in (seeds, rope)))
        for rope in trained
        if processors(rope) == processors(seeds)
    ]
    return max(differences, key=lambda difference: difference.value, default=mean_of(()))


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
