"""Part (c): the price table on the device, at one attention call and at the shape of SmolLM2-135M."""

from __future__ import annotations

import functools
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from benchmarks.arguments import parse_options
from benchmarks.levels import Sizes
from benchmarks.price import measure_cell, planned_cells
from benchmarks.subjects import Setting
from benchmarks.timing import Pace
from tests.kits.gpu.rows import OK, Row
from tests.kits.gpu.worker import Part

_WORDS = (
    "--levels attention smollm2 --phases forward train decode decode_batch16 --memory_lengths "
    "--lengths 1024 4096 16384 32768 --rounds 9 --cell_seconds 20 --subject_seconds 8 "
    "--peers kernel mask position_bias flex flash "
    "--schemes none rope p_rope alibi t5 kerple sandwich forget_gate sinusoidal self_extend "
    "alibi@flex_attention t5@flex_attention forget_gate@flex_attention"
)
#: They come later on the command line, and count.
_SMOKE = "--lengths 16 32 --rounds 3 --schemes none rope alibi forget_gate --peers kernel mask position_bias flash"
_TINY = Sizes(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, vocab_size=64, num_key_value_heads=2)


class Price(Part):
    """The third part of the kit; its rows are the cells of `benchmarks.price`."""

    @functools.cached_property
    def _options(self) -> Namespace:
        options = parse_options([*_WORDS.split(" "), *(_SMOKE.split(" ") if self.smoke else ())])
        dtype = "float32" if self.smoke and self.device == "cpu" else "bfloat16"
        # The worker has checked that the device exists.
        options.setting = Setting(device=self.device, dtype=dtype)
        if self.smoke:
            options.setting = Setting(_TINY, _TINY, self.device, dtype)
            options.pace = Pace(3, 0.1, measurement_seconds=0.001)
        return options

    def settings(self) -> dict[str, Any]:
        """What all rows depend on."""
        return asdict(self._options.setting) | {"schemes": self._options.schemes, "peers": self._options.peers}

    def cells(self) -> list[str]:
        """Level, phase and length, short ones first."""
        return [" ".join(map(str, cell)) for cell in planned_cells(self._options)]

    def run(self, cell: str) -> Row:
        """Times one cell."""
        # What crashed says nothing about how long the next length takes.
        earlier = {name: row for name, row in self.rows.items() if "rows" in row}
        level, phase, length = cell.split(" ")
        return {"status": OK} | measure_cell(self._options, (level, phase, int(length)), earlier)
