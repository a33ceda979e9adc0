"""Loading functions of accelerate, transformers, safetensors and quanto put weights into the scheme they belong to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_utils import load_sharded_checkpoint

import hf_posenc
from hf_posenc.checkpoint.agreement import NamedSchemes
from hf_posenc.checkpoint.configuration import CheckpointError
from tests.checkpoint.checkpoint_cases import llama, outputs
from tests.checkpoint.test_identity import ALIBI, PAIRS, STOCK, T5, made, older
from tests.fresh import run_fresh

FORMS = ["whole", "sharded", "bin", "sharded bin"]
#: Every pair in one form, and every form with a pair of each direction.
CROSSINGS = [pytest.param("whole", *pair.values, id=f"whole-{pair.id}") for pair in PAIRS] + [
    pytest.param(form, *pair.values, id=f"{form}-{pair.id}") for form in FORMS[1:] for pair in PAIRS[:2]
]


def written(model: Any, folder: Path, form: str) -> Path:
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if form.startswith("sharded") else {}))
    if form == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    if form == "sharded bin":
        index = folder / "model.safetensors.index.json"
        text = index.read_text().replace(".safetensors", ".bin").replace("model-", "pytorch_model-")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()
        for file in folder.glob("*.safetensors"):
            torch.save(load_file(file), folder / f"pytorch_{file.stem}.bin")
            file.unlink()
    return folder


def unchanged(model: Any, call: Callable[[], Any], message: str = "position encoding") -> str:
    """The message of the error of a call that leaves a model as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        call()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return str(caught.value)


@pytest.mark.parametrize(("form", "into", "source", "message"), CROSSINGS)
def test_accelerate_refuses_weights_of_another_scheme(
    tmp_path: Path, form: str, into: Any, source: Any, message: str
) -> None:
    folder = written(made(source, seed=1), tmp_path / "source", form)
    model = made(into)
    (file,) = [*folder.glob("*.index.json"), *folder.glob("model.safetensors"), *folder.glob("pytorch_model.bin")]
    for checkpoint in (folder, str(file)):
        for options in ({}, {"device_map": {"": "cpu"}}, {"device_map": {"": "cpu"}, "strict": True}):
            found = unchanged(model, lambda c=checkpoint, o=options: load_checkpoint_in_model(model, c, **o), message)
            assert "patch_model" in found
            assert "strict=False" not in found, "it is accelerate's default"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [T5, STOCK])
def test_accelerate_loads_the_scheme_of_the_weights(tmp_path: Path, kind: Any, form: str) -> None:
    source = made(kind, seed=1)
    folder = written(source, tmp_path / "source", form)
    for options in ({}, {"device_map": {"": "cpu"}}, {"device_map": {"": "cpu"}, "strict": True}):
        model = made(kind)
        load_checkpoint_in_model(model, folder, **options)
        assert torch.equal(outputs(model), outputs(source))
    places = {f"model.{name}": "cpu" for name, _ in source.model.named_children()}
    for device_map in ("auto", {"": "cpu"}, places | {"lm_head": "cpu", "model.layers": "disk"}):
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        assert next(model.parameters()).device.type == "meta"
        model = load_checkpoint_and_dispatch(model, str(folder), device_map, offload_folder=str(tmp_path / "offload"))
        assert torch.equal(outputs(model.eval()), outputs(source))


def test_an_empty_model_of_another_scheme_is_refused(tmp_path: Path) -> None:
    folder = written(made(ALIBI), tmp_path, "whole")
    for scheme in (None, "t5"):
        with init_empty_weights():
            model = llama() if scheme is None else hf_posenc.patch_model(llama(), scheme)
        with pytest.raises(CheckpointError, match="alibi"):
            load_checkpoint_and_dispatch(model, str(folder), "auto")


def test_the_file_that_accelerate_reads_is_the_one_compared(tmp_path: Path) -> None:
    """In a folder with two files, accelerate takes the one of torch."""
    folder = written(made(ALIBI), tmp_path, "whole")
    torch.save(made(STOCK, seed=1).state_dict(), folder / "pytorch_model.bin")
    model = made(ALIBI)
    unchanged(model, lambda: load_checkpoint_in_model(model, folder))
    load_checkpoint_in_model(stock := made(STOCK), folder)
    assert torch.equal(outputs(stock), outputs(made(STOCK, seed=1)))


def test_weights_of_an_older_version_load_with_a_warning(tmp_path: Path) -> None:
    source = made(T5, seed=1)
    folder = older(written(source, tmp_path, "whole"))
    with pytest.warns(UserWarning, match="older hf_posenc"):
        load_checkpoint_in_model(model := made(T5), folder, device_map={"": "cpu"})
    assert torch.equal(outputs(model), outputs(source))
    for other in (ALIBI, STOCK):
        with pytest.warns(UserWarning, match="older hf_posenc"):
            unchanged(model := made(other), lambda m=model: load_checkpoint_in_model(m, folder))


def test_models_inside_another_module_are_compared_one_by_one(tmp_path: Path) -> None:
    pair = torch.nn.ModuleList([made(ALIBI), made(T5)])
    torch.save(pair.state_dict(), tmp_path / "pytorch_model.bin")
    for device_map in (None, {"": "cpu"}):
        load_checkpoint_in_model(torch.nn.ModuleList([made(ALIBI), made(T5)]), tmp_path, device_map)
        for other in ([made(T5), made(ALIBI)], [made(ALIBI), made(ALIBI)], [made(STOCK), made(T5)]):
            wrong = torch.nn.ModuleList(other)
            unchanged(wrong, lambda w=wrong, d=device_map: load_checkpoint_in_model(w, tmp_path, d))


