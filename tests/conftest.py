"""For all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Takes what imports and collection have made out of the garbage collector's sight.

    accelerate collects after every tensor it places, which costs 0.3 s each time over all of torch's objects.
    """
    gc.collect()
    gc.freeze()
