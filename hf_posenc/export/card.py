"""Model cards of exports: what carries the scheme, how to run it, and the measured differences."""

from __future__ import annotations

from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from hf_posenc.checkpoint.cards import card_data, scheme_section, versions_section
from hf_posenc.export.records import ExportReport, checks_table
from hf_posenc.patching.place.in_force import current_encoding

_LIBRARIES = {"stock": "transformers", "gguf": "gguf", "onnx": "onnx", "executorch": "executorch"}


def export_card(model: PreTrainedModel, report: ExportReport, usage: str, repository: str | None) -> ModelCard:
    """Creates the card of an export.

    Args:
        model: the exported model.
        report: what was written.
        usage: Markdown with the code that runs it; `{folder}` stands for its folder or hub id.
        repository: hub id, if it is uploaded.
    """
    name, class_name, encoding = repository or report.folder.name, type(model).__name__, current_encoding(model)
    data = card_data(
        name, class_name, report.scheme.partition("(")[0], tags=[report.target],
        library_name=_LIBRARIES[report.target],
    )  # fmt: skip
    scheme = (
        f"The position encoding of a stock `{class_name}`."
        if encoding is None
        else scheme_section(encoding.config.to_dict(), class_name)
    )
    sections = [
        f"# {name}",
        f"A `{class_name}` with the position encoding `{report.scheme}`, written for {report.target}. It runs without "
        f"the package `hf_posenc`.",
        f"## How to run it\n\n{usage.replace('{folder}', repository or report.folder.name)}",
        f"## Position encoding\n\n{scheme}\n\nHere it is carried by {report.carrier}.",
        f"## Measured difference\n\nThe export was run on the same tokens as the original model:\n\n```\n"
        f"{checks_table(report.checks)}\n```",
        f"### Framework versions\n\n{versions_section()}",
    ]
    body = "\n\n".join(section.strip() for section in sections)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n", ignore_metadata_errors=False)
