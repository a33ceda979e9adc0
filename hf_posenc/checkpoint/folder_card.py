"""The section about the scheme in the README.md of a folder with a patched model, and its tags.

Every save replaces the section and leaves the text around it as it is. The comment at its beginning lists the tags that
came with it, so a save of a stock model can remove both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from hf_posenc.checkpoint.cards import MARKED, card_tags, is_adapter, marked_section, model_card
from hf_posenc.checkpoint.position_files import replace_file
from hf_posenc.patching.place.encoding import encodings

NAME = "README.md"
#: A sentence in the cards that transformers uploads with every model that has none.
_OF_TRANSFORMERS = "This model card has been automatically generated"
_METADATA = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_TAGS = re.compile(r"^tags[ \t]*:.*\n(?:(?:[ \t]+\S|-).*\n)*", re.MULTILINE)


def has_section(folder: Path) -> bool:
    """Whether the card of a folder describes a scheme."""
    return MARKED.search(_read(folder / NAME) or "") is not None


def is_of_transformers(text: str) -> bool:
    """Whether a card is the one that transformers uploads with a model that has none."""
    return _OF_TRANSFORMERS in text


def write_card(model: Any, folder: Path, source: Path | None = None, name: str | None = None) -> None:
    """Writes the section into the card of a folder, or removes it if the model has no scheme. The file is replaced.

    Args:
        model: a model, also one of PEFT or sentence-transformers around a model of transformers.
        folder: where the card is written.
        source: where the earlier card is; by default the same folder.
        name: hub id or folder that the card names; by default that of `source`.
    """
    source = folder if source is None else source
    if (source / NAME).is_dir():
        return
    before = _read(source / NAME)
    text = _card(model, before, name or source.resolve().name)
    if text is not None and (text != before or folder != source):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / NAME, text.encode(errors="surrogateescape"))


def _card(model: Any, before: str | None, name: str) -> str | None:
    """The new card; `None` if there is nothing to write."""
    found = MARKED.search(before or "")
    inner = next((one for one in model.modules() if isinstance(one, PreTrainedModel) and encodings(one)), None)
    if inner is None:
        return before if found is None else _tagged(_replaced(before or "", ""), remove=_tags_of(found))
    tags = [*card_tags(inner), *(inner.model_tags or [])]
    whole = isinstance(model, PreTrainedModel) and not is_adapter(model, inner)
    if whole and (before is None or is_of_transformers(before)):
        earlier = [] if before is None else ModelCard(before, ignore_metadata_errors=True).data.get("tags") or []
        return _tagged(str(model_card(model, model_id=name)), add=[*earlier, *tags])
    section = marked_section(model, inner, name)
    text = f"{(before or '').rstrip()}\n\n{section}\n" if found is None else _replaced(before or "", section)
    return _tagged(text, add=tags, remove=() if found is None else _tags_of(found))


def _read(path: Path) -> str | None:
    # Other encodings and line ends survive.
    return path.read_bytes().decode(errors="surrogateescape") if path.is_file() else None


def _replaced(text: str, section: str) -> str:
    """The text with the section in place of its first one, and without others, such as those of a pasted card."""
    start, *rest = MARKED.split(text)
    after = "".join(rest[1::2])
    if section:
        return f"{start}{section}{after}"
    return f"{start.rstrip()}\n\n{after.lstrip()}".rstrip("\n") + "\n"


def _tags_of(found: re.Match[str]) -> list[str]:
    return found["tags"].split(", ")


def _tagged(text: str, add: Iterable[str] = (), remove: Iterable[str] = ()) -> str:
    """Changes the tags in the metadata of a card, and nothing else in it.

    Metadata in which they cannot be replaced is left as it is, such as metadata that is not YAML.
    """
    found = _METADATA.match(text)
    metadata = found[1] if found else ""
    try:
        fields = yaml.safe_load(metadata) or {}
        tags = fields.get("tags") or []
        before = tags if isinstance(tags, list) else [tags]
        removed = set(remove) - set(add)
        after = list(dict.fromkeys([*(tag for tag in before if tag not in removed), *add]))
        if after == before:
            return text
        line = yaml.safe_dump({"tags": after}, allow_unicode=True, width=float("inf")) if after else ""
        old = _TAGS.search(metadata)
        start, end = old.span() if old else (len(metadata), len(metadata))
        metadata = f"{metadata[:start]}{line}{metadata[end:]}"
        fields = {name: value for name, value in fields.items() if name != "tags"} | ({"tags": after} if after else {})
        if yaml.safe_load(metadata) not in (fields, None):
            return text
    except (yaml.YAMLError, AttributeError, TypeError):
        return text
    if found:
        return f"{text[: found.start(1)]}{metadata}{text[found.end(1) :]}" if metadata else text[found.end() :].lstrip()
    return f"---\n{metadata}---\n\n{text.lstrip()}"
