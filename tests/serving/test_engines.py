"""Patched checkpoints in the backends of vLLM and SGLang, with a small engine in place of the real ones."""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hf_posenc import (
    AlibiConfig,
    ComposedConfig,
    LogNScaleConfig,
    PRopeConfig,
    RopeConfig,
    UnsupportedError,
    list_schemes,
    patch_model,
)
from hf_posenc.checkpoint.agreement import SchemeMismatchError
from hf_posenc.checkpoint.install import ENGINE_ARCHITECTURE, install
from hf_posenc.schemes.needs import Environment
from hf_posenc.schemes.refusals import ENGINES
from tests.export.models import visible
from tests.serving import engine_stub
from tests.serving.engine_stub import Pages, vllm_config, weights_of

Save = Callable[[Any], Path]
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
#: Every registered scheme with its defaults, and others.
SCHEMES: dict[str, Any] = {name: name for name in list_schemes()} | {
    "p_rope": PRopeConfig(theta=100.0),
    "interleaved": {"scheme": "interleaved", "every": 2},
    "scale": ComposedConfig((RopeConfig(), LogNScaleConfig(training_length=4))),
    "trained slopes": AlibiConfig(learnable=True),
    "alibi in half of the layers": {"scheme": "interleaved", "inner": {"scheme": "alibi"}, "every": 2},
    "alibi and rope": ComposedConfig((RopeConfig(), AlibiConfig())),
    "scaled alibi": ComposedConfig((AlibiConfig(), LogNScaleConfig())),
    "dynamic": {"scheme": "rope", "scaling": {"type": "dynamic", "factor": 2.0, "original_max_positions": 64}},
    "random positions": {"scheme": "randomized", "evaluation": "random"},
}
RUN_IN_BOTH = ("none", "p_rope", "learned_rope", "xpos", "sinusoidal", "interleaved", "scale")
RUN_IN_VLLM = ("alibi", "trained slopes", "alibi in half of the layers", "alibi and rope")
llama = functools.partial(visible, "LlamaForCausalLM", vocab_size=64, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.use(monkeypatch)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(scheme: Any) -> Path:
        with warnings.catch_warnings(action="ignore"):
            llama(scheme).save_pretrained(tmp_path)
        return tmp_path

    return save


def load(engine: str, folder: Path, **options: Any) -> Any:
    """The folder as the engine loads it: config, class, weights."""
    config = AutoConfig.from_pretrained(folder)
    model_class = importlib.import_module(f"hf_posenc.serving.{engine}_model").HfPosencForCausalLM
    if engine == "vllm":
        model = model_class(vllm_config=vllm_config(config, **options))
    else:
        model = model_class(config, **options)
    model.load_weights(weights_of(folder))
    return model


def logits_of(model: Any) -> torch.Tensor:
    """`(2, 12, vocabulary)`: two requests, their prompts in pieces, then single tokens."""
    steps = [{0: (0, 7)}, {1: (0, 5), 0: (7, 9)}, {0: (9, 10), 1: (5, 9)}]
    steps += [{0: (10, 11), 1: (9, 10)}, {1: (10, 11), 0: (11, 12)}, {1: (11, 12)}]
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in steps:
        found = model.run({i: IDS[i, a:b] for i, (a, b) in step.items()}, {i: a for i, (a, _) in step.items()})
        for request, logits in found.items():
            rows[request].append(logits)
    return torch.stack([torch.cat(rows[0]), torch.cat(rows[1])])


def expected_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_requests_get_the_logits_of_transformers_or_the_reason(
    engine: Environment, scheme: str, save: Save
) -> None:
    folder = save(SCHEMES[scheme])
    needs = LlamaForCausalLM.from_pretrained(folder).position_encoding.needs()
    drawn = "draws new positions in every call" if scheme == "random positions" else ""
    if not (reason := engine.problem(needs) or drawn):
        # Two sums in float32 in another order; logits of about 10.
        assert torch.allclose(logits_of(load(engine.name.lower(), folder)), expected_logits(folder), atol=2e-4)
        return
    assert scheme not in (*RUN_IN_BOTH, *(RUN_IN_VLLM if engine.name == "vLLM" else ()))
    with pytest.raises(UnsupportedError, match="cannot run the scheme") as error:
        load(engine.name.lower(), folder)
    assert reason in str(error.value)
    assert "model.generate" in str(error.value)


def test_lost_slopes_change_the_logits(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("alibi")
    monkeypatch.setattr(Pages, "adds_slopes", False)
    assert (logits_of(load("vllm", folder)) - expected_logits(folder)).abs().max() > 0.1


def test_lost_scheme_changes_the_logits(save: Save) -> None:
    folder = save("none")
    assert (expected_logits(folder) - llama()(IDS).logits).abs().max() > 0.1


def test_a_kernel_that_ignores_slopes_is_refused(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pages, "backend_name", "FLASHINFER")
    with pytest.raises(UnsupportedError, match=r"FLASHINFER.*TRITON_ATTN"):
        load("vllm", save("alibi"))


def test_several_processes_are_refused(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("none")
    with pytest.raises(UnsupportedError, match="vLLM was started with 2 processes"):
        load("vllm", folder, processes=2)
    context = sys.modules["sglang.srt.runtime_context"]
    monkeypatch.setattr(context, "get_parallel", lambda: types.SimpleNamespace(tp_size=2, pp_size=1))
    with pytest.raises(UnsupportedError, match="SGLang was started with 2 processes"):
        load("sglang", folder)


def test_cuda_graphs_are_off_in_vllm_and_refused_in_sglang(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("none")
    config = vllm_config(AutoConfig.from_pretrained(folder))
    importlib.import_module("hf_posenc.serving.vllm_model").HfPosencForCausalLM(vllm_config=config)
    assert config.compilation_config.cudagraph_mode is engine_stub.CUDAGraphMode.NONE
    graphs = sys.modules["sglang.srt.model_executor.cuda_graph_config"]
    monkeypatch.setattr(graphs, "cuda_graph_fully_disabled", lambda: False)
    with pytest.raises(UnsupportedError, match="--cuda-graph-backend-decode disabled"):
        load("sglang", folder)


def test_a_mixture_of_experts_is_refused(save: Save) -> None:
    from transformers import MixtralConfig

    serving = importlib.import_module("hf_posenc.serving.engine_schemes")
    with pytest.raises(UnsupportedError, match="'mixtral' model is a mixture of experts"):
        serving.refuse_settings("vLLM", MixtralConfig(), processes=1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_weights_of_another_scheme_are_refused(engine: str, save: Save, tmp_path: Path) -> None:
    folder = save("none")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"scheme": "none"', '"scheme": "rope"'))
    with pytest.raises(SchemeMismatchError, match="trained with the position encoding none"):
        load(engine, folder)


def test_stock_weights_under_the_config_of_a_patched_model_are_refused(save: Save) -> None:
    folder = save("none")
    model = load("vllm", folder)
    stock = ((name, tensor) for name, tensor in weights_of(folder) if "position_encoding" not in name)
    with pytest.raises(SchemeMismatchError, match="do not name a position encoding"):
        model.load_weights(stock)


def test_plugins_register_a_class_that_exists() -> None:
    for engine in ("vllm", "sglang"):
        plugin = importlib.import_module(f"hf_posenc.serving.{engine}_plugin")
        plugin.register()
        plugin.register()
    name = sys.modules["vllm"].ModelRegistry.models[ENGINE_ARCHITECTURE]
    module, _, attribute = name.partition(":")
    assert getattr(importlib.import_module(module), attribute).__name__ == ENGINE_ARCHITECTURE
    sglang = sys.modules["sglang.srt.models.registry"].ModelRegistry
    assert sglang.models[ENGINE_ARCHITECTURE].__name__ == ENGINE_ARCHITECTURE


@pytest.mark.parametrize("path", ["vllm.transformers_utils.config", "sglang.srt.utils.hf_transformers.config"])
def test_engines_never_see_the_name_of_the_stock_class(
    path: str, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType(path)
    module.__spec__ = types.SimpleNamespace(_initializing=False)  # type: ignore[assignment]
    module.get_config = AutoConfig.from_pretrained  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, path, module)
    install()
    assert module.get_config(save("none")).architectures == [ENGINE_ARCHITECTURE]
    classifier = LlamaForSequenceClassification(llama().config)
    patch_model(classifier, "none")
    classifier.save_pretrained(tmp_path / "classifier")
    found = module.get_config(tmp_path / "classifier").architectures
    assert found == ["hf_posenc.LlamaForSequenceClassification"]
    llama().save_pretrained(tmp_path / "stock")
    assert module.get_config(tmp_path / "stock").architectures == ["LlamaForCausalLM"]
