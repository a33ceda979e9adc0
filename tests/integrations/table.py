"""All rows of docs/reference/tools.md."""

from __future__ import annotations

from tests.integrations import adapting, generating, loading, serving, training
from tests.integrations.tool import Tool

TOOLS: list[Tool] = [tool for module in (training, generating, loading, adapting, serving) for tool in module.TOOLS]
#: Rows that compile, or start a server, for each scheme: they take minutes together.
SLOW = frozenset({
    "torch.compile (aot_eager, full graph)",
    "torch.compile, static decoding",
    "flex_attention",
    "torch.export (BERT)",
    "torch.export, dynamic length (BERT)",
    "transformers serve, completions",
    "Trainer, stopped and resumed",
})  # fmt: skip
