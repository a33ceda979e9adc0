"""Loading functions of accelerate, transformers, safetensors and quanto put weights into the scheme they belong to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from transformers.trainer_utils import load_sharded_checkpoint

from hf_posenc import CheckpointError
from hf_posenc.checkpoint.agreement import NamedSchemes
from tests.checkpoint.checkpoint_cases import FORMS, assert_same, made, outputs, refused, without_mark, written
from tests.checkpoint.test_identity import ALIBI, CROSSINGS, PAIRS, STOCK, T5
from tests.fresh import printed, run_fresh

ON_CPU: dict[str, Any] = {"device_map": {"": "cpu"}}
WAYS: tuple[dict[str, Any], ...] = ({}, ON_CPU, ON_CPU | {"strict": True})
MESSAGE = "position encoding"


@pytest.mark.parametrize(("form", "into", "source", "message"), CROSSINGS)
def test_accelerate_refuses_weights_of_another_scheme(
    tmp_path: Path, form: str, into: Any, source: Any, message: str
) -> None:
    folder = written(made(**source, seed=1), tmp_path, form)
    model = made(**into)
    (file,) = [*folder.glob("*.index.json"), *folder.glob("model.safetensors"), *folder.glob("pytorch_model.bin")]
    for checkpoint in (folder, str(file)):
        for options in WAYS:
            with refused(message, model) as caught:
                load_checkpoint_in_model(model, checkpoint, **options)
            assert "patch_model" in str(caught.value)
            assert "strict=False" not in str(caught.value), "it is accelerate's default"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [T5, STOCK])
def test_accelerate_loads_the_scheme_of_the_weights(tmp_path: Path, kind: Any, form: str) -> None:
    source = made(**kind, seed=1)
    folder = written(source, tmp_path / "source", form)
    for options in WAYS:
        model = made(**kind)
        load_checkpoint_in_model(model, folder, **options)
        assert_same(model, source)


def test_the_file_that_accelerate_reads_is_the_one_whose_scheme_is_compared(tmp_path: Path) -> None:
    """In a folder with two files, accelerate takes the one of torch."""
    folder = written(made(**ALIBI), tmp_path)
    for kind in (STOCK, T5):
        with init_empty_weights():
            model = made(**kind)
        with pytest.raises(CheckpointError, match="alibi"):
            load_checkpoint_and_dispatch(model, str(folder), "auto")
    torch.save(made(seed=1).state_dict(), folder / "pytorch_model.bin")
    model = made(**ALIBI)
    with refused(MESSAGE, model):
        load_checkpoint_in_model(model, folder)
    load_checkpoint_in_model(stock := made(), folder)
    assert_same(stock, made(seed=1))


def test_weights_of_an_older_version_load_with_a_warning(tmp_path: Path) -> None:
    source = made(**T5, seed=1)
    folder = without_mark(written(source, tmp_path))
    with pytest.warns(UserWarning, match="older hf_posenc"):
        load_checkpoint_in_model(model := made(**T5), folder, **ON_CPU)
    assert_same(model, source)
    for other in (ALIBI, STOCK):
        model = made(**other)
        with pytest.warns(UserWarning, match="older hf_posenc"), refused(MESSAGE, model):
            load_checkpoint_in_model(model, folder)


def test_the_schemes_of_models_inside_another_module_are_compared_one_by_one(tmp_path: Path) -> None:
    def pair(*kinds: Any) -> Any:
        return torch.nn.ModuleList([made(**kind) for kind in kinds])

    torch.save(pair(ALIBI, T5).state_dict(), tmp_path / "pytorch_model.bin")
    for options in ({}, ON_CPU):
        load_checkpoint_in_model(pair(ALIBI, T5), tmp_path, **options)
        for wrong in (pair(T5, ALIBI), pair(ALIBI, ALIBI), pair(STOCK, T5)):
            with refused(MESSAGE, wrong):
                load_checkpoint_in_model(wrong, tmp_path, **options)
    # safetensors keeps one of the names of a shared weight, and a folder names a scheme once.
    named = NamedSchemes.of(made(**T5).state_dict())
    for kind in (T5, ALIBI, STOCK):
        twice = torch.nn.ModuleDict({"first": made(**kind)})
        twice["second"] = twice["first"]
        if kind is T5:
            named.check(twice)
        else:
            with pytest.raises(CheckpointError, match="t5"):
                named.check(twice)


def test_errors_of_accelerate_and_torch_stay_their_own(tmp_path: Path) -> None:
    model = made(**ALIBI)
    for place, message in ((tmp_path / "absent", "should be the path"), (tmp_path, "is not a folder containing")):
        with pytest.raises(ValueError, match=message):
            load_checkpoint_in_model(model, place)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "state")
    (tmp_path / "state" / ".metadata").write_bytes(b"broken")
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(model.state_dict(), checkpoint_id=tmp_path / "state")


@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_strict_loading_functions_refuse_another_scheme_before_anything_is_copied(
    tmp_path: Path, into: Any, source: Any, message: str
) -> None:
    weights, model = made(**source, seed=1), made(**into)
    shards, file = written(weights, tmp_path / "shards", "sharded"), written(weights, tmp_path) / "model.safetensors"
    for load in (partial(load_sharded_checkpoint, folder=shards), partial(safetensors.torch.load_model, filename=file)):
        with refused(message, model) as caught:
            load(model)
        assert "strict=False" in str(caught.value)
        load(other := made(**into), strict=False)
        assert torch.equal(other.lm_head.weight, weights.lm_head.weight)


def test_accelerator_refuses_a_state_of_another_scheme(tmp_path: Path) -> None:
    """`Accelerator.load_state` has safetensors' function by its name."""
    source = made(**T5, seed=1)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(source)
    accelerator.save_state(str(tmp_path))
    for kind in (STOCK, ALIBI, T5):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator._models.clear()
        model = accelerator.prepare(made(**kind))
        if kind is T5:
            accelerator.load_state(str(tmp_path))
            assert_same(model, source)
        else:
            with refused(MESSAGE, model):
                accelerator.load_state(str(tmp_path))