def test_a_model_with_two_paths_is_one_model(tmp_path: Path) -> None:
    """safetensors keeps one of the names of a shared weight, and a folder names a scheme once."""

    def twice(kind: Any) -> Any:
        model = torch.nn.ModuleDict({"first": made(kind)})
        model["second"] = model["first"]
        return model

    NamedSchemes.of(made(T5).state_dict()).check(twice(T5))
    for kind in (ALIBI, STOCK):
        with pytest.raises(CheckpointError, match="t5"):
            NamedSchemes.of(made(T5).state_dict()).check(twice(kind))


def test_errors_of_accelerate_stay_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="should be the path"):
        load_checkpoint_in_model(made(ALIBI), tmp_path / "absent")
    with pytest.raises(ValueError, match="is not a folder containing"):
        load_checkpoint_in_model(made(ALIBI), tmp_path)


def test_a_distributed_checkpoint_that_cannot_be_read_is_reported_by_torch(tmp_path: Path) -> None:
    model = made(ALIBI)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "state")
    (tmp_path / "state" / ".metadata").write_bytes(b"broken")
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(model.state_dict(), checkpoint_id=tmp_path / "state")


@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_strict_loading_functions_refuse_it_before_anything_is_copied(
    tmp_path: Path, into: Any, source: Any, message: str
) -> None:
    weights, model = made(source, seed=1), made(into)
    shards, file = written(weights, tmp_path / "shards", "sharded"), written(weights, tmp_path / "whole", "whole")
    for load, place in (
        (load_sharded_checkpoint, shards),
        (safetensors.torch.load_model, file / "model.safetensors"),
    ):
        assert "strict=False" in unchanged(model, lambda f=load, p=place: f(model, p), message)
    load_sharded_checkpoint(model, shards, strict=False)
    assert torch.equal(model.lm_head.weight, weights.lm_head.weight)
    safetensors.torch.load_model(made(into), file / "model.safetensors", strict=False)


def test_accelerator_refuses_a_state_of_another_scheme(tmp_path: Path) -> None:
    """`Accelerator.load_state` has safetensors' function by its name."""
    source = made(T5, seed=1)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(source)
    accelerator.save_state(str(tmp_path))
    for kind in (STOCK, ALIBI, T5):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator._models.clear()
        model = accelerator.prepare(made(kind))
        if kind is T5:
            accelerator.load_state(str(tmp_path))
            assert torch.equal(outputs(model), outputs(source))
        else:
            unchanged(model, lambda a=accelerator: a.load_state(str(tmp_path)))


def test_quanto_refuses_quantised_weights_of_another_scheme(tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    source = made(T5, seed=1)
    quantised = quanto.QuantizedModelForCausalLM.quantize(source, weights=quanto.qint8)
    state, kinds = source.state_dict(), quanto.quantization_map(source)
    quanto.requantize(same := made(T5), state, kinds)
    assert torch.equal(outputs(same.eval()), outputs(source))
    for kind in (STOCK, ALIBI):
        unchanged(model := made(kind), lambda m=model: quanto.requantize(m, state, kinds))
    quantised.save_pretrained(tmp_path)
    assert torch.equal(outputs(quanto.QuantizedModelForCausalLM.from_pretrained(tmp_path)), outputs(source))


@pytest.mark.parametrize(("into", "source", "message"), PAIRS)
def test_torch_refuses_a_distributed_checkpoint_of_another_scheme(
    tmp_path: Path, into: Any, source: Any, message: str
) -> None:
    dcp.save(made(source).state_dict(), checkpoint_id=tmp_path / "flat")
    dcp.save({"model": made(source), "step": 3}, checkpoint_id=tmp_path / "nested")
    model = made(into)
    words = unchanged(model, lambda: dcp.load(model.state_dict(), checkpoint_id=tmp_path / "flat"), message)
    assert "allow_partial_load=True" in words
    unchanged(model, lambda: dcp.load({"model": model, "step": 0}, checkpoint_id=tmp_path / "nested"), message)
    loaded = {"model": model.state_dict()}
    names = set(loaded["model"])
    dcp.save({"model": made(source).state_dict()}, checkpoint_id=tmp_path / "model")
    dcp.load(loaded, checkpoint_id=tmp_path / "model", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    model.load_state_dict(loaded["model"])  # with the mark of its own scheme
    assert set(loaded["model"]) == names
    assert torch.equal(model.model.embed_tokens.weight, made(source).model.embed_tokens.weight)


def test_torch_loads_a_distributed_checkpoint_of_the_same_scheme(tmp_path: Path) -> None:
    source, model = made(T5), made(T5)
    dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state["model"])
    assert torch.equal(outputs(model), outputs(source))
    # Some weights without the mark beside them are those of a stock model; an optimizer has none.
    step = {"model": {"model.norm.weight": torch.zeros_like(model.model.norm.weight)}}
    with pytest.raises(CheckpointError):
        dcp.load(step, checkpoint_id=tmp_path)
    dcp.save({"model": source.state_dict(), "optimizer": {"step": torch.ones(2)}}, checkpoint_id=tmp_path / "more")
    optimizer = {"optimizer": {"step": torch.zeros(2)}}
    dcp.load(optimizer, checkpoint_id=tmp_path / "more")
    assert bool(optimizer["optimizer"]["step"].all())


def test_functions_imported_by_name_before_the_plugin_are_reached(tmp_path: Path) -> None:
    written(made(ALIBI), tmp_path, "whole")
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
    done = run_fresh(code)
    assert done.stdout.count("refused: ") == 2, done.stdout + done.stderr
    assert done.stdout.count("alibi") >= 2
