"""Datasets of the hub, read in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from training.data.loading import load_named_dataset
from training.errors import SettingsError


def test_streaming_reads_the_first_documents_and_no_more(tmp_path: Path, monkeypatch: Any) -> None:
    """The hub is stood in for by a local file, which `datasets` streams the same way."""
    rows = [{"text": f"document {number}"} for number in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked, passed, load = [], [], datasets.load_dataset

    def of_the_hub(name: str, config: str | None, split: str, streaming: bool = False) -> Any:
        asked.append((name, config, split, streaming))
        stream = load("json", data_files=str(tmp_path / "rows.jsonl"), split=split, streaming=streaming)

        def read(row: dict[str, Any]) -> dict[str, Any]:
            passed.append(row)
            return row

        return stream.map(read)

    monkeypatch.setattr(datasets, "load_dataset", of_the_hub)
    loaded, source = load_named_dataset("someone/texts", "english", "train", first=3)
    assert loaded["text"] == ["document 0", "document 1", "document 2"]
    assert asked == [("someone/texts", "english", "train", True)]
    assert source == "someone/texts"
    assert len(passed) <= 4  # `take` looks one document ahead


def test_a_saved_dataset_with_several_splits(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"text": [name] * 4}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    loaded, _ = load_named_dataset(str(tmp_path / "saved"), split="test", first=2)
    assert loaded["text"] == ["test", "test"]
    parts["train"].save_to_disk(str(tmp_path / "one"))
    assert load_named_dataset(str(tmp_path / "one"))[0]["text"] == ["train"] * 4
    with pytest.raises(SettingsError, match="no split 'test': its only split is"):
        load_named_dataset(str(tmp_path / "one"), split="test")
    with pytest.raises(SettingsError, match=r"no split 'validation'\. Its splits: train, test"):
        load_named_dataset(str(tmp_path / "saved"), split="validation")
