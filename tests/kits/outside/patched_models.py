"""A pytest plugin that gives every transformers model of a test a scheme, and writes down each outcome.

It is loaded into the test run of another project, whose folder may be called `tests` too, so it imports nothing from
this one. `HF_POSENC_OUTSIDE` has its options as JSON: the arm (`stock`, `native`, or a scheme), the file to write, and
one in how many tests to run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from stand_ins import install_stand_ins
from transformers import PreTrainedModel

OPTIONS: dict[str, Any] = json.loads(os.environ["HF_POSENC_OUTSIDE"])
#: Outcomes by test: `passed`, `skipped`, or what went wrong.
OUTCOMES: dict[str, str] = {}
#: Models that could not be patched in the test that runs, with the reason.
REFUSED: list[str] = []
_depth = threading.local()


@contextlib.contextmanager
def building() -> Iterator[bool]:
    """Whether this is the outermost construction of a model: its parts, and what a loader builds, are not patched."""
    _depth.value = getattr(_depth, "value", 0) + 1
    try:
        yield _depth.value == 1
    finally:
        _depth.value -= 1


def give_scheme(model: Any) -> None:
    """Patches a stock model; the test goes on with the stock model if the library refuses it."""
    import hf_posenc
    from hf_posenc.patching.place.encoding import encodings

    # A part, such as BartEncoder, is patched with its model.
    if not isinstance(model, PreTrainedModel) or not hasattr(transformers, type(model).__name__) or encodings(model):
        return
    state, training = torch.get_rng_state(), model.training
    # As the suite seeds the weights of models that it compares.
    torch.manual_seed(0)
    try:
        scheme = hf_posenc.native_scheme(model) if OPTIONS["arm"] == "native" else OPTIONS["arm"]
        hf_posenc.patch_model(model, scheme)
    except hf_posenc.UnsupportedError as error:
        REFUSED.append(f"{type(model).__name__}: {str(error).split('. ')[0]}")
    torch.set_rng_state(state)
    model.train(training)


def patch_after(original: Callable[..., Any], *, loads: bool) -> Callable[..., Any]:
    """Wraps `__init__` of a model class, or a loader, whose result then has a scheme."""

    @functools.wraps(original)
    def wrapped(first: Any, *args: Any, **kwargs: Any) -> Any:
        with building() as outermost:
            if outermost and not loads and args:
                # Tests build several models from one config, and compare a config with that of another model.
                args = (without_scheme(args[0]), *args[1:])
            result = original(first, *args, **kwargs)
            if outermost:
                model = result if loads else first
                give_scheme(model[0] if isinstance(model, tuple) else model)
        return result

    return wrapped


def without_scheme(config: Any) -> Any:
    """A copy of a config, also of that of a patched model, from which a stock model can be built."""
    from hf_posenc.patching.place.config_entry import detach_entry

    config = copy.deepcopy(config)
    detach_entry(config)
    return config


def install() -> None:
    """Wraps every model class that transformers has imported, and the function that loads them."""
    import hf_posenc  # noqa: F401 (its wrappers come first)

    waiting = [PreTrainedModel]
    while waiting:
        kind = waiting.pop()
        waiting.extend(kind.__subclasses__())
        if kind is not PreTrainedModel and "_outside" not in kind.__dict__:
            # Also where it is inherited, perhaps from a class that is no model.
            kind.__init__ = patch_after(kind.__init__, loads=False)  # type: ignore[method-assign]
            kind._outside = True  # type: ignore[attr-defined]
    loader = PreTrainedModel.__dict__["from_pretrained"].__func__
    if not getattr(loader, "_outside", False):
        wrapped = patch_after(loader, loads=True)
        wrapped._outside = True  # type: ignore[attr-defined]
        PreTrainedModel.from_pretrained = classmethod(wrapped)  # type: ignore[assignment,method-assign]


def pytest_configure() -> None:
    """Models that the suite asks the hub for are built here."""
    install_stand_ins(Path(OPTIONS["models"]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that are not in the sample, the same ones in every arm."""
    every = OPTIONS["every"]

    def number(item: pytest.Item) -> int:
        return int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:4])

    kept = [item for item in items if number(item) % every == 0]
    config.hook.pytest_deselected(items=[item for item in items if number(item) % every])
    items[:] = kept


def pytest_runtest_setup() -> None:
    """The classes that the suite has imported since are wrapped too, before each test."""
    REFUSED.clear()
    torch.manual_seed(0)
    for name, module in list(sys.modules.items()):
        # The generator of transformers' `ids_tensor`, which is seeded by the clock.
        if name.endswith("test_modeling_common"):
            module.global_rng.seed(0)
    if OPTIONS["arm"] != "stock":
        install()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Notes the outcome of a test: the last thing that went wrong decides."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        error = call.excinfo
        OUTCOMES[item.nodeid] = "failed" if error is None else f"failed: {error.typename}: {error.value}"[:400]
    elif report.skipped and not hasattr(report, "wasxfail"):
        OUTCOMES.setdefault(item.nodeid, "skipped")
    elif call.when == "call":
        OUTCOMES.setdefault(item.nodeid, "refused: " + " | ".join(dict.fromkeys(REFUSED)) if REFUSED else "passed")


def pytest_runtest_logfinish() -> None:
    """After each test, so that a run that is ended keeps what it has."""
    Path(OPTIONS["file"]).write_text(json.dumps(OUTCOMES), encoding="utf-8")
