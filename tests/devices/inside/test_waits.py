"""Where the host waits for the device in code of this library, and how much each scheme launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from transformers import DynamicCache, StaticCache

import hf_posenc
from hf_posenc import PositionEncodingError
from tests.attention.graphs import DECODED
from tests.devices import spreading, strict_device
from tests.devices.inside.subjects import SCHEMES, SUBJECTS, on_one_device
from tests.kits.decoding import left_padding
from tests.kits.gpu.launches import waits_on_cuda
from tests.matrix.running import LENGTH, VOCABULARY, patched, placed, tokens
from tests.models import tiny
from tests.thinning import mostly_slow

pytestmark = on_one_device


#: More launches per decoded token than the stock model has, in two layers, of what a formula computes from content.
FORMULAS = {
    "selective_rope": 53, "string": 19, "transformer_xl": 25, "swin": 9, "grape_m": 28, "grape_ap": 29, "repo": 11,
    "cope": 20, "disentangled": 6, "grape": 7, "self_extend": 54, "rerope": 53, "dual_chunk": 57,
    "attention_sinks": 62, "hierarchical": 21, "rope_nd": 5, "fope": 12, "composed": 20, "blended": 20, "rope_pp": 4,
}  # fmt: skip


def model_of(scheme: str | None) -> Any:
    config = None if scheme is None else SCHEMES[scheme]
    with torch.device("cpu"):
        try:
            model = patched("llama_gqa", config, attn_implementation="sdpa")
        except PositionEncodingError as refused:
            pytest.skip(str(refused)[:100])
    return model.to(spreading.first())


def waits(call: Callable[[], Any]) -> Counter[str]:
    """How often the third call waits in this library, by place; what is made once is there by then."""
    call()
    call()
    if strict_device.loaded is None:
        found, own = waits_on_cuda(call), "hf_posenc/"
    else:
        with strict_device.listened(strict_device.loaded) as seen:
            call()
        found, own = seen["wait"], f"{Path(hf_posenc.__file__).parent}/"
    return Counter({place: count for place, count in found.items() if place.startswith(own)})


def launches(call: Callable[[], Any]) -> int:
    """How many operators the second call runs; CUDA may launch several kernels for one."""
    if strict_device.loaded is None:
        pytest.skip("the bounds count operators")
    call()
    with strict_device.listened(strict_device.loaded) as seen:
        call()
    return sum(seen["launch"].values())


def step(model: Any, cache: Any) -> Callable[[], Any]:
    """A call that decodes a token."""
    ids = tokens()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return torch.no_grad()(lambda: model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_layer_and_no_token_waits(scheme: str) -> None:
    model, ids = model_of(scheme), tokens()

    def train() -> None:
        model.train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.eval()

    assert not waits(torch.no_grad()(lambda: model(input_ids=ids, use_cache=False)))
    assert not waits(train)
    model.gradient_checkpointing_enable()
    assert not waits(train)
    model.gradient_checkpointing_disable()
    if scheme not in DECODED:
        return
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=2 * LENGTH)):
        assert not waits(step(model, cache))


#: Its gradient is summed by slots, so a mask is read for gaps.
LEARNED = ("t5", "kerple", "tisa", "log_cpb", "blended", "composed")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_is_not_looked_at(scheme: str) -> None:
    model, ids, mask = model_of(scheme), tokens(), left_padding(LENGTH, 3)
    packed = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).unsqueeze(0)

    def train(**inputs: Any) -> Callable[[], None]:
        def step() -> None:
            model.train()
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
            model.eval()

        return step

    assert not waits(torch.no_grad()(lambda: model(input_ids=ids, attention_mask=mask, use_cache=False)))
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        assert waits(train(input_ids=ids, attention_mask=mask)).total() <= (scheme in LEARNED)
        if scheme not in ("normalized_integer", "randomized"):
            assert waits(train(input_ids=ids[:1], position_ids=packed)).total() <= 1
    model.gradient_checkpointing_disable()
    if scheme in DECODED:
        cache = DynamicCache(config=model.config)
        masks = [torch.cat([mask, mask.new_ones(2, count)], 1) for count in range(5)]
        given = iter(masks)

        @torch.no_grad()
        def decode() -> None:
            count = LENGTH if cache.get_seq_length() == 0 else 1
            model(ids[:, :count], attention_mask=next(given), past_key_values=cache, use_cache=True)

        decode()
        assert not waits(decode)


@pytest.mark.parametrize("scheme", ["learned", "binary", "rope", "shaw"])
@torch.no_grad()
def test_positions_of_the_caller_are_checked_on_the_device(scheme: str) -> None:
    model, ids = SUBJECTS["bert"].model(scheme).to(spreading.first()), tokens()
    given = torch.arange(LENGTH).unsqueeze(0)
    assert not waits(lambda: model(input_ids=ids, position_ids=given))
    if strict_device.loaded is not None:
        # A GPU would not run anything after this error.
        with pytest.raises(RuntimeError, match="before the first"):
            model(input_ids=ids, position_ids=given - 1)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scheme", mostly_slow(DECODED, {"none", "learned", "t5", "alibi", "forget_gate"}.__contains__))
@torch.no_grad()
def test_generate_does_not_wait_in_its_steps(scheme: str, padded: bool, options: dict[str, Any]) -> None:
    model, ids = model_of(scheme), tokens()
    mask = left_padding(LENGTH, 3 if padded else 0)

    def generated(steps: int) -> int:
        settings = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
        return waits(lambda: model.generate(ids, attention_mask=mask, **settings, **options)).total()

    few, many = generated(3), generated(9)
    assert many == few <= 2


@pytest.mark.parametrize("scheme", ["none", "learned", "alibi", "rope", "t5", "swin", "rope_nd"])
@pytest.mark.parametrize("subject", ["vit", "bert"])
@torch.no_grad()
def test_models_of_images_and_encoders_do_not_wait(subject: str, scheme: str) -> None:
    model = SUBJECTS[subject].model(scheme).to(spreading.first())
    inputs = {name: one.to(spreading.first()) for name, one in SUBJECTS[subject].inputs().items()}
    inputs.pop("attention_mask", None)
    assert not waits(lambda: model(**inputs))


@pytest.mark.parametrize("scheme", ["t5", "alibi"])
@torch.no_grad()
def test_a_native_bias_is_not_compared_from_layer_to_layer(scheme: str) -> None:
    """Each layer of UMT5 has a separate bias, which is replaced by a zero."""
    with torch.device("cpu"):
        model = placed(tiny("UMT5ForConditionalGeneration").eval(), SCHEMES[scheme]).to(spreading.first())
    assert not waits(lambda: model(input_ids=tokens(), decoder_input_ids=tokens()))


@pytest.mark.parametrize("scheme", DECODED)
def test_a_decoded_token_launches_little_more_than_stock(scheme: str) -> None:
    stock, model = model_of(None), model_of(scheme)
    own, native = (launches(step(one, DynamicCache(config=one.config))) for one in (model, stock))
    assert own - native <= FORMULAS.get(scheme, 3)


#: More launches of a training step of two layers on 512 tokens than the stock model has.
LONG_STEPS = {"alibi": -58, "sandwich": -55, "t5": 7, "kerple": 24, "forget_gate": 52, "shaw": -15, "fire": 129}


@pytest.mark.parametrize("scheme", LONG_STEPS)
def test_a_training_step_on_longer_inputs_launches_little_more_than_stock(scheme: str) -> None:
    ids = torch.randint(5, VOCABULARY, (1, 512))

    def step_of(model: Any) -> Callable[[], Any]:
        return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    own, native = (launches(step_of(model_of(one))) for one in (scheme, None))
    assert own - native <= LONG_STEPS[scheme]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="constants cannot be copied while a compiler traces")
@pytest.mark.parametrize("scheme", mostly_slow([None, *SCHEMES], {None, "rope", "string"}.__contains__))
@torch.no_grad()
def test_a_graph_reads_nothing_from_the_host(scheme: str | None) -> None:
    """Also if the first call of a model is compiled. Such a graph cannot be a CUDA graph."""
    model, found = model_of(scheme), []

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        values = [(node.name, node.meta.get("val")) for node in graph.graph.nodes]
        found.extend(name for name, one in values if isinstance(one, torch.Tensor) and one.device.type == "cpu")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=read), fullgraph=True)
    compiled(tokens(batch=1).to(spreading.first()), use_cache=False)
    assert not found
