"""Part (b): the price table on the device, at one attention call and at the shape of SmolLM2-135M."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arguments import Options
from benchmarks.gpu.part import OK, Row, Setup
from benchmarks.lineup import SMOLLM2_LEVEL
from benchmarks.price import measure_cell, planned_cells
from benchmarks.results import cell_key
from benchmarks.subjects import DECODE_BATCH, PHASES, Setting, Sizes
from benchmarks.timing import Pace

_SCHEMES = (
    "none", "rope", "p_rope", "alibi", "t5", "kerple", "sandwich", "forget_gate", "sinusoidal", "self_extend",
    "alibi@flex_attention", "t5@flex_attention", "forget_gate@flex_attention",
)  # fmt: skip
_PEERS = ("kernel", "mask", "position_bias", "flex", "flash")
_LENGTHS = (1024, 4096, 16384, 32768)
_TINY = Sizes(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, vocab_size=64, num_key_value_heads=2)


class Price:
    """The second part of the kit; its rows are the cells of `benchmarks.price`.

    Args:
        setup: where and how it is run.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.options = _smoke(setup) if setup.smoke else _full(setup)
        self._cells = {cell_key(*cell): cell for cell in planned_cells(self.options)}

    def settings(self) -> dict[str, Any]:
        """What all rows depend on."""
        settings = asdict(self.options.setting) | {"schemes": self.options.schemes, "peers": self.options.peers}
        return settings | ({"smoke": True} if self.setup.smoke else {})

    def cells(self) -> list[str]:
        """Level, phase and length, short ones first."""
        return list(self._cells)

    def run(self, cell: str) -> Row:
        """Times one cell."""
        # What crashed says nothing about how long the next length takes.
        earlier = {name: row for name, row in self.setup.rows.items() if "rows" in row}
        return {"status": OK} | measure_cell(self.options, self._cells[cell], earlier)


def _full(setup: Setup) -> Options:
    setting = Setting(device=setup.device, dtype="bfloat16")
    pace = Pace(rounds=9, cell_seconds=20.0, subject_seconds=8.0)
    return _options(setup, setting, pace, _LENGTHS, _SCHEMES, _PEERS)


def _smoke(setup: Setup) -> Options:
    dtype = "bfloat16" if setup.device == "cuda" else "float32"
    setting = Setting(sizes=_TINY, smollm2=_TINY, device=setup.device, dtype=dtype)
    schemes = ("none", "rope", "alibi", "forget_gate")
    peers = ("kernel", "mask", "position_bias", "flash")
    return _options(
        setup, setting, Pace(rounds=3, cell_seconds=0.1, measurement_seconds=0.001), (16, 32), schemes, peers
    )


def _options(
    setup: Setup,
    setting: Setting,
    pace: Pace,
    lengths: tuple[int, ...],
    schemes: tuple[str, ...],
    peers: tuple[str, ...],
) -> Options:
    return Options(
        output_dir=Path(setup.folder),
        setting=setting,
        pace=pace,
        lengths=lengths,
        levels=("attention", SMOLLM2_LEVEL),
        phases=(*PHASES, DECODE_BATCH),
        schemes=schemes,
        peers=peers,
        memory_lengths=(),
        budget_seconds=setup.remaining(),
        overwrite=False,
    )
