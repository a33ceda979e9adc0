"""What a smoke run is, and what it leaves out, in the words of its table."""

from __future__ import annotations

from typing import Any

#: By part.
_LEFT_OUT = {
    "correctness": "in correctness most schemes, float16 and the repository's own tests",
    "price": "in price the shape of SmolLM2-135M and inputs of 1,024 tokens and more, which the targets are about",
    "study": "in the study everything but a few steps of tiny models",
}
_NO_COMPILER = (
    "on a CPU the code that torch.compile generates (models are traced, FlexAttention runs as plain operations)"
)


def smoke_line(content: dict[str, Any]) -> str:
    """One line for the table of a smoke run, empty for any other.

    Args:
        content: of `results.json`.
    """
    parts = {name: part for name, part in content["parts"].items() if part["settings"].get("smoke")}
    if not parts:
        return ""
    left_out = [_LEFT_OUT[name] for name in parts]
    if any(part["settings"]["device"] == "cpu" for part in parts.values()):
        left_out.append(_NO_COMPILER)
    return (
        "**A smoke run: it shows that every part runs, with tiny models and short inputs, and its figures mean "
        f"nothing.** Left out to save time: {'; '.join(left_out)}."
    )
