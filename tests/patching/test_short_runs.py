"""The short runs of a patch have no effect on the state of the caller."""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounter

from hf_posenc import native_scheme, patch_model, unpatch_model
from hf_posenc.export.programs import tracing
from hf_posenc.preserve import isolated_rng, ordinary_context, without_trace
from tests.models import tiny
from tests.thinning import in_turn

MODELS = ("LlamaForCausalLM", "BertForMaskedLM", "T5ForSequenceClassification", "ViTModel")
SCHEMES = ("alibi", "native")


def built(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    if name == "ViTModel":
        options |= {"image_size": 8, "patch_size": 4}
    return tiny(name, **options)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a hook ran")


@pytest.fixture
def global_hooks() -> Iterator[None]:
    register = nn.modules.module
    handles = [
        register.register_module_forward_pre_hook(refuse),
        register.register_module_forward_hook(refuse, always_call=True),
        register.register_module_full_backward_hook(refuse),
    ]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("name", "scheme"), in_turn(MODELS, SCHEMES))
def test_no_hook_of_the_caller_runs(name: str, scheme: str, global_hooks: None) -> None:
    model = built(name)
    handles = []
    for module in model.modules():
        handles += [
            module.register_forward_pre_hook(refuse, with_kwargs=True, prepend=True),
            module.register_forward_hook(functools.partial(refuse), with_kwargs=True, always_call=True),
            module.register_full_backward_hook(refuse),
            module.register_full_backward_pre_hook(refuse),
            module.register_state_dict_pre_hook(refuse),
        ]
        module._register_load_state_dict_pre_hook(refuse)
    before = [list(module._forward_pre_hooks.items()) for module in model.modules()]
    native_scheme(model)
    patch_model(model, scheme)
    unpatch_model(model)
    assert before == [list(module._forward_pre_hooks.items()) for module in model.modules()]
    with pytest.raises(AssertionError, match="a hook ran"):
        model()
    for handle in handles:
        handle.remove()


