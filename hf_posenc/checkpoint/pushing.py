"""Uploads of patched models: their cards, and what to do if the upload fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from hf_posenc.checkpoint.cards import model_card
from hf_posenc.patching.place.encoding import current_encoding

#: A comment in cards that are replaced by the next upload.
AUTOMATIC = "<!-- Written by hf_posenc, and again by every push of the model. Remove this line to edit the card. -->"
#: A sentence in the cards that transformers writes for every model.
_OF_TRANSFORMERS = "This model card has been automatically generated"


def write_card(model: Any, working_dir: Any, repo_id: str) -> None:
    """Gives a patched model a card that describes its scheme, in the folder that will be uploaded.

    A card that was written by hand is kept, and tagged with the scheme.
    """
    if current_encoding(model) is not None and not getattr(model, "_hf_peft_config_loaded", False):
        path = Path(working_dir, "README.md")
        own = model_card(model, model_id=repo_id)
        tags = own.data.get("tags", [])
        card = ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else None
        if card is None or _OF_TRANSFORMERS in card.text or AUTOMATIC in card.text:
            own.text = f"{own.text.rstrip()}\n\n{AUTOMATIC}\n"
            card, tags = own, [*tags, *(model.model_tags or [])]
        else:
            tags = [*(card.data.get("tags") or []), *tags]
        card.data["tags"] = list(dict.fromkeys(tags))
        card.save(path)


@contextlib.contextmanager
def upload_of(folder: str | os.PathLike[str], repository: str) -> Iterator[None]:
    """Adds a note to an exception in the block: the folder is complete, and how to upload it later."""
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"The upload to {repository!r} failed, but {os.fspath(folder)} is complete. To upload it later, run: "
            f"hf upload {repository} {os.fspath(folder)}"
        )
        raise
