"""The comparison as a table."""

from __future__ import annotations

from typing import Any

from training.loop import FINISHED

_TITLES = {"causal": "Causal language model (Llama)", "masked": "Masked language model (BERT)"}

#: Relative distances below this one are float32 rounding.
_ROUNDING = 1e-5

_DOG_NOTES = {
    "causal": "Dogs: distance between the two dogs of 'The dog chased another dog' (relative L2). The causal mask "
    "alone tells them apart, with or without positions; the probe, random attention without a mask over the model's "
    "embeddings, shows what the scheme adds.",
    "masked": "Dogs: distance between the two dogs of 'The dog chased another dog' (relative L2), in the model and in "
    "random attention over its embeddings (probe). Without positions there is none.",
}


def format_tables(results: dict[str, Any]) -> str:
    """One Markdown table per task, losses in nats per token, and what could not be trained, with its reason."""
    settings = results["settings"]
    length = settings["train_length"]
    parts = [
        f"Trained on {length} tokens, {settings['max_steps']} steps of {settings['batch_size']} sequences; evaluated "
        f"on the same {results['evaluation_tokens']} tokens at every length. Losses in nats per token. A "
        f"model that knows token frequencies only: {results['unigram_cross_entropy']:.3f}."
    ]
    parts += [_task_table(task, results) for task in settings["tasks"].split(",") if _of_task(results, task)]
    return "\n\n".join(parts) + "\n"


def _of_task(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return [training for training in results["trainings"] if training["task"] == task]


def _task_table(task: str, results: dict[str, Any]) -> str:
    trainings = _of_task(results, task)
    lengths = results["lengths"]
    first, last = lengths[0], lengths[-1]
    tail = results["tail_tokens"]
    headers = [
        "scheme",
        *(f"loss at {length}" for length in lengths),
        *(f"last {tail} at {length}" for length in (first, last)),
        "dogs, last layer",
        "dogs, probe",
        "parameters",
        "seconds",
    ]
    rows: list[list[str]] = []
    footnotes: list[str] = []
    for training in trainings:
        name = training["scheme"]
        if training["options"]:
            name += " (" + ", ".join(f"{key}={value}" for key, value in training["options"].items()) + ")"
        if training["status"] != FINISHED:
            footnotes.append(f"`{name}` {training['status']}: {training['reason']}")
            rows.append([name, training["status"], *[""] * (len(headers) - 2)])
            continue
        by_length, dog = training["by_length"], training["dog"]
        rows.append(
            [
                name,
                *map(_number, by_length["loss"]),
                _number(by_length["tail_loss"][0]),
                _number(by_length["tail_loss"][-1]),
                "-" if "error" in dog else _short(dog["layers"][-1]),
                "-" if "error" in dog else _short(dog["probe"]),
                f"{training['parameters']:,}",
                f"{training['seconds']:.0f}",
            ]
        )
        footnotes += [f"`{name}`: {note}" for note in training["notes"]]
        footnotes += [f"`{name}`, dog test: {dog['error']}"] if "error" in dog else []
    if any("dog" in training for training in trainings):
        footnotes.append(_DOG_NOTES[task])
    table = _markdown(headers, rows)
    return "\n\n".join([f"## {_TITLES[task]}", table, *(f"- {note}" for note in footnotes)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value < _ROUNDING else f"{value:.2g}"


def _markdown(headers: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    padded = [
        [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    padded[1] = [cell if column == 0 else cell[:-1] + ":" for column, cell in enumerate(padded[1])]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)
