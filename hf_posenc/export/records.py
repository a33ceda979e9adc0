"""The record of an export: its carrier, and the differences that were measured in the program that runs it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_posenc.report.tables import format_table

#: Name of the file that describes an export: the fields of its `ExportReport`.
MANIFEST = "export.json"
_SERVERS = ("llama-server ", "vllm serve ", "transformers serve ", "text-embeddings-router ")


@dataclass(frozen=True)
class Check:
    """A comparison of the exported model with the model it was made from, on the same tokens.

    Args:
        runtime: program that ran the export, with its version: "onnxruntime 1.32.0".
        mode: what ran: "prefill" (a whole sequence at once), "decode" (token by token with a cache), "embedding", or
            "weights" (the stored tensors were read again, and nothing ran).
        quantity: what was compared: "logits", "probabilities", "hidden states", "weights". With llama.cpp, the end
            " with llama.cpp's GELU" says that the model computed GELU in the same way.
        difference: largest absolute difference, relative to the largest value where that exceeds 1.
        allowed: largest accepted difference; `None` if any difference is accepted.
        place: which tokens were compared, in a few words.
    """

    runtime: str
    mode: str
    quantity: str
    difference: float
    allowed: float | None
    place: str = ""

    @property
    def equal(self) -> bool:
        """Whether the difference is accepted."""
        return self.allowed is None or self.difference <= self.allowed

    @property
    def size(self) -> tuple[bool, float]:
        """A sort key in which NaN counts as the largest difference."""
        return self.difference != self.difference, self.difference


@dataclass(frozen=True)
class ExportReport:
    """What `export_model` wrote, and how it was checked. Prints as a table.

    Args:
        folder: where the files are.
        target: name of the target.
        scheme: label of the scheme.
        carrier: what carries the scheme in the target.
        checks: measured differences.
        files: names of the files of the export, relative to `folder`.
        serving: shell commands that start a server with it; `{folder}` stands for its folder or hub id.
    """

    folder: Path
    target: str
    scheme: str
    carrier: str
    checks: tuple[Check, ...]
    files: tuple[str, ...]
    serving: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the folder and the places of the checks, as JSON values."""
        fields = asdict(self)
        del fields["folder"]
        for check in fields["checks"]:
            del check["place"]
        return fields

    def __str__(self) -> str:
        head = f"{self.scheme} for {self.target}: {self.carrier}, in {self.folder}"
        commands = [command.replace("{folder}", shlex.quote(str(self.folder))) for command in self.serving]
        return "\n\n".join((f"{head}\n\n{checks_table(self.checks)}", *(f"Serve it: {line}" for line in commands)))


def serving_commands(usage: str) -> tuple[str, ...]:
    """The lines of a usage that start a server."""
    return tuple(line for line in usage.splitlines() if line.startswith(_SERVERS))


def files_in(manifest: Path) -> set[str]:
    """The names of files in the manifest of an export; empty if it is missing or was edited into something else."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return set()
    names = content.get("files") if isinstance(content, dict) else None
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def checks_table(checks: tuple[Check, ...]) -> str:
    """The measured differences as a table."""
    rows = [
        [
            check.runtime,
            check.mode,
            check.quantity,
            f"{check.difference:.2g}",
            "any" if check.allowed is None else f"{check.allowed:g}",
        ]
        for check in checks
    ]
    return format_table(["runtime", "mode", "compared", "difference", "allowed"], rows)
