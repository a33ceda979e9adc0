"""Model cards of exports: what carries the scheme, how to run it, and the measured differences."""

from __future__ import annotations

from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from hf_posenc.checkpoint.cards import card_data, hub_name, scheme_names, scheme_section, versions_section
from hf_posenc.export.records import ExportReport, checks_table
from hf_posenc.export.targets import find_target
from hf_posenc.patching.place.encoding import current_encoding


def export_card(model: PreTrainedModel, report: ExportReport, usage: str, repository: str | None) -> ModelCard:
    """Creates the card of an export.

    Args:
        model: the exported model.
        report: what was written.
        usage: Markdown with the code that runs it; `{folder}` stands for its folder or hub id.
        repository: hub id, if it is uploaded.
    """
    folder, class_name, encoding = report.folder.resolve().name, type(model).__name__, current_encoding(model)
    name, base = repository or folder, hub_name(model)
    data = card_data(
        name, class_name, "stock" if encoding is None else scheme_names(encoding.config), tags=[report.target],
        library_name="transformers" if report.target == "stock" else report.target,
        base_model=None if base == repository else base,
    )  # fmt: skip
    scheme = (
        f"The position encoding of a stock `{class_name}`."
        if encoding is None
        else scheme_section(encoding.config.to_dict(), class_name)
    )
    sections = [
        f"# {name}",
        f"A `{class_name}` with the position encoding `{report.scheme}`, exported for "
        f"{find_target(report.target).program}. It runs without the package `hf_posenc`.",
        f"## How to run it\n\n{_how_to_run(usage, report, repository)}",
        f"## Position encoding\n\n{scheme}\n\nThe export expresses it through {report.carrier}.",
        f"## Measured difference\n\nThe export was run on the same tokens as the original model:\n\n```\n"
        f"{checks_table(report.checks)}\n```",
        f"### Framework versions\n\n{versions_section()}",
    ]
    body = "\n\n".join(section.strip() for section in sections)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n", ignore_metadata_errors=False)


def _how_to_run(usage: str, report: ExportReport, repository: str | None) -> str:
    """The usage, with a name for `{folder}`. Only transformers takes the name of a repository as a folder."""
    if repository is None:
        return usage.replace("{folder}", report.folder.resolve().name)
    if report.target == "stock":
        return usage.replace("{folder}", repository)
    local = repository.rpartition("/")[2]
    download = f"```bash\nhf download {repository} --local-dir {local}\n```"
    return f"{download}\n\n{usage.replace('{folder}', local)}"
