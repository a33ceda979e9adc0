from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.checkpoint.checkpoint_cases import CASES, LENGTH, adapted, base, write_reference, write_stock_llama


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one patched checkpoint per case, some in every form, one with a tokenizer and an adapter."""
    root = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        model = case.model()
        folder = root / case.name
        model.save_pretrained(folder)
        if case.every_route:
            model.save_pretrained(folder / "sharded", max_shard_size="20KB")
            model.save_pretrained(folder / "by_hand", max_shard_size="20KB")
            (folder / "by_hand" / "config.json").write_text(json.dumps(model.config.to_dict()))
        write_reference(model, folder, LENGTH if case.lengths is None else 128)
    write_stock_llama(root / "stock")
    AutoTokenizer.from_pretrained(root / "stock").save_pretrained(root / "llama-t5")
    if importlib.util.find_spec("peft") is not None:
        adapted(base(root / "stock", "t5")).save_pretrained(root / "llama-t5" / "adapter")
    return root


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stock model with a tokenizer, which no test changes."""
    return write_stock_llama(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the same shapes with other weights."""
    return write_stock_llama(tmp_path_factory.mktemp("other"), seed=1)
