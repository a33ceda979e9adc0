"""Every scheme in every build of architecture, saved here and loaded in a fresh process: bit-equal outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_posenc.schemes import registry
from tests.fresh import printed, run_fresh
from tests.schemes import own_schemes
from tests.schemes.own_schemes import own_schemes_are_registered  # noqa: F401

from .architectures import ARCHITECTURES
from .running import outputs, patched, tokens
from .test_behaviour import ALL_SCHEMES, cells

pytestmark = pytest.mark.on_cpu("the other process computes on the CPU")

every_cell = cells(ARCHITECTURES, turn=0)

_LOAD_ALL = "import sys; from tests.matrix.test_reload import load_all; load_all(sys.argv[1])"


def load_all(folder: str) -> None:
    """Runs in the fresh process: loads each checkpoint with its stock class and keeps its outputs."""
    registry._SCHEMES |= own_schemes.registered()  # also imports hf_posenc, which teaches from_pretrained
    for place in sorted(Path(folder).iterdir()):
        scheme = place.name.partition("--")[2]
        name = (place / "class.txt").read_text()
        model: Any = getattr(transformers, name).from_pretrained(place, attn_implementation="eager")
        assert model.position_encoding.config.name == scheme, (place.name, model.position_encoding.config)
        with torch.no_grad():
            torch.save(outputs(model, tokens()), place / "reloaded.pt")


@pytest.fixture(scope="module")
def reloaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every cell of this run."""
    folder = tmp_path_factory.mktemp("reload")
    for item in request.session.items:
        if item.path != request.path:
            continue
        architecture, scheme = (item.callspec.params[name] for name in ("architecture", "scheme"))
        model, place = patched(architecture, ALL_SCHEMES[scheme]), folder / f"{architecture}--{scheme}"
        model.save_pretrained(place)
        (place / "class.txt").write_text(type(model).__name__)
        with torch.no_grad():
            torch.save(outputs(model, tokens()), place / "saved.pt")
    printed(run_fresh(_LOAD_ALL, folder))
    return folder


@every_cell
def test_reload_in_a_fresh_process(reloaded: Path, architecture: str, scheme: str) -> None:
    place = reloaded / f"{architecture}--{scheme}"
    assert torch.equal(torch.load(place / "reloaded.pt"), torch.load(place / "saved.pt"))
