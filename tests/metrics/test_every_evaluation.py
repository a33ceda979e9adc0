"""What every evaluation promises, in Python, on the command line and in `evaluate`: a new one joins by a row."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import RopeConfig, UnknownNameError, patch_model
from hf_posenc.cli import main
from hf_posenc.errors import UsageError
from hf_posenc.evaluations import EVALUATIONS
from hf_posenc.loading import load_model, load_tokenizer
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.evaluation import measure_schemes
from hf_posenc.report import Record, Result
from tests.cli.conftest import EVALUATED_WORDS as WORDS, save_evaluated_models
from tests.metrics.conftest import assert_same, fingerprint

TEXT = " ".join(WORDS[index] for index in torch.randint(len(WORDS), (200,), generator=torch.manual_seed(0)))
PAIRS = {"name": "tiny", "examples": [{"input": "the dog ", "target_scores": {"sees": 1, "near": 0}}]}

#: The model of each evaluation, and the options that it is called with.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "dog": ("bert", {"sentence": "the cat chased another cat", "word": "cat"}),
    "properties": ("none", {}),
    "loss": ("bert", {"texts": [TEXT], "lengths": [16, 32], "max_windows": 2, "sliding_window": 16}),
    "sensitivity": ("bert", {"text": TEXT, "gaps": [2], "offsets": [1], "context": 8}),
    "generalization": ("bytes", {"task": "copy", "lengths": [2], "samples": 4}),
    "minimal-pairs": ("bert", {"task": "pairs.json"}),
    "quantized": ("bert", {"texts": [TEXT], "length": 16, "variants": ["ids bfloat16"], "positions": [0]}),
    "attention": ("bert", {"texts": [TEXT], "length": 16}),
    "image-sensitivity": ("vit", {"images": 1, "steps": [2]}),
    "picture-dog": ("vit", {"first": [0, 0], "second": [4, 4]}),
    "resolution": ("vit", {"resolutions": [16, 32], "max_pictures": 6}),
}
#: More dimensions than any head has.
REFUSED = RopeConfig(rotary_dim=1024)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_evaluated_models(tmp_path_factory)


@pytest.fixture(params=EVALUATIONS)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("pairs.json").write_text(json.dumps(PAIRS))
    return str(request.param)


def evaluated(name: str, folder: str | None, schemes: Any = None, model: Any = None) -> Result:
    function = EVALUATIONS[name].measure()
    arguments = ROWS[name][1] | {"schemes": schemes}
    if folder is not None:
        arguments["model"] = load_model(folder) if model is None else model
        if "tokenizer" in inspect.signature(function).parameters:
            arguments["tokenizer"] = load_tokenizer(folder)
    result: Result = function(**arguments)
    return result


def disturbed(folder: str, scheme: str | None) -> Any:
    """A model in another mode than it is measured in, whose scheme, if it is given another one, has learned."""
    model = load_model(folder).train()
    if scheme is not None:
        with torch.no_grad():
            for parameter in patch_model(model, scheme).position_encoding.parameters():
                parameter.normal_()
    next(module for module in model.modules() if not list(module.children())).eval()
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize("scheme", [None, "t5"])
def test_the_model_and_the_random_state_are_left_as_they_were(
    name: str, scheme: str | None, folders: dict[str, str]
) -> None:
    folder, state = folders.get(ROWS[name][0]), torch.get_rng_state()
    if folder is None:
        if scheme is None:
            evaluated(name, None, ["t5", "none"])
        assert torch.equal(torch.get_rng_state(), state)
        return
    model = disturbed(folder, scheme)
    state, encoding, before = torch.get_rng_state(), getattr(model, "position_encoding", None), fingerprint(model)
    assert len(evaluated(name, folder, ["native", "none"], model).subjects) == 2
    as_found = evaluated(name, folder, None, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert getattr(model, "position_encoding", None) is encoding
    assert_same(before, fingerprint(model))
    if scheme is not None:
        assert [subject.scheme for subject in as_found.subjects] == [scheme]
    # Without dropout.
    assert as_found == evaluated(name, folder, None, model.eval())


def test_a_scheme_is_measured_alone_as_in_company_and_one_that_is_refused_is_a_row(
    name: str, folders: dict[str, str]
) -> None:
    folder = folders.get(ROWS[name][0])
    together = evaluated(name, folder, ["alibi", REFUSED, "sinusoidal"])
    assert [subject.scheme for subject in together.subjects] == ["alibi", "rope", "sinusoidal"]
    assert list(together.of("sinusoidal")) == list(evaluated(name, folder, "sinusoidal").of())
    assert "would rotate 1024" in together.subjects[1].error
    assert list(together.of("rope")) == []
    for markdown in (False, True):
        assert f"cannot be measured: {together.subjects[1].error}" in together.table(markdown=markdown)
    assert Result.from_dict(json.loads(json.dumps(together.to_dict(), allow_nan=False))) == together


def test_an_unknown_scheme_is_refused_before_anything_is_measured(name: str, folders: dict[str, str]) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'alibi'"):
        evaluated(name, folders.get(ROWS[name][0]), ["none", "alibbi"])


def test_the_command_prints_what_the_function_returns(
    name: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders.get(ROWS[name][0])
    words = ["eval", name, *([folder] if folder else []), "--schemes", "none", "rope:rotary_dim=1024"]
    for option, value in ROWS[name][1].items():
        if option in ("text", "texts"):
            Path("text.txt").write_text(TEXT)
            option, value = "text", "text.txt"
        words += [f"--{option.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    expected = evaluated(name, folder, ["none", REFUSED])
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected.to_dict()))


@pytest.mark.parametrize("name", [name for name, one in EVALUATIONS.items() if one.data is not None], indirect=True)
def test_a_module_of_evaluate_returns_what_the_function_returns(
    name: str, folders: dict[str, str], load: Any, tmp_path: Path
) -> None:
    model, options = ROWS[name]
    evaluation = EVALUATIONS[name]
    data = options[evaluation.data]
    given = {option: value for option, value in options.items() if option != evaluation.data}
    module = load(name)
    assert "model: a transformers model" in module.inputs_description
    assert evaluation.summary in module.description
    found = module.compute(data=data if isinstance(data, list) else [data], model=folders[model], **given)
    expected = json.loads(json.dumps(evaluated(name, folders[model]).to_dict()))
    assert json.loads(json.dumps(found)) == (expected if evaluation.texts else {data: expected})


@pytest.mark.parametrize("scheme", [None, "t5"])
def test_an_error_half_way_leaves_the_model_as_it_was(scheme: str | None, folders: dict[str, str]) -> None:
    model, calls = disturbed(folders["bert"], scheme), []
    before = fingerprint(model)

    def measure(_: Any) -> list[Record]:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("broken on purpose")
        return []

    with pytest.raises(RuntimeError, match="broken on purpose"):
        measure_schemes(model, ["none", "learned", "alibi", "rope"], measure)
    assert_same(before, fingerprint(model))


def test_the_module_of_evaluate_passes_errors_on(load: Any, folders: dict[str, str], tmp_path: Path) -> None:
    model, tokenizer = load_model(folders["bytes"]), load_tokenizer(folders["bytes"])
    for name, error, message, options in (
        ("generalization", MeasurementError, "whole number", {"model": model, "tokenizer": tokenizer, "lengths": [0]}),
        ("generalization", ValueError, "Pass tokenizer=", {"model": model}),
        ("minimal-pairs", UsageError, "cannot load", {"model": str(tmp_path)}),
        ("los", UnknownNameError, r"Unknown evaluation 'los'\. Did you mean 'loss'", {}),
        ("properties", ValueError, "Unknown evaluation 'properties'", {}),
    ):
        with pytest.raises(error, match=message):
            load(name).compute(data=["copy"], **options)
