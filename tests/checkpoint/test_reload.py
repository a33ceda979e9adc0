"""A patched model that is saved with `save_pretrained`: equal in a process with the package, refused in any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_posenc import unpatch_model
from hf_posenc.checkpoint.adapter_config import SENTENCE
from hf_posenc.entry import INSTALL
from hf_posenc.patching.place.config_entry import WEIGHTS_SENTENCE
from tests.checkpoint.checkpoint_cases import CASES, Case, results_of
from tests.checkpoint.fresh_process import classes, run, stated

#: Routes past the auto classes, which find no file of weights and quote a sentence in its place.
CONCRETE = {"concrete", "config class", "concrete_sharded", "concrete_low_memory", "base"}
CONCRETE |= {"config by hand", "concrete, config by hand", "config of a class"}
EVERYWHERE = {"AutoConfig", "concrete", "config class"}
REFUSED = {*EVERYWHERE, *CONCRETE, "AutoModel", "AutoModelForX", "pipeline", "pipeline without a task"}
REFUSED -= {"config of a class"}
#: What needs no positions.
READ = {"AutoTokenizer", "AutoProcessor"}
#: Routes that see no config, and quote the name of a weight.
WEIGHT = {"load_state_dict", "safetensors"}
ADAPTER = {"PeftConfig", "PeftModel", "AutoPeftModel", "adapter, AutoModel", "adapter, class", "adapter, load_adapter"}
TOOLS = {*WEIGHT, *READ, *ADAPTER, "config of a class", "transformers serve", "SentenceTransformer", "CrossEncoder"}
SUBJECT = "checkpoint you are trying to load"
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def refusals(checkpoints: Path) -> dict[str, Any]:
    pytest.importorskip("peft")
    pytest.importorskip("sentence_transformers")
    return results_of("without", checkpoints)


@by_case
def test_every_route_gives_bit_equal_outputs_and_the_lengths(checkpoints: Path, case: Case) -> None:
    """In bfloat16 those of the converted model. In tests/matrix and test_hub.py, other processes load saved models."""
    folder = checkpoints / case.name
    reference, (concrete, auto) = load_file(folder / "reference" / "reference.safetensors"), classes(folder)
    routes: list[tuple[Any, Path, dict[str, Any]]] = [(auto, folder, {}), (auto, folder, {"dtype": torch.bfloat16})]
    if case.every_route:
        routes += [(auto, folder / "sharded", {}), (auto, folder / "by_hand", {}), (concrete, folder, {})]
        routes += [(auto, folder, {"device_map": "auto"}), (auto, folder.parent, {"subfolder": folder.name})]
    for load, place, options in routes:
        model = load.from_pretrained(place, **options)
        assert type(model) is concrete
        assert not model.training
        assert {parameter.dtype for parameter in model.parameters()} == {options.get("dtype", torch.float32)}
        assert run(model, reference) == 0.0, (place, options)
    lengths = [stated(model), model.position_encoding.lengths.current, model.position_encoding.lengths.native]
    generation = getattr(unpatch_model(model), "generation_config", None)
    lengths += [stated(model), None if generation is None else generation.max_length]
    assert lengths == case.lengths or case.lengths is None


@by_case
def test_a_process_without_the_package_is_refused_with_its_name(refusals: dict[str, Any], case: Case) -> None:
    messages = refusals[case.name]
    expected = REFUSED if case.every_route else EVERYWHERE
    assert set(messages) == (expected | TOOLS if case.name == "llama-t5" else expected)
    for route, message in messages.items():
        if route in ADAPTER:
            assert SENTENCE in message, route
        elif route in WEIGHT:
            assert "position_encoding" in message, (route, message)
        elif route in CONCRETE:
            assert WEIGHTS_SENTENCE in message, (route, message)
        elif route in READ:
            assert message == "LOADED", (route, message)
        else:
            # The type of the model, before any advice to update transformers.
            assert message.startswith(f"ValueError: The {SUBJECT} has model type `hf_posenc ({INSTALL}, "), message
            assert "import hf_posenc before loading" in message
            assert message.index("updating Transformers does not help") < message.index("pip install --upgrade")
