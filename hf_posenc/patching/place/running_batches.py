"""Continuous batching that runs, or is kept for later, while the scheme of its model is exchanged."""

from __future__ import annotations

import sys
import threading
from typing import Any

from torch import nn

from hf_posenc.errors import UnsupportedError

#: A manager that `generate_batch(persistent_manager=True)` leaves on the model for later calls.
KEPT_MANAGER = "_cached_continuous_batching_manager"


def refuse_running_batches(model: nn.Module) -> None:
    """Refuses to exchange the scheme of a model that a thread of continuous batching calls at the same time.

    One call would run some layers with the old scheme and some with the new one. While the manager pauses, its pages
    still hold keys of the old scheme.

    Raises:
        UnsupportedError: while such a thread is alive.
    """
    for thread in threading.enumerate():
        # The function that a `threading.Thread` runs. The thread drops it when it ends.
        manager = getattr(getattr(thread, "_target", None), "__self__", None)
        if manager is not None and _is_manager(manager) and _share_modules(manager.model, model):
            raise UnsupportedError(
                f"Continuous batching is running on this {type(model).__name__}, and its pages hold keys of the "
                "position encoding in force, so that cannot be exchanged now. Stop it first "
                "(manager.stop(block=True)), and call model.init_continuous_batching() again afterwards."
            )


def drop_kept_pages(model: nn.Module) -> None:
    """Makes a manager that the model keeps allocate new pages when it starts again.

    Requests with a common beginning share pages, also with requests from before the exchange, whose keys have another
    scheme.
    """
    manager: Any = model.__dict__.get(KEPT_MANAGER)
    if manager is not None:
        manager.batch_processor = None
        manager.warmed_up = False


def _is_manager(owner: Any) -> bool:
    module = sys.modules.get("transformers.generation.continuous_batching")
    return module is not None and isinstance(owner, module.ContinuousBatchingManager)


def _share_modules(first: nn.Module, second: nn.Module) -> bool:
    """Whether one is the other, or a part of it."""
    return any(module is second for module in first.modules()) or any(module is first for module in second.modules())