def test_quanto_refuses_quantised_weights_of_another_scheme(tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    source = made(**T5, seed=1)
    quantised = quanto.QuantizedModelForCausalLM.quantize(source, weights=quanto.qint8)
    state, kinds = source.state_dict(), quanto.quantization_map(source)
    quanto.requantize(same := made(**T5), state, kinds)
    assert_same(same, source)
    for kind in (STOCK, ALIBI):
        model = made(**kind)
        with refused(MESSAGE, model):
            quanto.requantize(model, state, kinds)
    quantised.save_pretrained(tmp_path)
    assert_same(quanto.QuantizedModelForCausalLM.from_pretrained(tmp_path), outputs(source))


@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_torch_refuses_a_distributed_checkpoint_of_another_scheme(
    tmp_path: Path, into: Any, source: Any, message: str
) -> None:
    model, weights = made(**into), made(**source)
    states = {
        "flat": (weights.state_dict(), model.state_dict()),
        "nested": ({"model": weights, "step": 3}, {"model": model, "step": 0}),
        "dictionary": ({"model": weights.state_dict()}, {"model": model.state_dict()}),
    }
    for name, (saved, loaded) in states.items():
        dcp.save(saved, checkpoint_id=tmp_path / name)
        with refused(message, model) as caught:
            dcp.load(loaded, checkpoint_id=tmp_path / name)
        assert "allow_partial_load=True" in str(caught.value)
        # Without collectives, each process writes metadata of its own.
        (tmp_path / name / ".metadata").rename(tmp_path / name / "__0.metadata")
        with refused(message, model):
            dcp.load(loaded, checkpoint_id=tmp_path / name)
    (tmp_path / name / "__0.metadata").rename(tmp_path / name / ".metadata")
    state, names = loaded["model"], set(loaded["model"])
    dcp.load(loaded, checkpoint_id=tmp_path / name, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    model.load_state_dict(state)  # with the mark of its own scheme
    assert set(state) == names
    assert torch.equal(model.model.embed_tokens.weight, weights.model.embed_tokens.weight)


def test_torch_loads_a_distributed_checkpoint_of_the_same_scheme(tmp_path: Path) -> None:
    source, model = made(**T5), made(**T5, seed=1)
    dcp.save({"model": source.state_dict(), "optimizer": {"step": torch.ones(2)}}, checkpoint_id=tmp_path)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state["model"])
    assert_same(model, source)
    # Some weights without the mark beside them are those of a stock model; an optimizer has none.
    step = {"model": {"model.norm.weight": torch.zeros_like(model.model.norm.weight)}}
    with pytest.raises(CheckpointError):
        dcp.load(step, checkpoint_id=tmp_path)
    optimizer = {"optimizer": {"step": torch.zeros(2)}}
    dcp.load(optimizer, checkpoint_id=tmp_path)
    assert bool(optimizer["optimizer"]["step"].all())


def test_functions_imported_by_name_before_the_plugin_refuse_another_scheme(tmp_path: Path) -> None:
    written(made(**ALIBI), tmp_path)
    code = f"""
from accelerate import load_checkpoint_in_model, load_checkpoint_and_dispatch
from tests.models import tiny
import hf_posenc
for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
    try:
        load(tiny("LlamaForCausalLM", vocab_size=64), {str(tmp_path)!r})
    except hf_posenc.PositionEncodingError as error:
        print("refused:", error)
"""
    text = printed(run_fresh(code))
    assert text.count("refused: ") == 2
    assert text.count("alibi") >= 2