class Counting(nn.Module):
    """Notices every call in each way that a module can, and normalises as in training."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))
        self.replaced = nn.Buffer(torch.zeros(()))
        self.seen: list[int] = []
        self.number = 0
        self.norm = nn.BatchNorm1d(32)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.replaced = self.replaced + 1
        self.seen.append(len(self.seen))
        self.number += 1
        self.norm.train()(hidden_states.transpose(1, 2))
        torch.rand(())
        np.random.rand()
        random.random()
        return self.inner(hidden_states, *args, **kwargs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_states_of_modules_configs_and_generators_are_given_back(scheme: str) -> None:
    model = built("LlamaForCausalLM")
    model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    model.model.layers[1].eval()
    random.seed(1)

    def state() -> tuple[Any, ...]:
        modes = [module.training for module in model.modules()]
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        own = vars(model.model.layers[0].mlp)
        plain = copy.deepcopy((own["seen"], own["number"], model.config.to_dict()))
        return modes, plain, random.getstate(), buffers, torch.get_rng_state(), np.random.get_state()[1]

    before = state()
    patch_model(model, scheme)
    unpatch_model(model)
    after = state()
    assert after[:3] == before[:3]
    torch.testing.assert_close(after[3:], before[3:], rtol=0, atol=0)


CONTEXTS: dict[str, Any] = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize(("scheme", "context"), in_turn(["fire", "alibi", "learned", "native", "t5"], CONTEXTS))
def test_the_context_of_the_caller_does_not_matter(context: str, scheme: str) -> None:
    """A patch under a context is the patch without it, and can be trained."""
    ids = torch.arange(8).unsqueeze(0)
    outputs = []
    for chosen in (nullcontext, CONTEXTS[context]):
        model, entered = built("T5ForConditionalGeneration"), chosen()  # type: Any, AbstractContextManager[Any]
        torch.manual_seed(1)
        with entered:
            patch_model(model, scheme, **({"num_positions": 16} if scheme == "learned" else {}))
            assert torch.is_grad_enabled() == (context not in ("inference mode", "no grad") or chosen is nullcontext)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        outputs.append(loss.detach())
    assert torch.equal(*outputs)


def test_layers_that_are_compiled_alone_run_without_a_graph() -> None:
    """A graph of a short run would count towards the number after which torch compiles no more."""
    torch._dynamo.reset()
    model, graphs = built("LlamaForCausalLM"), CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=graphs)
    with torch.compiler.set_stance("fail_on_recompile"):
        unpatch_model(patch_model(model, native_scheme(model)))
    assert graphs.frame_count == 0
    ids = torch.arange(6).unsqueeze(0)
    torch.compile(lambda: patch_model(model, "alibi")(ids, use_cache=False), backend="eager")()
    model(ids, use_cache=False)
    assert graphs.frame_count > 0


def test_the_default_dtype_of_the_caller_does_not_matter() -> None:
    ids, outputs = torch.arange(8).unsqueeze(0), []
    for dtype in (torch.float32, torch.float64):
        model = built("LlamaForCausalLM")
        torch.set_default_dtype(dtype)
        try:
            patch_model(model, "fire")
        finally:
            torch.set_default_dtype(torch.float32)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        outputs.append(model(ids).logits.shape)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("size", "scheme"), in_turn([3, 4, 7], SCHEMES))
def test_small_vocabularies(size: int, scheme: str) -> None:
    options = {"vocab_size": size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = built("LlamaForCausalLM", **options).eval()
    ids = torch.arange(size).unsqueeze(0)
    stock = model(ids).logits
    patch_model(model, scheme)
    assert torch.allclose(model(ids).logits, stock, atol=1e-5) == (scheme == "native")
    assert native_scheme(model).name == "rope"


def test_messages_about_our_tokens_are_not_shown_and_not_used_up(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    logger = transformers.utils.logging.get_logger("transformers.models.llama")
    forward = transformers.LlamaModel.forward

    class Talking(transformers.LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            logger.warning_once("a message that is shown once")
            logger.warning("another message")
            warnings.warn("a warning", UserWarning, stacklevel=1)
            return forward(self, *args, **kwargs)

    model, shown = built("LlamaForCausalLM"), []
    model.model.__class__ = Talking
    verbosity = transformers.logging.get_verbosity()
    request.addfinalizer(lambda: transformers.logging.set_verbosity(verbosity))
    transformers.logging.set_verbosity_warning()  # Another test may have set it.
    monkeypatch.setattr(logger, "handle", lambda record: shown.append(record.getMessage()))
    with warnings.catch_warnings(action="error"):
        patch_model(model, "native")
    assert shown == []
    with pytest.warns(UserWarning, match="a warning"):
        model(torch.arange(3).unsqueeze(0))
    assert shown == ["a message that is shown once", "another message"]


def shared_by_threads() -> list[Any]:
    levels = [logging.getLogger(name).level for name in ("transformers", "torch.onnx")]
    drawn = [random.getstate(), torch.get_rng_state().tolist()]
    hooks = dict(nn.modules.module._global_forward_hooks)
    return [sys.stdout, [*warnings.filters], levels, logging.Logger.warning_once, drawn, hooks]


@pytest.mark.parametrize(
    "context",
    [
        lambda model: tracing(model, "a program"),
        lambda model: without_trace(model, model.device),
        lambda model: isolated_rng(0),
        lambda model: ordinary_context(),
    ],
)
def test_two_threads_restore_what_all_threads_share(
    context: Callable[[Any], AbstractContextManager[None]], global_hooks: None
) -> None:
    models, before = [built("LlamaForCausalLM") for _ in range(2)], shared_by_threads()
    began, second_began = Event(), Event()

    def first() -> None:
        with context(models[0]):
            began.set()
            second_began.wait(0.3)

    def second() -> None:
        began.wait()
        with context(models[1]):
            second_began.set()
            ended.result()

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(first)
        pool.submit(second).result()
    assert shared_by_threads() == before


def test_an_export_hides_nothing_of_other_threads(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    began, may_end, model = Event(), Event(), built("LlamaForCausalLM")

    def trace() -> None:
        with tracing(model, "a program"):
            print("progress")
            warnings.warn("a note", UserWarning, stacklevel=1)
            began.set()
            may_end.wait(10)

    with ThreadPoolExecutor() as pool:
        done = pool.submit(trace)
        began.wait()
        print("mine")
        warnings.warn("my warning", UserWarning, stacklevel=1)
        may_end.set()
        done.result()
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == ["my warning"]
    assert capsys.readouterr().out == "mine\n"
