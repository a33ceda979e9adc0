from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.run_cases import write_texts

SENTENCES = (
    "The ship left the harbour before dawn, and nobody on the quay saw it go. ",
    "A letter came for the captain, who was already far beyond the reach of any letter. ",
    "In the evening the wind turned, and with the wind the mood of the whole town. ",
    "Nobody spoke of the ship again until the winter, when a sail was seen from the tower. ",
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """Eight documents of a few hundred bytes, each different."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(8):
        order = SENTENCES[index % 4 :] + SENTENCES[: index % 4]
        (folder / f"document{index}.txt").write_text("".join(order) * (index + 2), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight other documents, for runs."""
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def tiny(text_folder, tmp_path):
    """Arguments of a comparison that takes seconds."""

    def arguments(**changes: object) -> list[str]:
        options: dict[str, object] = {
            "dataset_name": text_folder,
            "output_dir": tmp_path / "out",
            "schemes": "none,alibi",
            "max_steps": 6,
            "eval_every": 2,
            "checkpoint_every": 2,
            "batch_size": 4,
            "train_length": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "num_layers": 1,
            "eval_windows": 6,
            "warmup_steps": 1,
            "validation_fraction": 0.25,
            "workers": 1,
        } | changes
        return [f"--{name}={value}" for name, value in options.items()]

    return arguments
