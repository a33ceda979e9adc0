"""A function of the distance becomes a scheme that works wherever a scheme works."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_posenc import CheckpointError, SequenceLengthError, distance_bias, learned_per_head, option, patch_model
from hf_posenc.schemes import BuildContext, registry
from hf_posenc.schemes.bias.distance_function import config_of_function
from tests.fresh import printed, run_fresh
from tests.models import tiny

PLACE = BuildContext(hidden_size=16, num_heads=2, head_dim=8)


@pytest.fixture(autouse=True)
def registry_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))


def test_the_name_is_the_config_of_the_scheme() -> None:
    @distance_bias(causal_only="steep sees the past only.")
    def steep(distance: Tensor, strength: float, times=option(2, minimum=1)):  # noqa: B008
        return strength * times * distance

    assert registry.get_scheme("steep") is steep
    assert steep(strength=2).build(PLACE).logit_bias(torch.tensor([-1, 0])).tolist() == [[-4.0, 0.0]] * 2
    assert registry.as_scheme(steep, strength=1.0) == steep(1.0)
    with pytest.raises(ValueError, match="needs the option strength"):
        registry.as_scheme("steep")
    with pytest.raises(ValueError, match="expected an integer"):
        steep(1.0, times=0.5)
    with pytest.raises(ValueError, match="at least 1"):
        steep(1.0, times=0)
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"strength is .*; expected a finite number"):
            steep(number)
    with pytest.raises(ValueError, match="steep sees the past only"):
        steep(1.0).build(BuildContext(16, 2, 8, causal=False))


def several(distance: Tensor, *powers: float) -> Tensor:
    return distance


def taken(distance: Tensor, build: float = 1.0) -> Tensor:
    return distance


def of_module(distance: Tensor, training: Tensor = learned_per_head(1.0)) -> Tensor:
    return distance


def with_a_list(distance: Tensor, slopes: list[float] = [1.0]) -> Tensor:  # noqa: B006
    return distance


def nothing() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (several, "The parameter 'powers' of several cannot be an option"),
        (taken, "of taken cannot be an option of a scheme: it collects several arguments, or has a name"),
        (of_module, "of of_module cannot be an option"),
        (with_a_list, "'slopes' of with_a_list is a list.*Use a tuple"),
        (nothing, "nothing has no parameters;"),
    ],
)
def test_a_function_that_is_no_scheme_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distance_bias(function)


def by_the_wrong_axis(distance: Tensor, num_heads: int) -> Tensor:
    return distance.unsqueeze(-1).expand(*distance.shape, num_heads)


def a_number(distance: Tensor) -> float:
    return 1.0


def the_same_everywhere(distance: Tensor) -> Tensor:
    return distance.mean()


def hidden_by_a_product(distance: Tensor) -> Tensor:
    return -torch.inf * distance.abs()


def without_the_one(distance: Tensor) -> Tensor:
    return -distance.abs().log()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            by_the_wrong_axis,
            r"by_the_wrong_axis returned the shape \(3, 4\) for distances of the shape \(3,\); expected \(4, 3\), one "
            r"value per head and distance, or \(3,\), the same for all heads.",
        ),
        (the_same_everywhere, r"the_same_everywhere returned the shape \(\) for"),
        (a_number, "a_number returned float; expected a tensor"),
        (hidden_by_a_product, "^hidden_by_a_product returned nan for the distance 0, so"),
        (without_the_one, "returned inf for the distance 0, so"),
    ],
)
def test_a_result_that_is_no_bias_is_refused(function: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        patch_model(tiny("LlamaForCausalLM"), config_of_function(function)())


def failing(distance: Tensor, longest: int) -> Tensor:
    if distance.numel() > longest:
        raise KeyError("no table")
    return distance


@pytest.mark.parametrize("longest", [2, 3])
def test_an_error_says_which_function_of_which_scheme_raised_it(longest: int) -> None:
    model = tiny("LlamaForCausalLM")
    with pytest.raises(KeyError, match=rf"failing \(module {__name__}, line \d+\), which .* 'failing.* calls"):
        patch_model(model, config_of_function(failing)(longest))(torch.arange(9)[None])


def test_an_error_of_this_package_under_a_hook_of_accelerate_is_not_called_own_code() -> None:
    model = patch_model(tiny("LlamaForCausalLM"), "learned")
    for module in model.position_encoding.modules():
        add_hook_to_module(module, ModelHook())
    with pytest.raises(SequenceLengthError) as raised:
        model(torch.arange(70)[None])
    assert not hasattr(raised.value, "__notes__")


MODULE = """
import hf_posenc

@hf_posenc.distance_bias(per_layer=True)
def sloped(distance, head, slope: "Tensor" = hf_posenc.learned_per_head(0.5), reach: float = 2.0):
    \"\"\"Subtracts what every head learns from the logits.\"\"\"
    return -slope * head * (distance.abs() / reach).log1p()
"""
LOAD = """
import torch, transformers
import hf_posenc
from hf_posenc.cli import main

model = transformers.AutoModelForCausalLM.from_pretrained("saved")
assert model.position_encoding.config.to_dict() == {"scheme": "sloped", "slope": 0.5, "reach": 3.0}
with torch.no_grad():
    assert torch.equal(model(torch.arange(9)[None]).logits, torch.load("logits.pt"))
assert main(["schemes", "sloped"]) == 0
try:
    hf_posenc.export_model(model, "exported", to="stock")
except hf_posenc.UnsupportedError as error:
    print(error)
"""


@pytest.mark.on_cpu("the other process computes on the CPU")
@torch.no_grad()
def test_a_saved_model_loads_in_a_process_that_imports_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_schemes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sloped = importlib.import_module("my_schemes").sloped
    model = patch_model(tiny("LlamaForCausalLM"), "sloped", reach=3.0)
    assert pickle.loads(pickle.dumps(model.position_encoding.config)) == sloped(reach=3.0)
    for parameter in model.position_encoding.parameters():
        parameter.normal_()
    torch.save(model(torch.arange(9)[None]).logits, tmp_path / "logits.pt")
    model.save_pretrained(tmp_path / "saved")
    imports = {"HF_POSENC_IMPORT": "my_schemes", "HF_POSENC_IMPORT_FROM": str(tmp_path)}
    text = printed(run_fresh(LOAD, folder=tmp_path, environment=imports))
    assert "Subtracts what every head learns from the logits." in text
    assert "  slope: float, default 0.5" in text
    assert "has no such logit bias" in text
    monkeypatch.delitem(registry._SCHEMES, "sloped")
    with pytest.raises(CheckpointError, match="Unknown scheme 'sloped'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
