"""A process that dies or hangs costs only its own item."""

from __future__ import annotations

import os
import time

from tests.processes import each


def test_what_dies_hangs_or_raises_has_no_answer() -> None:
    slept = list(each(time.sleep, [0.0, 600.0], processes=2, timeout=20.0, preload="tests.fresh_imports"))
    assert slept == [(0.0, None, ""), (600.0, None, "no answer after 20 s")]
    (left,) = each(os._exit, [3], processes=1, timeout=60.0, preload="tests.fresh_imports")
    assert left == (3, None, "the process died")
    (raised,) = each(int, ["x"], processes=1, timeout=60.0, preload="tests.fresh_imports")
    assert "invalid literal" in raised[2]
