"""What a study's tables, cards and report say in words."""

from __future__ import annotations

from collections.abc import Sequence

from training.study.results import Finished, Task, Unfinished

AnyRun = Finished | Unfinished


def task_title(name: str, task: Task) -> str:
    """Such as "causal: causal language modelling with LlamaForCausalLM"."""
    kind = {
        "language_modeling": f"{task.objective} language modelling",
        "generalization": "length generalisation",
        "embedding": "sentence embeddings",
    }[task.kind]
    return f"{name}: {kind} with {task.model}" + (f" ({task.pretrained})" if task.pretrained else "")


def task_text(task: Task) -> str:
    """How the models of a task were trained, and what its figures are."""
    budget = f"{task.max_steps:,} steps of {task.batch_size} sequences"
    if task.kind == "generalization":
        return (
            f"Trained on lengths {ranges(task.train_lengths)}, {budget}; tested on up to {task.samples} examples of "
            "every length, none of them trained on where the task has that many. An answer counts if every token of it "
            "is right (exact match)."
        )
    if task.kind == "embedding":
        return (
            f"Trained on {ranges(task.train_lengths)} tokens, {budget}, to give the hidden states from before the "
            "swap; longer text is that of pieces which the untouched model reads. Figures are cosines to its sentence "
            "embeddings."
        )
    text = (
        f"Trained on {task.train_length} tokens, {budget}; evaluated on the same held-out text at every length. Losses "
        "in nats per token."
    )
    if task.unigram_cross_entropy is None:
        return text
    return f"{text} A model that knows token frequencies only: {task.unigram_cross_entropy:.3f}."


def ranges(lengths: Sequence[int]) -> str:
    """`1 to 10` for consecutive whole numbers, else the numbers."""
    if len(lengths) > 2 and list(lengths) == list(range(lengths[0], lengths[-1] + 1)):
        return f"{lengths[0]} to {lengths[-1]}"
    return ", ".join(map(str, lengths))


def start_notes(label: str, first: AnyRun, finished: Sequence[Finished], task: Task) -> list[str]:
    """How a scheme's training differs from that of its task; nothing where it does not."""
    lines = []
    steps = finished[0].steps if finished else None
    if first.start is not None:
        more = ""
        if steps is not None:
            more = f", trained for {steps:,} steps more" if steps else ", read as it is, without further training"
        lines.append(f"`{label}` starts from the trained `{first.start}` of the same seed{more}.")
    elif steps is not None and steps != task.max_steps:
        lines.append(f"`{label}` was trained for {steps:,} steps.")
    for what, options in (("was trained", first.training), ("takes over", first.swap_options)):
        listed = ", ".join(f"{name}={value}" for name, value in options.items() if name != "max_steps")
        if listed:
            lines.append(f"`{label}` {what} with `{listed}`.")
    return lines


def unfinished_lines(runs: Sequence[AnyRun]) -> list[str]:
    """`seed 0 unsupported: reason`; seeds with the same reason share a line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        if not isinstance(run, Finished):
            groups.setdefault((run.status, run.reason), []).append(run.seed)
    return [
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))} {status}: {reason}"
        for (status, reason), seeds in groups.items()
    ]


def fit_note(finished: Sequence[Finished]) -> list[str]:
    """What the swap of the first seed took over from the old scheme."""
    swap = finished[0].swap if finished else None
    if swap is None or not (swap["fits"] or swap["options"]):
        return []
    parts = [f"{option}={value} kept from the old scheme" for option, value in swap["options"].items()]
    residuals = [fit["residual"] for fit in swap["fits"] if fit["residual"] is not None]
    if swap["fits"]:
        text = f"{len(swap['fits'])} part(s) fitted to {swap['fits'][0]['target']}"
        if residuals:
            low, high = min(residuals), max(residuals)
            text += f", missing {low:.0%}" + ("" if low == high else f" to {high:.0%}") + " of its root mean square"
        parts.append(text)
    return ["; ".join(parts) + "."]
