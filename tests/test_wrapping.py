"""Wrapped functions of other packages: they accept the same calls as before, and the page lists them."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posenc.patching  # most wrappers do nothing before
from hf_posenc.wrapping import WRAPPERS, Call, wrap
from tests.models import tiny

#: Engines that need a GPU; the function of both takes at least these arguments.
_ENGINES = ("vllm.", "sglang.")


def _engine_config(model: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any: ...


def wrapped(name: str) -> Any:
    """The function behind a name; that of an engine is made up."""
    if name.startswith(_ENGINES):
        return _wrapped_twin(WRAPPERS[name], _engine_config)
    parts = name.split(".")
    cut = next(i for i, part in enumerate(parts) if part.lstrip("_")[0].isupper() or i == len(parts) - 1)
    owner: Any = importlib.import_module(".".join(parts[:cut]))
    for part in parts[cut:-1]:
        owner = getattr(owner, part)
    if not hasattr(owner, parts[-1]):
        pytest.skip(f"this version has no {name}")
    raw = inspect.getattr_static(owner, parts[-1])
    return getattr(raw, "__func__", raw)


def _wrapped_twin(wrapper: Callable[[Call], Any], function: Callable[..., Any]) -> Any:
    """A function in a separate module, with a wrapper."""
    module: Any = ModuleType("tests.twin")
    module.__spec__ = SimpleNamespace(_initializing=False)
    module.twin = function
    sys.modules[module.__name__] = module
    try:
        wrap(module.__name__, {"twin": wrapper})
    finally:
        del sys.modules[module.__name__], WRAPPERS["tests.twin.twin"]
    return module.twin


every_wrap = pytest.mark.parametrize("name", sorted(WRAPPERS))


@every_wrap
def test_signatures_are_those_of_the_original(name: str) -> None:
    function = wrapped(name)
    original = function._hf_posenc_wraps
    assert inspect.signature(function) == inspect.signature(original)
    # What `inspect.getfullargspec` reads, which does not look behind a wrapper.
    assert inspect.signature(function, follow_wrapped=False) == inspect.signature(original)
    assert function.__name__ == original.__name__
    if not name.startswith(_ENGINES) and "cls" not in inspect.signature(function).parameters:
        assert pickle.loads(pickle.dumps(function)) is function
    assert {attribute for attribute in dir(original) if not hasattr(function, attribute)} == set()


@every_wrap
def test_wrong_calls_raise_the_error_of_the_original(name: str) -> None:
    function = wrapped(name)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    wrong: Any = () if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in required) else (None,) * 20
    with pytest.raises(TypeError) as expected:
        function._hf_posenc_wraps(*wrong)
    with pytest.raises(TypeError) as found:
        function(*wrong)
    assert str(found.value) == str(expected.value)


class _Stock:
    """Arguments for calls about stock models, by the names of parameters."""

    def __init__(self, folder: Path) -> None:
        model, config = tiny("LlamaForCausalLM"), LlamaConfig()
        trainer = SimpleNamespace(
            model=model,
            callback_handler=SimpleNamespace(callbacks=[]),
            state=SimpleNamespace(best_model_checkpoint=str(folder)),
        )
        tuner = SimpleNamespace(peft_config={"default": SimpleNamespace()})
        self.by_function = {
            "PreTrainedConfig.__post_init__": {"self": config},
            "Trainer._load_from_checkpoint": {"self": trainer},
            "Trainer._load_best_model": {"self": trainer},
            "BaseTuner.inject_adapter": {"self": tuner},
            "PeftConfigMixin.save_pretrained": {"self": config},
            "Trainer.create_model_card": {"self": SimpleNamespace(is_world_process_zero=lambda: False)},
            "PeftModel.save_pretrained": {"self": tuner, "selected_adapters": ["default"]},
            "load_model": {"filename": str(folder / "none.safetensors")},
            "state_dict_loader._load_state_dict": {"state_dict": {}},
            "PeftAdapterMixin.load_adapter": {"adapter_kwargs": {}, "load_config": None},
        }
        self.shared = {
            "self": model, "cls": LlamaForCausalLM, "model": model, "config": config, "adapter_name": "default",
            "state_dict": model.state_dict(), "planner": None, "is_main_process": True, "push_to_hub": False,
            "peft_config": SimpleNamespace(is_prompt_learning=False), "strict": False, "msg": "no",
        }  # fmt: skip
        self.folder = str(folder)
        result = (model, {"unexpected_keys": []})
        self.results = {
            "PreTrainedModel.from_pretrained": result,
            "PreTrainedConfig.get_config_dict": ({}, {}),
            "get_config": config,
            "get_gen_models": [],
            "build_server": SimpleNamespace(add_exception_handler=lambda *_: None),
            "from_json_file": {},
        }

    def arguments(self, name: str, signature: inspect.Signature) -> inspect.BoundArguments:
        """A value for every parameter; those without one in the tables get the empty folder."""
        known = self.shared | next((own for end, own in self.by_function.items() if name.endswith(end)), {})
        bound = signature.bind_partial()
        for parameter in signature.parameters.values():
            several = {parameter.VAR_KEYWORD: {"another": 1}, parameter.VAR_POSITIONAL: ()}
            bound.arguments[parameter.name] = several.get(parameter.kind, known.get(parameter.name, self.folder))
        return bound


@every_wrap
@pytest.mark.parametrize("how", ["positional", "keyword", "required only"])
def test_every_argument_is_passed_on_however_it_is_given(name: str, how: str, tmp_path: Path) -> None:
    signature = inspect.signature(wrapped(name))
    stock = _Stock(tmp_path)
    given = stock.arguments(name, signature)
    result = next((found for end, found in stock.results.items() if name.endswith(end)), object())
    received: list[dict[str, Any]] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        received.append(dict(signature.bind(*args, **kwargs).arguments))
        if received[1:]:
            raise LookupError("of the original")
        return result

    original.__signature__ = signature  # type: ignore[attr-defined]
    twin = _wrapped_twin(WRAPPERS[name], original)
    keywords = next((each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD), "")
    extra = given.arguments.pop(keywords, {})
    if how == "required only":
        for parameter in signature.parameters.values():
            if parameter.default is not parameter.empty and parameter.name not in ("config", "cache_dir"):
                given.arguments.pop(parameter.name, None)
    if how == "positional":
        args, kwargs = given.args, given.kwargs | extra
    else:
        kinds = {each.name: each.kind for each in signature.parameters.values()}
        args = ()
        kwargs = {n: value for n, value in given.arguments.items() if "VAR" not in kinds[n].name} | extra

    found = twin(*args, **kwargs)
    if name.endswith("PreTrainedModel.from_pretrained"):
        extra = extra | {"output_loading_info": True}  # it looks for keys that only a scheme has
        result = result[0]
    assert found is result or (found == result and isinstance(result, list | tuple | dict))
    expected = {n: value for n, value in given.arguments.items() if value != ()} | ({keywords: extra} if extra else {})
    assert received[0] == expected
    with pytest.raises(LookupError, match="of the original"):
        twin(*args, **kwargs)


def test_a_call_is_changed_by_name() -> None:
    def function(first: int, /, second: int = 2, *others: int, third: int = 3, **more: int) -> Any:
        return first, second, others, third, more

    call = Call(function, inspect.signature(function), (1,), {"fourth": 4})
    assert (call["first"], call["second"], call["fourth"], call["others"]) == (1, 2, 4, ())
    assert call.run(second=5, third=6, fifth=7) == (1, 5, (), 6, {"fourth": 4, "fifth": 7})
    assert call.run(more={"sixth": 6}) == (1, 2, (), 3, {"sixth": 6})
    assert call.run() == (1, 2, (), 3, {"fourth": 4})
    with pytest.raises(hf_posenc.UnsupportedError, match="has no argument 'seventh'"):
        call["seventh"]


def _by_closure(inner: Any) -> Any:
    return lambda self, *args, **kwargs: inner(self, *args, **kwargs)


def _bound(inner: Any) -> Any:
    bound = inner.__get__(3)

    def twin(self: int, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return twin


@pytest.mark.parametrize("others", [(_by_closure,), (_bound,), (_by_closure, _bound, _by_closure)])
def test_arguments_are_found_behind_a_wrapper_of_others_that_names_none(others: tuple[Any, ...]) -> None:
    def twin(self: int, folder: str, strict: bool = True, **more: int) -> Any:
        return self, folder, strict, more

    outer: Any = twin
    for other in others:
        outer = other(outer)
    wrapper = _wrapped_twin(lambda call: (call["folder"], call["strict"], call.run(strict=False, more={})), outer)
    assert inspect.signature(wrapper) == inspect.signature(outer)
    for found in (wrapper(3, "a"), wrapper(3, folder="a"), wrapper(3, "a", another=1)):
        assert found == ("a", True, (3, "a", False, {}))


def test_a_function_that_is_missing_stops_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "package_of_the_future.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    name = "package_of_the_future"
    wrap(name, {"gone": Call.run})
    with pytest.raises(ImportError, match=f"wraps {name}.gone, which {name} does not have"):
        importlib.import_module(name)
    del WRAPPERS[f"{name}.gone"]


def test_the_page_lists_what_is_wrapped() -> None:
    page = Path(hf_posenc.__file__).parents[1] / "docs/explanation/wrapped_functions.md"
    rows = [line.split("|")[1:-1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert sorted(row[0].strip(" `") for row in rows) == sorted(WRAPPERS)
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)
