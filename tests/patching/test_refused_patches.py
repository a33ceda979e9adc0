"""What `patch_model` refuses: the message says why, and the model is unchanged."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import T5Config

from hf_posenc import (
    AlibiConfig,
    InterleavedConfig,
    LearnedConfig,
    LocalGlobalConfig,
    NativeConfig,
    NoneConfig,
    RopeConfig,
    ScheduleConfig,
    SinusoidalConfig,
    UnsupportedError,
    YarnScaling,
    inspect_model,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.architectures.traces import difference, trace_of
from tests.matrix.architectures import ARCHITECTURES
from tests.models import tiny
from tests.patching.vision.models import vit
from tests.versions import ONE_AXIS, since

YARN = YarnScaling(factor=4.0, original_max_positions=32)
FAR = {"scheme": "rerope", "window": 4}


def in_bfloat16() -> Any:
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    return tiny("LlamaForCausalLM", rope_parameters=rope).to(torch.bfloat16)


def with_axes() -> Any:
    since(*ONE_AXIS)
    return tiny(
        "Qwen2VLTextModel",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )


def with_shared_keys() -> Any:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
    return tiny_model(pair_named("causal-gemma3n_text"), num_hidden_layers=4, num_kv_shared_layers=2, **layers)


#: Models that are no row of the matrix and no architecture by its name.
OTHERS: dict[str, Callable[[], Any]] = {
    "a ViT": vit,
    "capped logits": lambda: tiny("Gemma2ForCausalLM", head_dim=8, attn_logit_softcapping=3.0),
    "bfloat16": in_bfloat16,
    "shared keys": with_shared_keys,
    "positions on axes": with_axes,
}
#: Model, scheme, options, and words of the refusal.
REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    # Names, options and layers
    ("llama_gqa", "alibbi", {}, "Did you mean 'alibi'"),
    ("llama_gqa", "rope", {"rotary_dim": 6000}, "6000"),
    ("llama_gqa", 3, {}, "Not a scheme"),
    ("llama_gqa", RopeConfig(), {"theta": 2.0}, "already a config"),
    ("llama_gqa", "alibi", {"layers": [5]}, "layers with self-attention are"),
    ("llama_gqa", "alibi", {"layers": []}, "contains no layer"),
    ("llama_gqa", "alibi", {"layers": [-1]}, "layers with self-attention are"),
    *(("llama_gqa", "alibi", {"layers": mask}, "For a mask, pass")
      for mask in ([True, False], torch.tensor([False, True]))),
    *(("llama_gqa", "alibi", {"layers": layers}, "must be a collection")
      for layers in (1, True, "01", torch.tensor(1), np.int64(0), {0: False}, b"\0")),
    *(("llama_gqa", "alibi", {"layers": [layer]}, "not a layer index") for layer in (0.0, "0", None)),
    ("llama_gqa", "alibi", {"elsewhere": "none"}, "Pass `layers` as well"),
    # Arrangements
    ("llama_gqa", ScheduleConfig((SinusoidalConfig(), NoneConfig())), {},
     r"\(sinusoidal, none\), but sinusoidal adds .*once, before the first layer"),
    *(("llama_gqa", ScheduleConfig([NoneConfig()] * count), {}, f"schemes for {count} layers.*Give one scheme for each")
      for count in (1, 3)),
    ("llama_gqa", ScheduleConfig(("rope", "none")), {"layers": [1]}, "A schedule already defines"),
    *(("llama_gqa", [config(), AlibiConfig()], {}, "Compose inside")
      for config in (InterleavedConfig, LocalGlobalConfig)),
    *(("llama_gqa", config, {}, "would not be used in any layer")
      for config in (InterleavedConfig(), InterleavedConfig(every=3))),
    *((name, LocalGlobalConfig(), {}, r"would not be used in any layer|layer_types")
      for name in ("gpt2", "mistral_sliding")),
    ("llama_gqa", "learned", {"layers": [0]}, r"\(learned, rope\), but learned adds .*leave out layers="),
    # Parts that do not go together, or not with a model
    ("llama_gqa", ["rope", "p_rope"], {}, "a layer maps them once"),
    ("llama_gqa", ["pope", "shaw"], {}, "changes this width"),
    *(("llama_gqa", ["repo", other], {}, "both replace the logits") for other in ("grape_m", "rerope")),
    ("llama_gqa", {"scheme": "position_clamp", "maximum": 5, "inner": ["selective_rope", "alibi"]}, {},
     "combines neighbouring tokens"),
    # A far correction has to act before the cap of the logits, and a bias acts behind it.
    *(("capped logits", scheme, {}, "caps its logits")
      for scheme in (FAR, {"scheme": "position_shift", "inner": FAR, "offset": 1}, [FAR, "ssmax"])),
    ("shared keys", "rope", {"layers": [3], "elsewhere": "none"}, "reads the keys of layer"),
    ("shared keys", "repo", {"layers": [0, 1], "elsewhere": "none"}, "both need the same rotation"),
    # A scaling of the native rotation
    ("gpt2", NativeConfig(YARN), {}, "for RoPE, and the native scheme is 'learned', which rotates nothing"),
    ("cohere2_interleaved", NativeConfig(YARN), {}, "only layers with a sliding window rotate"),
    ("positions on axes", NativeConfig(YARN), {}, "the rotation 'mrope', which has no scaling"),
    ("deepseek_v3_mla", NativeConfig(replace(YARN, mscale=1.0, mscale_all_dim=1.0)), {},
     "takes a factor of its softmax"),
    ("bfloat16", NativeConfig(YARN), {}, r"given by a list of frequencies .* from_pretrained\(dtype=...\)"),
    # Pictures and videos
    *(("a ViT", scheme, options, r"2 axes.*built for 3")
      for scheme, options in (("rope_nd", {"grid": (4, 4)}), ("mrope", {}), ("alibi", {"axes": 3}))),
    *((name, scheme, {}, message)
      for scheme in (SinusoidalConfig(), LearnedConfig(num_positions=512))
      for name, message in (
          ("vision-mobilevit", "nor a list of layers that read vectors of tokens"),
          ("video-videoprism_vision_model", r"separate tables \(spatial.*temporal"),
      )),
    # Parts, and what would fail in a call
    ("t5_encoder", "alibi", {"part": "encoder"}, r"Known: text\. 'encoder' is a stack of the part 'text'"),
    ("llama_gqa", T5Config(), {}, r"Not a scheme: the T5Config of transformers; .* such as hf_posenc\.T5Config\(\)"),
    ("image-text-llava", "alibi", {"part": "txt"}, r"Unknown part 'txt'.*Known: text, vision"),
    ("vision-pvt", "alibi", {"part": "vision", "axes": 2}, "same grid"),
    ("vision-seggpt", "learned", {"part": "vision", "num_positions": 512}, "A short run of the stock model succeeds"),
    ("other-pi0", "pope", {"part": "text"}, "layers without the scheme read the same cache"),
    ("other-bros", "alibi", {}, "distances of boxes"),
]  # fmt: skip


@functools.cache
def model_of(name: str) -> Any:
    """Shared by all rows: nothing may change it."""
    if name in OTHERS:
        return OTHERS[name]()
    return ARCHITECTURES[name].build() if name in ARCHITECTURES else tiny_model(pair_named(name))


@pytest.mark.parametrize(("name", "scheme", "options", "message"), REFUSED, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_the_reason_is_said_and_the_model_is_left_alone(
    name: str, scheme: Any, options: dict[str, Any], message: str
) -> None:
    model = model_of(name)
    before = trace_of(model)
    with pytest.raises((ValueError, TypeError, UnsupportedError), match=message):
        patch_model(model, scheme, **options)
    assert not difference(before, trace_of(model))
    assert not hasattr(model, "position_encoding")


def test_what_fails_in_a_stock_model_is_refused_in_place_of_another_scheme_too() -> None:
    """A short run of `grape_m` in Swin fails."""
    model = copy.deepcopy(model_of("vision-swin"))
    with pytest.raises(UnsupportedError, match="cannot be computed"):
        patch_model(model, "grape_m")
    patch_model(model, "alibi")
    before = trace_of(model)
    with pytest.raises(UnsupportedError, match="cannot be computed"):
        patch_model(model, "grape_m")
    assert not difference(before, trace_of(model))


@pytest.mark.parametrize("config", [InterleavedConfig, LocalGlobalConfig])
def test_arrangements_are_not_nested(config: Any) -> None:
    with pytest.raises(ValueError, match="one layer"):
        config(ScheduleConfig((NoneConfig(),)))


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel"):
        patch_model(nn.Linear(2, 2), "alibi")


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile, nn.Sequential])
@pytest.mark.parametrize("function", [unpatch_model, inspect_model, native_scheme])
def test_the_model_in_a_wrapper_is_named(wrapper: Any, function: Any) -> None:
    with pytest.raises(
        TypeError, match=r"Pass the BertForMaskedLM inside it: (model\.get_submodule\(.*\))\."
    ) as raised:
        function(model := wrapper(model_of("bert")))
    expression = raised.value.args[0].split(": ")[1].rstrip(".")
    function(eval(expression, {"model": model}))


def test_a_warning_turned_into_an_error_leaves_the_model_alone() -> None:
    model = model_of("bert")
    before = trace_of(model)
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="direction="):
        patch_model(model, "integer")
    assert not difference(before, trace_of(model))
