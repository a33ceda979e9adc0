"""Settings and subjects small enough for tests."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arguments import parse_options
from benchmarks.levels import Sizes
from benchmarks.subjects import Call, Setting
from benchmarks.timing import Pace

TINY = Setting(Sizes(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, vocab_size=64))


@dataclass
class Sleeper:
    """Takes a given time."""

    name: str
    seconds: float
    baseline: str = "bare"
    family: str = "test"
    error: Exception | None = None
    calls: list[tuple[str, int]] = field(default_factory=list)

    @contextlib.contextmanager
    def ready(self, phase: str, length: int) -> Iterator[Call]:
        def run() -> None:
            self.calls.append((phase, length))
            if self.error is not None:
                raise self.error
            time.sleep(self.seconds)

        yield Call(run)


def tiny_options(folder: Path, **changes: object) -> Namespace:
    usual = {
        "output_dir": folder,
        "setting": TINY,
        "pace": Pace(rounds=3, cell_seconds=1.0, subject_seconds=30.0, measurement_seconds=0.004),
        "lengths": (16, 32),
        "levels": ("attention", "model"),
        "phases": ("forward", "decode"),
        "schemes": ("rope", "alibi", "normalized_integer"),
        "peers": ("kernel", "mask"),
        "memory_lengths": (),
    }
    return Namespace(**vars(parse_options([])) | usual | changes)
